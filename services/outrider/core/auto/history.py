"""The record of each strategy over all sessions of a verifier.

It is learnt quickly and forgotten slowly: a record is good after some ten rounds and counts for hundreds. The record of
a strategy that has not been tried for long grows uncertain, and one that has plainly changed is learnt again. Trials of
strategies that may turn out worse have a budget. There is no clock: rounds of the process count as time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

from outrider.core.auto.strategies import PLAIN, Strategy
from outrider.core.statistics import RunningMean

MEMORY_ROUNDS = 750
"""Rounds of the process after which a round's weight has fallen to 1/e."""
LEAST_WEIGHT = 0.01
"""Least weight of a record that has rounds, in rounds: its rate is never quite forgotten."""
RECENT_ROUNDS = 16
"""Rounds of a strategy that are its present, with which its past is compared."""
MAX_RECENT_AGE = 256
"""Rounds of the process after which a strategy's last rounds are no longer its present."""
MIN_RECENT_ROUNDS = 4
"""Rounds that the present needs before it can contradict the past."""
CHANGE_ERRORS = 3.5
"""Standard errors between present and past at which the past is dropped."""

PLAIN_ERROR = 0.1
"""Standard error of the caller's estimate of a plain round, as a share of it."""
MIN_PLAIN_PRIOR, MAX_PLAIN_PRIOR = 0.5, 64.0
"""Measured plain rounds that the caller's estimate is worth, at least and at most."""

TRIAL_SHARE = 0.01
"""Share of all time that losing trials may cost, the draft model's reading for them included."""
INITIAL_TRIAL_BUDGET = 8.0
"""Cost of losing trials that is allowed from the start, in plain rounds."""
MAX_TRIAL_DEBT = 256.0
"""Most plain rounds by which trials may exceed their budget. Anything beyond is forgiven: a strategy that looks
hopeless can become better."""
PROBE_COST = 4.0
"""Plain rounds that the rounds of a trial may lose where drafting does not pay: see `controller.MAX_DEFICIT`."""
MAX_LOST_OF_READING = 4.0
"""Greatest ratio that is learnt of one reading: beyond it, the host was disturbed."""
READ_ROWS = 8
"""Tokens that a draft model reads in the time of a forward of one row. More on an accelerator; then a reading is
cheaper than expected, which is measured (`StrategyHistory.learn_reading`)."""
TRIAL_SPACING = 64
"""Rounds of the process from one trial to the next; doubled after each one that clearly lost."""
MAX_TRIAL_SPACING = 512
RETRY_AFTER = 128
"""Rounds of the process after which a strategy that was worse than plain rounds may be tried again; doubled each
time."""
MAX_RETRY_AFTER = 1024
FALL_PER_LOAD = 1.15
"""Expected factor by which a strategy's rate, in plain rounds, falls where twice as many sessions share a forward.
Measured on an H200: 1.1 to 1.3."""
TRIED_ROUNDS = 4
"""Rounds of all sessions after which a strategy counts as tried."""
DISCOUNTED_WEIGHT = 16.0
"""Greatest weight of a record that is doubted, in rounds."""

UNKNOWN_VARIANCE = 1.0
"""Variance of a round's tokens before it is measured: a strategy whose rounds all brought one token may yet bring
two."""
UNKNOWN_ROUNDS = 2.0
"""Rounds that `UNKNOWN_VARIANCE` is worth."""

_KEPT_PER_ROUND = math.exp(-1 / MEMORY_ROUNDS)
_KEPT_PER_RECENT_ROUND = 1 - 1 / RECENT_ROUNDS


class TemperatureClass(IntEnum):
    """Temperatures at which drafts are accepted about equally often."""

    GREEDY = 0
    LOW = 1
    """Above 0 and below 0.85."""
    HIGH = 2

    @classmethod
    def of(cls, temperature: float) -> TemperatureClass:
        """Returns the class of a temperature."""
        if temperature == 0:
            return cls.GREEDY
        return cls.LOW if temperature < 0.85 else cls.HIGH


class StrategyHistory:
    """Holds the record of each strategy, and the budget of trials. Shared by all sessions of a verifier; used by one
    thread."""

    def __init__(self, plain_ms: float) -> None:
        """
        Args:
            plain_ms: Time of a plain round; see the attribute.

        Raises:
            ValueError: It is not positive and finite.
        """
        self.num_rounds = 0
        """Rounds of all sessions: the time of this class."""
        self.cost = 0.0
        """Time of all rounds, in plain rounds."""
        self.trial_cost = 0.0
        """Cost of trials that lost or are not decided, in plain rounds."""
        self._records: dict[tuple[Strategy, TemperatureClass], StrategyRecord] = {}
        self._num_rounds_of = [0 for _ in TemperatureClass]
        self._plain_rates = [1.0 for _ in TemperatureClass]
        # The same objects that `record` returns: `add_round` recognises plain rounds by identity.
        self._plain_records = [self.record(PLAIN, temperature_class) for temperature_class in TemperatureClass]
        self._next_trial_at = 0
        self._num_lost_trials = 0
        self._initial_budget = INITIAL_TRIAL_BUDGET
        self._lost_of_reading = RunningMean(0.5)
        """Share of the draft model's reading time that the target lost: 1 where both share a core, 0 where they share
        nothing."""
        self.plain_ms = plain_ms
        self.draft_ms = 0.0
        """Time of a draft forward of one row, as the caller knows it now. 0 means not known."""

    @property
    def plain_ms(self) -> float:
        """Time of a plain round, as the caller knows it now. It must be set whenever it changes.

        Costs are times in units of it, so that records of one load hold under another.
        """
        return self._plain_ms

    @plain_ms.setter
    def plain_ms(self, value: float) -> None:
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"plain_ms must be positive and finite, got {value}")
        self._plain_ms = value

    def record(self, strategy: Strategy, temperature_class: TemperatureClass) -> StrategyRecord:
        """Returns the record of a strategy. It is the same object each time, and grows with `add_round`."""
        return self._records.setdefault((strategy, temperature_class), StrategyRecord())

    def num_rounds_at(self, temperature_class: TemperatureClass) -> int:
        """Returns the rounds of all sessions of a class."""
        return self._num_rounds_of[temperature_class]

    def plain_rate(self, temperature_class: TemperatureClass) -> float:
        """Returns the tokens of plain rounds for the time `plain_ms`: 1 if the caller's estimate is right."""
        return self._plain_rates[temperature_class]

    def plain_error(self, temperature_class: TemperatureClass) -> float:
        """Returns the standard error of `plain_rate`."""
        record = self._plain_records[temperature_class]
        if record.num_rounds == 0:
            return PLAIN_ERROR
        record.decay(self.num_rounds)
        # As `DecayedRate.error`, without its prior variance of unknown rounds.
        return min(PLAIN_ERROR, math.sqrt(record.rate.squared_error) / record.rate.cost)

    def _measured_plain_rate(self, rate: DecayedRate) -> float:
        # Estimate and measurement are weighed by their errors: rounds with hiccups say little. The variance of a round
        # over that of the estimate is the number of rounds that the estimate is worth.
        prior = rate.squared_error / rate.weight / PLAIN_ERROR**2
        prior = min(MAX_PLAIN_PRIOR, max(MIN_PLAIN_PRIOR, prior))
        # By the estimate each of these rounds brings one token for a cost of 1.
        return (rate.tokens + prior) / (rate.cost + prior)

    def add_round(
        self,
        record: StrategyRecord,
        temperature_class: TemperatureClass,
        num_tokens: float,
        cost: float,
        is_typical: bool,
    ) -> None:
        """Adds a round.

        Args:
            record: The record of its strategy.
            temperature_class: The class of its session.
            num_tokens: Tokens it has committed.
            cost: Its time over `plain_ms`.
            is_typical: False for the first round after a switch: its time counts for the budget of trials, but is not
                representative of the strategy.
        """
        self.num_rounds += 1
        self._num_rounds_of[temperature_class] += 1
        self.cost += cost
        if is_typical:
            record.add(num_tokens, cost, self.num_rounds)
            if record is self._plain_records[temperature_class]:
                self._plain_rates[temperature_class] = self._measured_plain_rate(record.rate)

    @property
    def is_trial_due(self) -> bool:
        """True if the last trial was long enough ago."""
        return self.num_rounds >= self._next_trial_at

    def can_afford(self, reading_cost: float | None = None) -> bool:
        """Returns true if the budget allows a trial that may lose much.

        Args:
            reading_cost: For a trial that wakes the draft model, the cost of its reading in plain rounds. None means
                that it is awake.
        """
        ahead = 0.0 if reading_cost is None else reading_cost + PROBE_COST
        return self.trial_cost + ahead <= self._trial_budget

    def reading_cost(self, num_tokens: float) -> float:
        """Returns the expected cost of the draft model's reading of so many tokens, in plain rounds."""
        num_forwards = num_tokens / READ_ROWS
        return self._lost_of_reading.get(1.0) * num_forwards * self.draft_ms / self._plain_ms

    def learn_reading(self, num_tokens: float, lost: float) -> None:
        """Learns from a reading of the draft model how much of its time the target loses.

        Args:
            num_tokens: Tokens that were read.
            lost: Plain rounds that were lost meanwhile.
        """
        whole = num_tokens / READ_ROWS * self.draft_ms / self._plain_ms
        if whole > 0:
            self._lost_of_reading.add(min(MAX_LOST_OF_READING, max(0.0, lost / whole)))

    @property
    def _trial_budget(self) -> float:
        return self._initial_budget + TRIAL_SHARE * self.cost

    def inherit(self, lower: Sequence[tuple[int, StrategyHistory]]) -> None:
        """Begins with the records of lower loads.

        For each strategy, the record of the nearest load under which it was tried counts. A strategy that was hardly
        better than plain rounds there, or worse, is expected to be worse here: it counts as tried, and as failed once
        more than there, and no trial is paid in advance. A strategy that pays well under a lower load is tried as if it
        were unknown.

        Args:
            lower: For each of them, the nearest first, how often the sessions double from there to here, and its
                history.
        """
        known = set()
        for num_doublings, history in lower:
            for (strategy, temperature_class), record in history._records.items():
                is_known = record.is_tried and not record.is_inherited
                if strategy == PLAIN or not is_known or (strategy, temperature_class) in known:
                    continue
                known.add((strategy, temperature_class))
                # Costs are in plain rounds, whose rate begins as 1 here.
                needed = FALL_PER_LOAD**num_doublings * history.plain_rate(temperature_class)
                if record.rate.value >= needed:
                    continue
                own = self.record(strategy, temperature_class)
                own.copy_from(record, needed)
                self.record_failure(own)
                self._initial_budget = 0.0

    def begin_trial(self) -> None:
        """Records that a session has begun a trial. The other sessions wait, or all would try at once."""
        self._next_trial_at = self.num_rounds + TRIAL_SPACING

    def charge_trial(self, cost: float) -> None:
        """Charges the budget of trials, in plain rounds. A negative cost is paid back."""
        # After a part was forgiven, more may be paid back than is left.
        self.trial_cost = max(0.0, min(self.trial_cost + cost, self._trial_budget + MAX_TRIAL_DEBT))

    def record_won_trial(self, record: StrategyRecord) -> None:
        """Records that a trial has found a better strategy."""
        self._num_lost_trials = record.num_failures = record.retry_at = 0

    def record_lost_trial(self, is_clear: bool) -> None:
        """Records that a trial has found nothing better. After a clear loss, later trials are spaced more widely."""
        # The count has no bound, so the shift needs one: it would make an integer of thousands of bits.
        spacing = min(TRIAL_SPACING << min(self._num_lost_trials, 16), MAX_TRIAL_SPACING)
        self._num_lost_trials += is_clear
        self._next_trial_at = self.num_rounds + spacing

    def record_failure(self, record: StrategyRecord) -> None:
        """Records that a strategy was worse than plain rounds: it is not tried again for a while."""
        if self.num_rounds < record.retry_at:
            return  # sessions that find it at the same time count once
        after = min(RETRY_AFTER << min(record.num_failures, 16), MAX_RETRY_AFTER)
        record.num_failures += 1
        record.retry_at = self.num_rounds + after

    def discount(self, record: StrategyRecord) -> None:
        """Discounts a record, and allows a trial: a peer that the strategy needs has come back, and may be faster or
        slower."""
        record.discount(self.num_rounds)
        self._next_trial_at = min(self._next_trial_at, self.num_rounds)


class StrategyRecord:
    """Holds what all sessions have measured of one strategy at one class of temperatures."""

    __slots__ = ("_decayed_at", "_recent", "is_inherited", "num_failures", "num_rounds", "rate", "retry_at")

    def __init__(self) -> None:
        self.rate = DecayedRate()
        self.num_rounds = 0
        """Rounds ever counted. 0 means that the strategy was never tried."""
        self.num_failures = 0
        """Times, one after another, that it turned out worse than plain rounds."""
        self.retry_at = 0
        """Round of the process before which it is not tried again."""
        self.is_inherited = False
        """True if all that is known was copied from another record."""
        self._recent = DecayedRate()
        self._decayed_at = 0

    @property
    def is_tried(self) -> bool:
        """True if sessions have measured it often enough, or it has failed without a round."""
        return self.num_rounds >= TRIED_ROUNDS or (self.num_rounds > 0 and self.num_failures > 0)

    def decay(self, now: int) -> None:
        """Lets old rounds count less.

        Args:
            now: Rounds of the process so far.
        """
        age = now - self._decayed_at
        if age > 0:
            self._decayed_at = now
            if self.rate.weight > LEAST_WEIGHT:
                # The bound keeps the power above zero: a rate of weight 0 would be 0 / 0.
                self.rate.decay(_KEPT_PER_ROUND ** min(age, 10 * MEMORY_ROUNDS))
            if age > MAX_RECENT_AGE:
                self._recent.clear()

    def add(self, num_tokens: float, cost: float, now: int) -> None:
        """Adds a round. If the present is far from the past, the past is dropped.

        Args:
            num_tokens: Tokens the round has committed.
            cost: Its time, in plain rounds.
            now: Rounds of the process so far.
        """
        self.decay(now)  # first, so that this round counts in full
        self.num_rounds += 1
        self.is_inherited = False
        self.rate.add(num_tokens, cost)
        recent = self._recent
        # The present decays with the rounds of this strategy, the whole record with those of the process.
        recent.decay(_KEPT_PER_RECENT_ROUND)
        recent.add(num_tokens, cost)
        if recent.weight >= MIN_RECENT_ROUNDS and self.rate.weight > 2 * recent.weight:
            # The larger one: a few rounds may vary little by chance, and would then contradict the past too easily.
            variance = max(recent.variance, self.rate.variance)
            error = math.sqrt(variance / recent.weight) / recent.round_cost
            if abs(recent.value - self.rate.value) > CHANGE_ERRORS * error:
                self.rate.copy_from(recent)

    def copy_from(self, other: StrategyRecord, cost_factor: float) -> None:
        """Copies the rate and the failures of another record, as a doubted one.

        Args:
            other: The record of the same strategy under another load.
            cost_factor: Expected factor of the cost of rounds.
        """
        self.rate.copy_from(other.rate)
        self.rate.make_dearer(cost_factor)
        self.num_rounds, self.num_failures, self.is_inherited = other.num_rounds, other.num_failures, True
        self._doubt()

    def discount(self, now: int) -> None:
        """Keeps the rate with little weight: the strategy may have changed, for better or worse."""
        self.decay(now)
        self._doubt()
        self.num_failures = self.retry_at = 0

    def _doubt(self) -> None:
        if self.rate.weight > DISCOUNTED_WEIGHT:
            self.rate.decay(DISCOUNTED_WEIGHT / self.rate.weight)


class DecayedRate:
    """Tokens for the time of a plain round, over all rounds; older rounds count less.

    The rate is a ratio of sums, not a mean of ratios: total tokens over total time is what counts, and a mean of ratios
    favours strategies whose rounds are sometimes very short.
    """

    __slots__ = ("_cc", "_tc", "_tt", "cost", "tokens", "weight")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets all rounds."""
        self.weight = self.tokens = self.cost = self._tt = self._tc = self._cc = 0.0

    def copy_from(self, other: DecayedRate) -> None:
        """Replaces all sums by those of another rate."""
        self.weight, self.tokens, self.cost = other.weight, other.tokens, other.cost
        self._tt, self._tc, self._cc = other._tt, other._tc, other._cc

    def make_dearer(self, factor: float) -> None:
        """Multiplies the costs of all rounds."""
        self.cost *= factor
        self._tc *= factor
        self._cc *= factor * factor

    def add(self, num_tokens: float, cost: float) -> None:
        """Adds a round.

        Args:
            num_tokens: Tokens it has committed.
            cost: Its time, in plain rounds.
        """
        self.weight += 1.0
        self.tokens += num_tokens
        self.cost += cost
        self._tt += num_tokens * num_tokens
        self._tc += num_tokens * cost
        self._cc += cost * cost

    def decay(self, factor: float) -> None:
        """Multiplies the weight of all rounds. The rate stays."""
        self.weight *= factor
        self.tokens *= factor
        self.cost *= factor
        self._tt *= factor
        self._tc *= factor
        self._cc *= factor

    @property
    def value(self) -> float:
        """Tokens for the time of a plain round; 1 means no better than plain rounds. Undefined without rounds."""
        return self.tokens / self.cost

    @property
    def round_cost(self) -> float:
        """Mean cost of a round, in plain rounds. Undefined without rounds."""
        return self.cost / self.weight

    @property
    def squared_error(self) -> float:
        """Sum of (tokens - value * cost)^2 over the rounds, in tokens squared."""
        rate = self.tokens / self.cost
        # Multiplied out into sums that can decay; rounding may leave their combination a little below 0.
        return max(0.0, self._tt - 2 * rate * self._tc + rate * rate * self._cc)

    @property
    def variance(self) -> float:
        """Variance of a round's tokens around value * cost, in tokens squared."""
        return (self.squared_error + UNKNOWN_ROUNDS * UNKNOWN_VARIANCE) / (self.weight + UNKNOWN_ROUNDS)

    @property
    def error(self) -> float:
        """Standard error of the rate. Infinite without rounds."""
        if self.weight <= 0 or self.cost <= 0:
            return math.inf
        # The delta method for a ratio of means: Var(T/C) = Var(T - rate C) / (n C^2).
        return math.sqrt(self.variance / self.weight) / self.round_cost
