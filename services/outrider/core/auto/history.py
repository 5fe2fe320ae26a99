"""What a verifier has learnt about the ways to go on, over all its sessions.

It learns cheaply and forgets slowly: a way's record is good after some ten rounds and counts for hundreds. What has not
been tried for long grows uncertain, and what has plainly changed is learnt anew. Trying what may turn out worse has a
budget. There is no clock: rounds of the process count as time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from outrider.core.params import Method, Rows

MEMORY_ROUNDS = 750
"""Rounds of the process after which a round's weight has fallen to 1/e."""
LEAST_WEIGHT = 0.01
"""Rounds that a record is worth at least, once it has any: its rate is never quite forgotten."""
RECENT_ROUNDS = 16
"""Rounds of a way that are its present, against which its past is held."""
RECENT_IS_OVER = 256
"""Rounds of the process after which a way's last rounds are its present no longer."""
MIN_RECENT_ROUNDS = 4
CHANGE_ERRORS = 3.5
"""Standard errors between present and past from which on the past counts no more."""

PLAIN_ERROR = 0.1
"""How far the caller's estimate of a plain round may be off."""
MIN_PLAIN_PRIOR, MAX_PLAIN_PRIOR = 0.5, 64.0
"""Measured plain rounds that it is worth, at least and at most."""

PROBE_SHARE = 0.015
"""Part of all time that probes may cost that lose."""
PROBE_ALLOWANCE = 4.0
"""What they may cost before there was much time, in plain rounds."""
MAX_PROBE_DEBT = 32.0
"""What they may be over it, in plain rounds. More is forgiven: what is lost for good can come back."""
PROBE_SPACING = 64
"""Rounds of the process from one probe to the next; twice that after one that lost, and so on."""
MAX_PROBE_SPACING = 512
RETRY_AFTER = 128
"""Rounds of the process after which a way that was worse than plain rounds may be probed again; twice that the next
time, and so on."""
MAX_RETRY_AFTER = 1024
DISCOUNTED_WEIGHT = 16.0
"""Rounds that a record is worth at most once there is reason to doubt it."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to go on: what the controller chooses among."""

    method: Method
    rows: Rows = Rows.CHAIN
    retrieval: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether nothing is drafted."""
        return self.method is Method.OFF


PLAIN = Strategy(Method.OFF)
"""Plain rounds."""


class TemperatureClass(IntEnum):
    """Temperatures at which drafts fare alike."""

    GREEDY = 0
    LOW = 1
    """Below 0.85."""
    HIGH = 2

    @classmethod
    def of(cls, temperature: float) -> TemperatureClass:
        """The class of a temperature."""
        if temperature == 0:
            return cls.GREEDY
        return cls.LOW if temperature < 0.85 else cls.HIGH


class StrategyRecord:
    """What is known of one way at one class of temperatures."""

    __slots__ = ("_faded_at", "_recent", "evidence", "num_failures", "num_rounds", "retry_at")

    def __init__(self) -> None:
        self.evidence = DecayedRate()
        self.num_rounds = 0
        """Rounds ever counted. 0 = never tried."""
        self.num_failures = 0
        """Times, one after another, that it turned out worse than plain rounds."""
        self.retry_at = 0
        """Round of the process before which it is not probed again."""
        self._recent = DecayedRate()
        self._faded_at = 0

    def fade(self, now: int) -> None:
        """Forgets what the rounds of the process since the last time make it forget."""
        age = now - self._faded_at
        if age > 0:
            self._faded_at = now
            if self.evidence.weight > LEAST_WEIGHT:
                self.evidence.fade(_KEPT ** min(age, 10 * MEMORY_ROUNDS))
            if age > RECENT_IS_OVER:
                self._recent.clear()

    def add(self, num_tokens: float, cost: float, now: int) -> None:
        """Takes a round in. Where the present is far from the past, the past is dropped."""
        self.fade(now)
        self.num_rounds += 1
        self.evidence.add(num_tokens, cost)
        recent = self._recent
        recent.fade(_KEPT_RECENT)
        recent.add(num_tokens, cost)
        if recent.weight >= MIN_RECENT_ROUNDS and self.evidence.weight > 2 * recent.weight:
            variance = max(recent.variance, self.evidence.variance)
            error = math.sqrt(variance / recent.weight) / recent.round_cost
            if abs(recent.rate - self.evidence.rate) > CHANGE_ERRORS * error:
                self.evidence.copy(recent)

    def discount(self, now: int) -> None:
        """There is reason to think that it may have changed, for better or worse."""
        self.fade(now)
        if self.evidence.weight > DISCOUNTED_WEIGHT:
            self.evidence.fade(DISCOUNTED_WEIGHT / self.evidence.weight)
        self.num_failures = self.retry_at = 0


_KEPT = math.exp(-1 / MEMORY_ROUNDS)
_KEPT_RECENT = 1 - 1 / RECENT_ROUNDS


class StrategyHistory:
    """Shared by the sessions of a verifier; used by one thread."""

    def __init__(self, plain_ms: float) -> None:
        """ValueError unless the time is positive."""
        self.num_rounds = 0
        """Rounds of all sessions: the time of this class."""
        self.cost = 0.0
        """Their cost, in plain rounds."""
        self.probe_cost = 0.0
        """The cost of probes that lost or are not decided, in plain rounds."""
        self._records: dict[tuple[Strategy, TemperatureClass], StrategyRecord] = {}
        self._num_rounds_of = [0 for _ in TemperatureClass]
        self._plain_rates = [1.0 for _ in TemperatureClass]
        self._plain_records = [self.record(PLAIN, temperatures) for temperatures in TemperatureClass]
        self._next_probe_at = 0
        self._num_lost_probes = 0
        self.plain_ms = plain_ms

    @property
    def plain_ms(self) -> float:
        """Time of a round that verifies nothing, as the caller knows it now. Times are compared in units of it, so that
        what was learnt under one load holds under another. Set it whenever it changes."""
        return self._plain_ms

    @plain_ms.setter
    def plain_ms(self, value: float) -> None:
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"plain_ms must be positive and finite, got {value}")
        self._plain_ms = value

    def record(self, way: Strategy, temperatures: TemperatureClass) -> StrategyRecord:
        """What is known of a way; what is not known yet is told to the same record later."""
        return self._records.setdefault((way, temperatures), StrategyRecord())

    def num_rounds_at(self, temperatures: TemperatureClass) -> int:
        """Rounds of all sessions of a class."""
        return self._num_rounds_of[temperatures]

    def plain_rate(self, temperatures: TemperatureClass) -> float:
        """Tokens of plain rounds for the time of a plain round: 1 if the caller's estimate is right."""
        return self._plain_rates[temperatures]

    def plain_error(self, temperatures: TemperatureClass) -> float:
        """Its standard error."""
        record = self._plain_records[temperatures]
        if record.num_rounds == 0:
            return PLAIN_ERROR
        record.fade(self.num_rounds)
        evidence = record.evidence
        return min(PLAIN_ERROR, math.sqrt(evidence.squares) / evidence.cost)

    def _measured_plain_rate(self, evidence: DecayedRate) -> float:
        # Weighed against the caller's estimate by how far each may be off: rounds with hiccups say little.
        prior = evidence.squares / evidence.weight / PLAIN_ERROR**2
        prior = min(MAX_PLAIN_PRIOR, max(MIN_PLAIN_PRIOR, prior))
        return (evidence.tokens + prior) / (evidence.cost + prior)

    def count(
        self, record: StrategyRecord, temperatures: TemperatureClass, num_tokens: int, cost: float, is_typical: bool
    ) -> None:
        """Takes a round in.

        Args:
            record: Of its way.
            temperatures: Its class.
            num_tokens: Tokens it has committed.
            cost: Its time over `plain_ms`.
            is_typical: False for the first round after a switch, which says nothing about the way: it took time, and
                that is all.
        """
        self.num_rounds += 1
        self._num_rounds_of[temperatures] += 1
        self.cost += cost
        if is_typical:
            record.add(num_tokens, cost, self.num_rounds)
            if record is self._plain_records[temperatures]:
                self._plain_rates[temperatures] = self._measured_plain_rate(record.evidence)

    @property
    def is_probe_due(self) -> bool:
        """Whether the last probe was long enough ago."""
        return self.num_rounds >= self._next_probe_at

    @property
    def can_pay_probe(self) -> bool:
        """Whether the budget allows one that may lose much."""
        return self.probe_cost <= self._probe_budget

    @property
    def _probe_budget(self) -> float:
        return PROBE_ALLOWANCE + PROBE_SHARE * self.cost

    def begin_probe(self) -> None:
        """Some session begins one: others wait."""
        self._next_probe_at = self.num_rounds + PROBE_SPACING

    def pay_probe(self, cost: float) -> None:
        """A probe or a first trial has cost so much, in plain rounds; negative = so much less than it has paid."""
        self.probe_cost = max(0.0, min(self.probe_cost + cost, self._probe_budget + MAX_PROBE_DEBT))

    def win_probe(self, record: StrategyRecord) -> None:
        """A probe has found a better way."""
        self._num_lost_probes = record.num_failures = record.retry_at = 0

    def lose_probe(self, is_clear: bool) -> None:
        """A probe has found nothing. If that is clear, the next one after that has to wait longer."""
        spacing = min(PROBE_SPACING << min(self._num_lost_probes, 16), MAX_PROBE_SPACING)
        self._num_lost_probes += is_clear
        self._next_probe_at = self.num_rounds + spacing

    def fail(self, record: StrategyRecord) -> None:
        """A way has turned out worse than plain rounds. Sessions that find so at the same time count as one."""
        if self.num_rounds < record.retry_at:
            return
        after = min(RETRY_AFTER << min(record.num_failures, 16), MAX_RETRY_AFTER)
        record.num_failures += 1
        record.retry_at = self.num_rounds + after

    def discount(self, record: StrategyRecord) -> None:
        """A peer of this way has come back: what was known of it counts little, and it may be probed."""
        record.discount(self.num_rounds)
        self._next_probe_at = min(self._next_probe_at, self.num_rounds)


UNKNOWN_VARIANCE = 1.0
"""Of a round's tokens, before rounds have shown it: a way whose rounds all bring one token may yet bring two."""
UNKNOWN_ROUNDS = 2.0
"""Rounds that it is worth."""


class DecayedRate:
    """Sums over rounds of tokens and of cost, in plain rounds: a round's cost is its time over a plain round's.

    The rate is a ratio of sums, not a mean of ratios: it is total tokens over total time that counts, and a mean of
    ratios favours ways whose rounds are sometimes very short.
    """

    __slots__ = ("_cc", "_tc", "_tt", "cost", "tokens", "weight")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing is known."""
        self.weight = self.tokens = self.cost = self._tt = self._tc = self._cc = 0.0

    def copy(self, other: DecayedRate) -> None:
        """Takes another's sums for its own."""
        self.weight, self.tokens, self.cost = other.weight, other.tokens, other.cost
        self._tt, self._tc, self._cc = other._tt, other._tc, other._cc

    def add(self, num_tokens: float, cost: float) -> None:
        """Takes a round in."""
        self.weight += 1.0
        self.tokens += num_tokens
        self.cost += cost
        self._tt += num_tokens * num_tokens
        self._tc += num_tokens * cost
        self._cc += cost * cost

    def fade(self, factor: float) -> None:
        """All that is known counts less. The rate stays."""
        self.weight *= factor
        self.tokens *= factor
        self.cost *= factor
        self._tt *= factor
        self._tc *= factor
        self._cc *= factor

    @property
    def rate(self) -> float:
        """Tokens for the time of a plain round; 1 = no better than plain rounds. Not without evidence."""
        return self.tokens / self.cost

    @property
    def round_cost(self) -> float:
        """Mean cost of a round. Not without evidence."""
        return self.cost / self.weight

    @property
    def squares(self) -> float:
        """Sum of the squares of what rounds brought more or less than their cost should have, in tokens squared."""
        rate = self.tokens / self.cost
        return max(0.0, self._tt - 2 * rate * self._tc + rate * rate * self._cc)

    @property
    def variance(self) -> float:
        """Of a round's tokens around those that its cost should have brought, in tokens squared."""
        return (self.squares + UNKNOWN_ROUNDS * UNKNOWN_VARIANCE) / (self.weight + UNKNOWN_ROUNDS)

    @property
    def error(self) -> float:
        """Standard error of the rate (of a ratio of means, by the delta method). Infinite without evidence."""
        if self.weight <= 0 or self.cost <= 0:
            return math.inf
        return math.sqrt(self.variance / self.weight) / self.round_cost
