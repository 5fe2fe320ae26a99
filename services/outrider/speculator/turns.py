"""The end of drafts that the target waits for: where another forward of the draft model is not worth its time.

Sessions that take turns share both models' forwards: all of them wait for the longest draft. So what a forward brings
to all that go on is compared with what all of them lose by waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class AwaitedDraft(NamedTuple):
    """Says what a session's draft is worth now, and what it has cost."""

    num_kept: float
    """Tokens that a round is expected to bring that begins now."""
    num_gained: float
    """Tokens that it is expected to bring more for another forward of the draft model. 0 if the draft has ended."""
    num_forwards: int
    """Forwards since the last commit."""
    round_us: float
    """Time of a round of the target without its draft, in microseconds. 0 means not known."""


def is_worth_waiting(drafts: Sequence[AwaitedDraft], forward_us: float) -> bool:
    """Returns True if the target says more in its time by waiting for another forward of the draft model.

    Args:
        drafts: Those of all sessions that take turns with the target together; at least one.
        forward_us: Time of a forward of the draft model, in microseconds.
    """
    # One that has just come may not know it yet.
    round_us = max(draft.round_us for draft in drafts)
    if not round_us:
        return True
    taken_us = round_us + forward_us * max(draft.num_forwards for draft in drafts)
    # What brings more in its time than the rest has done raises the mean.
    gained, kept = sum(draft.num_gained for draft in drafts), sum(draft.num_kept for draft in drafts)
    return gained * taken_us >= kept * forward_us
