"""Rounds that begin without a draft, where target and draft model take turns on one GPU.

What is retrieved is there as soon as a verdict is; a draft takes longer than a forward. So a round that has much to
verify already begins at once, and the draft model, which would slow it down, is not told of the commit before it yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from outrider.core.statistics import RunningMean

LEARNING_RATE = 0.05
"""Weight of one round in what is known of how right expectations are."""
MAX_IN_A_ROW = 16
"""Rounds without a draft behind which one has a draft in any case: so it is known what drafts bring and how long they
take."""


class ExpectedTokens(NamedTuple):
    """Tokens that a session's next round is expected to bring, the target's own among them."""

    with_draft: float
    at_once: float
    """Those of a round that begins without a draft."""
    is_greedy: bool
    """True if the target draws the most probable token: then drafts and retrieved tokens are right more often."""


class SkippingSession(Protocol):
    """A session that takes turns with the draft model."""

    def expected_tokens(self) -> ExpectedTokens | None:
        """Returns what its next round is expected to bring. None means that it needs a draft in any case."""

    def skip_draft(self) -> None:
        """Begins the next round without a draft."""


class DraftSkips:
    """Chooses rounds without drafts for all sessions that share forwards. Owned by the engine's thread.

    Expectations are corrected by what rounds have brought: those chosen for what was expected of them bring less.
    """

    def __init__(self) -> None:
        self._shares: dict[tuple[bool, bool], RunningMean] = {}
        """Tokens that rounds brought, as a share of those expected: by whether they skipped a draft, and are greedy."""
        self._num_in_a_row = 0

    def choose(self, sessions: Sequence[SkippingSession], round_ms: float, draft_ms: float | None) -> None:
        """Begins the next rounds of all sessions without drafts if that brings more tokens in its time.

        Args:
            sessions: All that share a forward; at least one.
            round_ms: Time of a round without the wait for a draft, in milliseconds.
            draft_ms: Time from a commit to its draft. None means that it is not known.
        """
        skips = draft_ms is not None and self._num_in_a_row < MAX_IN_A_ROW and self._pays(sessions, round_ms, draft_ms)
        self._num_in_a_row = self._num_in_a_row + 1 if skips else 0
        if skips:
            for session in sessions:
                session.skip_draft()

    def _pays(self, sessions: Sequence[SkippingSession], round_ms: float, draft_ms: float) -> bool:
        with_drafts = at_once = 0.0
        for session in sessions:
            expected = session.expected_tokens()
            if expected is None:
                return False
            with_drafts += expected.with_draft * self._share(expected.is_greedy, skips=False).get(1.0)
            at_once += expected.at_once * self._share(expected.is_greedy, skips=True).get(1.0)
        return at_once * (round_ms + draft_ms) > with_drafts * round_ms

    def _share(self, is_greedy: bool, *, skips: bool) -> RunningMean:
        """Returns the mean of what such rounds brought, as a share of what was expected of them."""
        if (skips, is_greedy) not in self._shares:
            mean = self._shares[skips, is_greedy] = RunningMean(LEARNING_RATE)
            mean.add(1.0)
        return self._shares[skips, is_greedy]

    def learn(self, expected: ExpectedTokens, num_tokens: int, *, has_skipped: bool) -> None:
        """Learns from a round.

        Args:
            expected: What was expected of it.
            num_tokens: Tokens that it brought.
            has_skipped: True if it began without a draft.
        """
        share = self._share(expected.is_greedy, skips=has_skipped)
        share.add(num_tokens / (expected.at_once if has_skipped else expected.with_draft))
