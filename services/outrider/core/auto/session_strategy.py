"""A strategy as one session sees it: its own rounds next to the record of all sessions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.auto.history import DecayedRate, StrategyHistory, TemperatureClass
from outrider.core.auto.strategies import Decision, Strategy

MEMORY_ROUNDS = 128
"""Rounds of the session after which a round's weight has fallen to 1/e."""
PRIOR_ROUNDS = 24.0
"""Greatest weight of the record of all sessions, in rounds of the session. It is halved each time that the session
abandons the strategy: its text then differs from the others'."""
RECENT_ROUNDS = 6
"""Rounds that are remembered of a strategy that the session abandons: the rounds that caused it."""
EASE_TOKENS = 48.0
"""Expected tokens of other strategies at which they decide half of the estimate how easy this text is."""
MAX_ROUND_DEFICIT = 3.0
"""Most tokens that one round adds to a strategy's deficit: a hiccup of the host is not the strategy's fault."""
HOLD_ROUNDS = 8
"""Rounds for which a session does not return to a strategy that it has abandoned; doubled each time."""

_KEPT_PER_ROUND = math.exp(-1 / MEMORY_ROUNDS)
_KEPT_PER_RECENT_ROUND = 1 - 1 / RECENT_ROUNDS


@dataclass(frozen=True, slots=True)
class Estimate:
    """The rate that a strategy is expected to have in a session."""

    rate: float
    """Tokens for the time of a plain round."""
    error: float
    """Standard error of the rate."""
    weight: float
    """Rounds that the rate is known from."""
    deviation: float
    """Standard deviation of the rate of single rounds."""


class SessionStrategy:
    """Holds what one session has measured of a strategy, and whether it may be used now."""

    __slots__ = (
        "_decayed_at",
        "_expected",
        "_num_abandoned",
        "_num_tokens",
        "_own",
        "_recent",
        "_time_ms",
        "deficit",
        "held_until",
        "is_available",
        "is_drafted",
        "is_lost",
        "num_futile",
        "num_rounds",
        "record",
        "strategy",
        "tokens_behind",
    )

    def __init__(self, strategy: Strategy, history: StrategyHistory, temperature_class: TemperatureClass) -> None:
        self.strategy = strategy
        self.record = history.record(strategy, temperature_class)
        """Rounds of all sessions, this one included."""
        self.is_drafted = strategy.method.has_draft_model
        """True if a draft model is needed."""
        self.is_available = True
        self.is_lost = False
        """True if it was available in rounds of this session, and is no longer."""
        self.num_rounds = 0
        """Rounds of this session that used it, typical or not."""
        self.tokens_behind = 0.0
        """Tokens that plain rounds would have brought more since this use began. Negative means that it is ahead."""
        self.deficit = 0.0
        """Tokens fewer than plain rounds would have brought, since it was last level with them; long rounds count in
        part. Never negative."""
        self.num_futile = 0
        """Rounds in a row, up to the last one of this use, that brought no more than a plain round does."""
        self.held_until = 0
        """Round of the session before which it is not used again."""
        self._num_abandoned = 0
        self._num_tokens = 0.0
        self._time_ms = 0.0
        self._own = DecayedRate()
        self._recent = DecayedRate()
        """The last rounds of _own."""
        self._expected = 0.0
        """Tokens that the record of all sessions predicted for the rounds in _own, decayed with them."""
        self._decayed_at = 0

    @property
    def is_tried(self) -> bool:
        """True if sessions have measured it often enough, or it has failed without a round."""
        return self.record.is_tried

    @property
    def decision(self) -> Decision:
        """The rounds that it was used for."""
        return Decision(self.strategy, self.num_rounds, round(self._num_tokens), self._time_ms)

    def begin(self) -> None:
        """Begins a use: the session changes to it."""
        self.tokens_behind = self.deficit = 0.0
        self.num_futile = 0

    def count_round(self, num_tokens: float, round_ms: float, tokens_behind: float) -> None:
        """Counts a round, typical or not.

        Args:
            num_tokens: Tokens it has committed.
            round_ms: Its time.
            tokens_behind: Tokens that plain rounds would have brought more in that time.
        """
        self.num_rounds += 1
        self._num_tokens += num_tokens
        self._time_ms += round_ms
        self.tokens_behind += tokens_behind
        self.deficit = max(0.0, self.deficit + min(tokens_behind, MAX_ROUND_DEFICIT))
        self.num_futile = 0 if num_tokens > 1 else self.num_futile + 1

    def count_pending_round(self, num_tokens: float, round_ms: float) -> None:
        """Counts a round for which nothing could be drafted yet: it is not representative of the strategy."""
        self.num_rounds += 1
        self._num_tokens += num_tokens
        self._time_ms += round_ms

    def learn_round(self, num_tokens: float, cost: float, now: int) -> None:
        """Learns from a typical round, which the history must have counted already.

        Args:
            num_tokens: Tokens it has committed.
            cost: Its time, in plain rounds.
            now: Rounds of the session so far.
        """
        self._decay(now)
        self._own.add(num_tokens, cost)
        self._recent.decay(_KEPT_PER_RECENT_ROUND)
        self._recent.add(num_tokens, cost)
        # Defined, because the record contains at least this round.
        self._expected += self.record.rate.value * cost

    def abandon(self, now: int) -> None:
        """Holds it for a while: it was worse than plain rounds in this text, whatever it has brought before."""
        self.held_until = now + (HOLD_ROUNDS << min(self._num_abandoned, 8))
        self._num_abandoned += 1
        if self._recent.weight > 0:
            self._expected *= self._recent.cost / self._own.cost
            self._own.copy_from(self._recent)

    def reset(self) -> None:
        """Forgets what this session has measured: the peer that it needs has come back and may differ."""
        self.is_lost = False
        self._num_abandoned = self.held_until = 0
        self._own.clear()
        self._recent.clear()
        self._expected = 0.0

    def _decay(self, now: int) -> None:
        age, self._decayed_at = now - self._decayed_at, now
        if age > 0 and self._own.weight > 0:
            factor = _KEPT_PER_ROUND**age
            self._own.decay(factor)
            self._recent.decay(factor)
            self._expected *= factor

    def estimate(self, siblings: Sequence[SessionStrategy], now: int) -> Estimate:
        """Estimates its rate in this session: own rounds, with the record of all sessions as the prior.

        Defined only for a strategy that has rounds in its record.

        Args:
            siblings: All strategies of the session.
            now: Rounds of the session so far.
        """
        self._decay(now)
        all_sessions, own = self.record.rate, self._own
        # The session's own rounds are in the record of all sessions, too: they count once.
        most = PRIOR_ROUNDS / (1 << min(self._num_abandoned, 8))
        prior = min(most, max(0.0, all_sessions.weight - own.weight))
        round_cost, rate = all_sessions.round_cost, all_sessions.value
        if self.is_drafted and prior > 0:
            rate *= self._text_ease(siblings)
        cost = own.cost + prior * round_cost
        blended = (own.tokens + prior * round_cost * rate) / cost
        weight = own.weight + prior
        deviation = math.sqrt(all_sessions.variance) / round_cost
        # A mean of own.weight single rounds and of a prior that is itself a mean of all_sessions.weight rounds.
        error = deviation * math.sqrt(own.weight + prior * prior / all_sessions.weight) / weight
        return Estimate(blended, error, max(weight, all_sessions.weight), deviation)

    def _text_ease(self, siblings: Sequence[SessionStrategy]) -> float:
        """Returns the tokens that other drafted strategies brought in this text over those that were expected.

        Only drafted strategies count: a text that is hard for one draft model is hard for others, but not for
        retrieval.
        """
        # An ease of 1 that is worth EASE_TOKENS: a few tokens say little about a text.
        tokens = expected = EASE_TOKENS
        for other in siblings:
            if other.is_drafted and other is not self and other._expected > 0:
                tokens += other._own.tokens
                expected += other._expected
        return tokens / expected
