"""What there is to go on with: the ways that `Method.AUTO` chooses among, and what a drafter is told of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.core.auto.history import PLAIN, DecayedRate, Strategy, StrategyHistory, TemperatureClass
from outrider.core.params import Method, Rows, SpeculationParams


def strategies_of(params: SpeculationParams) -> tuple[Strategy, ...]:
    """What `Method.AUTO` chooses among, the one expected to be best first; a single way for every other method."""
    if params.method is not Method.AUTO:
        return (Strategy(params.method, params.rows, params.retrieves),)
    retrieval = params.retrieves
    drafted = Strategy(Method.BEST_FIRST, params.rows, retrieval), Strategy(Method.PEARL, Rows.CHAIN, False)
    retrieved = (
        (Strategy(Method.DOUBLE, Rows.CHAIN, True), Strategy(Method.RETRIEVAL, Rows.CHAIN, True)) if retrieval else ()
    )
    return (*drafted, *retrieved, PLAIN)


def opening_params(params: SpeculationParams) -> SpeculationParams:
    """What a drafter is opened with: a method that it knows."""
    return params_of(strategies_of(params)[0], params) if params.method is Method.AUTO else params


def params_of(way: Strategy, params: SpeculationParams) -> SpeculationParams:
    """The parameters for going that way. Methods without a draft model pause the drafter."""
    if not way.method.has_draft_model:
        return SpeculationParams(Method.OFF)
    return replace(params, method=way.method, rows=way.rows, retrieval=way.retrieval)


MEMORY_ROUNDS = 128
"""Rounds of the session after which a round's weight has fallen to 1/e."""
PRIOR_ROUNDS = 24.0
"""Rounds of the session that the experience of all sessions is worth."""
EASE_TOKENS = 48.0
"""Expected tokens of other ways from which on they say half of how easy this text is."""
MAX_ROUND_DEFICIT = 3.0
"""Most tokens that one round puts a way behind plain rounds: a hiccup of the host is not the way's fault."""
TRIED_ROUNDS = 4
"""Rounds of all sessions from which on a way is known."""
HOLD_ROUNDS = 8
"""Rounds for which a session does not come back to a way it has fled from; twice that after the second time, and so
on."""

_KEPT = math.exp(-1 / MEMORY_ROUNDS)


@dataclass(frozen=True, slots=True)
class Decision:
    """What a way was used for in a session."""

    way: Strategy
    num_rounds: int
    num_tokens: int
    """Tokens committed by these rounds."""
    time_ms: float
    """Their time."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a way would bring in this session."""

    rate: float
    """Tokens for the time of a plain round."""
    error: float
    """Its standard error."""
    weight: float
    """Rounds it is known from."""
    deviation: float
    """Standard deviation of single rounds."""


class SessionStrategy:
    """A way, with what one session knows of it."""

    __slots__ = (
        "_expected",
        "_faded_at",
        "_is_drafted",
        "_num_falls",
        "_num_tokens",
        "_own",
        "_time_ms",
        "behind",
        "deficit",
        "held_until",
        "is_available",
        "is_lost",
        "num_rounds",
        "record",
        "way",
    )

    def __init__(self, way: Strategy, experience: StrategyHistory, temperatures: TemperatureClass) -> None:
        self.way = way
        self.record = experience.record(way, temperatures)
        """What all sessions know."""
        self.is_available = True
        self.is_lost = False
        """Whether it was available in rounds of this session, and then no longer."""
        self.num_rounds = 0
        """Of this session, all of them."""
        self.behind = 0.0
        """Tokens that plain rounds would have brought more since this use began; negative = fewer."""
        self.deficit = 0.0
        """The same since it was last level with them, hiccups not fully counted. Never negative."""
        self.held_until = 0
        """Round of the session before which it is not taken again."""
        self._num_falls = 0
        self._num_tokens = 0
        self._time_ms = 0.0
        self._is_drafted = way.method.has_draft_model
        self._own = DecayedRate()
        self._expected = 0.0  # tokens that the experience of all sessions expected of the rounds in _own
        self._faded_at = 0

    @property
    def is_drafted(self) -> bool:
        """Whether a draft model has a part in it."""
        return self._is_drafted

    @property
    def is_tried(self) -> bool:
        """Whether any session knows what it brings."""
        known = self.record.num_rounds
        return known >= TRIED_ROUNDS or (known > 0 and self.record.num_failures > 0)

    @property
    def decision(self) -> Decision:
        """What it was used for."""
        return Decision(self.way, self.num_rounds, self._num_tokens, self._time_ms)

    def begin(self) -> None:
        """The session changes to it."""
        self.behind = self.deficit = 0.0

    def count(self, num_tokens: int, round_ms: float, behind: float) -> None:
        """Counts a round, typical or not. `behind` = how many tokens more plain rounds would have brought."""
        self.num_rounds += 1
        self._num_tokens += num_tokens
        self._time_ms += round_ms
        self.behind += behind
        self.deficit = max(0.0, self.deficit + min(behind, MAX_ROUND_DEFICIT))

    def learn(self, num_tokens: int, cost: float, now: int) -> None:
        """Takes a typical round in; the experience of all sessions has it already. `now`: round of the session."""
        self._fade(now)
        self._own.add(num_tokens, cost)
        self._expected += self.record.evidence.rate * cost

    def abandon(self, now: int) -> None:
        """It was worse than plain rounds in this text."""
        self.held_until = now + (HOLD_ROUNDS << min(self._num_falls, 8))
        self._num_falls += 1

    def renew(self) -> None:
        """It may have changed: what this session knew of it is over."""
        self.is_lost = False
        self._num_falls = self.held_until = 0
        self._own.clear()
        self._expected = 0.0

    def _fade(self, now: int) -> None:
        age, self._faded_at = now - self._faded_at, now
        if age > 0 and self._own.weight > 0:
            factor = _KEPT**age
            self._own.fade(factor)
            self._expected *= factor

    def estimate(self, siblings: Sequence[SessionStrategy], now: int) -> Estimate:
        """What it would bring in this session. Only of a way that was tried.

        Args:
            siblings: All ways of the session.
            now: Round of the session.
        """
        self._fade(now)
        record, own = self.record.evidence, self._own
        # The session's own rounds are in the experience of all, too: they count once.
        prior = min(PRIOR_ROUNDS, max(0.0, record.weight - own.weight))
        round_cost, rate = record.round_cost, record.rate
        if self._is_drafted and prior > 0:
            rate *= self._ease(siblings)
        cost = own.cost + prior * round_cost
        blended = (own.tokens + prior * round_cost * rate) / cost
        weight = own.weight + prior
        deviation = math.sqrt(record.variance) / round_cost
        error = deviation * math.sqrt(own.weight + prior * prior / record.weight) / weight
        return Estimate(blended, error, max(weight, record.weight), deviation)

    def _ease(self, siblings: Sequence[SessionStrategy]) -> float:
        tokens = expected = EASE_TOKENS
        for other in siblings:
            if other._is_drafted and other is not self and other._expected > 0:
                tokens += other._own.tokens
                expected += other._expected
        return tokens / expected
