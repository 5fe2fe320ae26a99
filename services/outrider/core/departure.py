"""The departure of a draft: it leaves when one more token would be worth less than the target's wait for it.

A text grows in rounds: the target waits for n forwards of the draft model, then verifies. Let c be the time of a draft
forward divided by that of a round that does not wait, P(n) the probability that the target keeps the n-th token (and
all before it), a its ratio to P(n - 1). The worth of the n-th token follows from a renewal argument.

**Draft and target take turns.** Each round brings 1 + P(1) + ... + P(n) tokens in the time 1 + n c. One more token
raises their quotient, the speed, while it brings more in its time than the round does on average:

    P(n + 1) / c > (1 + P(1) + ... + P(n)) / (1 + n c).

With P(n) = a ** n this is where Theorem 3.8 of Leviathan et al. (2023) has its maximum.

**The draft model drafts while the target works.** Then the target waits only after a miss. Let g be the speed (in
tokens per time of a round), V the tokens of a round that follows a hit and so does not wait, s the probability that
another such round follows. A hit is worth h = (V - g) / (1 - s) tokens more than a miss: the tokens of those rounds
beyond the usual. One more token brings P(n + 1), costs c g, and makes a hit less probable by (1 - a) P(n + 1), because
it must be kept, too. So it is worth its time while P(n + 1) (1 - (1 - a) h) > c g. For a chain V = (1 - s) / (1 - a).
Then (1 - a) h = 1 - g / V, the speed cancels out, and the condition becomes

    P(n + 1) / c > V.

Both say the same: a draft forward that the target waits for must bring more than the target otherwise brings in that
time. That is the mean of all rounds where all of them wait, and the mean of the rounds that do not wait where some do
not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.core.statistics import RunningMean


@dataclass(slots=True)
class PairTimes:
    """Holds the times of forwards, as far as one side knows them."""

    draft_us: RunningMean = field(default_factory=RunningMean)
    """Time of a forward of the draft model that a target waits for and that reads no prompt, in microseconds."""
    target_us: int = 0
    """Latest time of a target forward that a session was told, in microseconds. The next session begins with it. 0
    means not known."""


class AwaitedDraft(NamedTuple):
    """The worth of a session's draft now, and its cost so far."""

    num_kept: float
    """Expected tokens of a round that begins now."""
    num_gained: float
    """Expected further tokens by another forward of the draft model. 0 if the draft has ended."""
    num_forwards: int
    """Forwards since the last commit."""
    round_us: float
    """Time of a round of the target without its draft, in microseconds. 0 means not known."""


def is_worth_waiting(drafts: Sequence[AwaitedDraft], forward_us: float) -> bool:
    """Returns True if the target brings more tokens per time by waiting for another forward of the draft model.

    Sessions that take turns share both models' forwards: all of them wait for the longest draft. So the gain of a
    forward for all sessions that go on is compared with the loss of all sessions that wait.

    Args:
        drafts: Those of all sessions that take turns with the target together; at least one.
        forward_us: Time of a forward of the draft model, in microseconds.
    """
    # The maximum, because a new session may not know it yet.
    round_us = max(draft.round_us for draft in drafts)
    if not round_us:
        return True
    taken_us = round_us + forward_us * max(draft.num_forwards for draft in drafts)
    # A forward raises the mean if it brings more in its time than the round brings on average without it.
    gained, kept = sum(draft.num_gained for draft in drafts), sum(draft.num_kept for draft in drafts)
    return gained * taken_us >= kept * forward_us


def least_awaited(num_tokens: float, draft_share: float, acceptance_rate: float) -> float:
    """Returns the least probability of a path after which another token is worth the wait of a target that otherwise
    need not wait. It is above 1 if not even the first token is.

    Args:
        num_tokens: Tokens of a round that need not wait (V).
        draft_share: Time of a draft forward by that of such a round (c).
        acceptance_rate: Share of the tokens that are kept where those before them are (a).
    """
    return draft_share * num_tokens / acceptance_rate


def tokens_of_hit(draft_share: float, acceptance_rate: float, max_chain_len: int) -> float:
    """Returns the tokens of a round that need not wait (V) of a chain that grows by a token with each draft forward. It
    is a first guess, until such rounds have shown theirs: a tree's forwards take longer while the target works.

    Args:
        draft_share: Time of a draft forward by that of such a round (c).
        acceptance_rate: Share of the tokens that are kept where those before them are (a).
        max_chain_len: Most tokens that are verified in a round.
    """
    num_drafted = min(max_chain_len + 1, 1 / draft_share) if draft_share else max_chain_len + 1
    return (1 - acceptance_rate**num_drafted) / (1 - acceptance_rate)


def logarithm(probability: float) -> float:
    """Returns the logarithm of a probability; minus infinity of 0."""
    return math.log(probability) if probability else -math.inf
