"""The controller of `auto`: a bandit that chooses a session's strategy, round after round.

It uses the strategy with the most tokens per time, as measured: by the session's own rounds where there are some, by
the history of all sessions where there are none. A session stays with its strategy unless another one is clearly better
(hysteresis), abandons it quickly when it is worse than plain rounds (the guard), and tries others seldom, only where
they could be better and only within the budget of `outrider.core.auto.history` (trials).

Where the strategy needs no draft model, the drafter sleeps. Waking it costs time, too: it reads the tokens that it has
missed, which may slow the target down. Such a reading belongs to the trial that needs it (`Reading`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum

from outrider.core.auto.history import StrategyHistory, TemperatureClass
from outrider.core.auto.session_strategy import Estimate, SessionStrategy
from outrider.core.auto.strategies import PLAIN, Decision, Strategy

MIN_GAIN = 1.03
"""Least gain for which a session changes its strategy."""
GAIN_ERRORS = 0.5
"""Standard errors that are subtracted from the gain before it is compared with `MIN_GAIN`."""
MIN_ROUNDS = 8
"""Least rounds between two changes, unless the strategy in use is worse than plain rounds. More than
`history.TRIED_ROUNDS`, so that a strategy is known when it is left."""
COMPARE_EVERY = 4
"""Rounds between two comparisons with the other strategies."""

GUARD_ERRORS = 0.7
"""Standard errors below plain rounds at which a strategy is abandoned."""
MIN_GUARD_WEIGHT = 5.0
"""Least measured rounds for that."""
MAX_DEFICIT = 4.0
"""Tokens fewer than plain rounds bring at which a strategy is abandoned, whatever it has brought before."""
MAX_FUTILE_ROUNDS = 10
"""Rounds in a row without more tokens than plain rounds after which a drafted strategy is abandoned, however little it
seems to cost."""

CEILING_ERRORS = 1.0
"""Standard errors that are added to a strategy's measured rate to tell if it could be the best."""
SECOND_TRIED_AFTER = 256
"""Rounds of all sessions before a second strategy is tried while the first one is better than plain rounds."""
PLAIN_ERRORS = 2.0
"""Standard errors that are added to the measured rate of plain rounds to tell if they should be tried."""
CHEAP_RATE = 1.2
"""Rate of the usual strategy, in plain rounds, below which a trial without a draft model is nearly free."""
ESTABLISHED_ROUNDS = 32
"""Rounds of all sessions before a strategy is established: what it loses until then is charged to the budget of
trials."""

MAX_READING_LOSS = 16.0
"""Plain rounds that may be lost while a draft model without any record reads a prompt."""
MAX_READING_EXCESS = 1.5
"""Greatest ratio of a reading's loss to its expected loss."""
MAX_PENDING_ROUNDS = 256
"""Rounds after which a draft model that has sent nothing is given up."""
MAX_SETTLING_ROUNDS = 32
"""Rounds for which a draft model that was sent to sleep may slow the target down: it finishes its running forward."""
SETTLED_COST = 1.25
"""Least cost of a round, in plain rounds, that shows that it still does."""

LEAST_COST = 1e-3
"""Least cost of a round, in plain rounds: without it, a time below the clock's resolution would be an infinite rate."""

TRIAL_ROUNDS = 8
"""Rounds of a trial, its first one included, which is not representative. A trial that goes well is prolonged by as
many."""
MAX_TRIAL_ROUNDS = 64
"""Rounds after which a trial that goes well has won."""
MIN_TRIAL_ROUNDS = 4
"""Least rounds before a trial is given up, unless it brings far fewer tokens than plain rounds."""
GIVE_UP_ERRORS = 1.5
"""Standard errors below the usual strategy at which a trial is given up."""
CLEAR_ERRORS = 1.0
"""Standard errors below the usual strategy at which a trial has clearly lost."""


class Controller:
    """Chooses the strategy of one session. `strategy()` is called before each decoding round, `observe()` after it;
    prefill is not observed."""

    def __init__(
        self,
        history: StrategyHistory,
        temperature: float,
        strategies: Sequence[Strategy],
        session_number: int = 0,
        num_prompt_tokens: int = 0,
    ) -> None:
        """
        Args:
            history: The records of all sessions of the process.
            temperature: The session's.
            strategies: The strategies to choose from, the one expected to be best first. Plain rounds always belong to
                them; their place is ignored.
            session_number: Varies the time of a session's trials, so that sessions do not all try at the same place of
                a text.
            num_prompt_tokens: Tokens that a draft model must read before it drafts.

        Raises:
            ValueError: A strategy is given twice, is `auto`, or drafts nothing and is not `PLAIN`.
        """
        is_sound = all(
            strategy == PLAIN if strategy.is_plain else not strategy.method.is_auto for strategy in strategies
        )
        if len(set(strategies)) != len(strategies) or not is_sound:
            raise ValueError(
                f"strategies must be different, none of them auto, and OFF just {PLAIN}, got {list(strategies)}"
            )
        self._history = history
        self._temperature_class = TemperatureClass.of(temperature)
        self._plain = SessionStrategy(PLAIN, history, self._temperature_class)
        self._others = [
            SessionStrategy(strategy, history, self._temperature_class)
            for strategy in strategies
            if not strategy.is_plain
        ]
        self._first_trial_at = MIN_ROUNDS + session_number % MIN_ROUNDS
        self._num_rounds = 0
        self._must_decide = self._must_restart = True
        """Restarting means to decide as at the beginning of the session."""
        self._current: SessionStrategy | None = None
        self._trial: Trial | None = None
        """The trial of the current strategy. None means that it is used as the best."""
        self._num_unread: float = num_prompt_tokens
        """Tokens that the draft model has not read yet."""
        self._reading: Reading | None = None
        """The reading that must end before the current strategy has anything to verify."""
        self._num_settling = 0
        """Rounds that may still be slowed down by a draft model that was sent to sleep after a trial."""
        self._rounds_in_use = 0
        self._used: list[SessionStrategy] = []

    def set_available(self, strategies: Iterable[Strategy]) -> None:
        """Sets the strategies that can be used from the next round on; at first, all. Plain rounds always can.

        A strategy that comes back after it was lost may be better or worse than it was: its record is discounted.

        Raises:
            ValueError: A strategy is not one of the controller's.
        """
        available = set(strategies)
        unknown = available - {other.strategy for other in self._others} - {PLAIN}
        if unknown:
            raise ValueError(f"not strategies of this controller: {list(unknown)}")
        for other in self._others:
            if other.strategy in available:
                self._must_restart |= not other.is_available
                if other.is_lost:
                    other.reset()
                    self._history.discount(other.record)
            elif other.is_available:
                # Before the first round of this session nothing is lost: the peer is only late.
                other.is_lost = self._num_rounds > 0
            other.is_available = other.strategy in available
        self._must_decide = True

    def strategy(self) -> Strategy:
        """Returns the strategy for the next round; the same one until `observe` or `set_available`."""
        if self._must_decide or self._current is None:
            self._must_decide = False
            self._decide()
        return self._in_use.strategy

    def hold_drafts(self) -> None:
        """Marks the untried draft strategies as failed: the draft model is too slow to be tried without a budget for
        it."""
        for other in self._others:
            if other.is_drafted and not other.is_tried:
                self._history.record_failure(other.record)
        self._must_decide = self._must_restart = True

    @property
    def is_probing(self) -> bool:
        """True while a draft model is awake, or falling asleep, that is not known to pay: the target's forwards may
        take longer than they would without it."""
        current = self._current
        if current is None or not current.is_drafted:
            return self._num_settling > 0
        if self._trial is not None:
            return not self._trial.usual.is_drafted
        return current.record.num_rounds < ESTABLISHED_ROUNDS

    def observe(self, num_tokens: float, round_ms: float, *, is_pending: bool = False, is_typical: bool = True) -> None:
        """Learns from a round that used the strategy that `strategy()` returned last.

        Args:
            num_tokens: Tokens it has committed; of several sessions that follow the controller, on average.
            round_ms: Time from the commit before it to its own.
            is_pending: True if the draft model has sent nothing yet since the strategy needs it.
            is_typical: False if the round is not representative of its strategy.

        Raises:
            ValueError: An argument is negative or not finite, or no strategy was asked for yet.
        """
        if num_tokens < 0 or not 0 <= round_ms < math.inf:
            raise ValueError(f"a round cannot commit {num_tokens} tokens in {round_ms} ms")
        current, history = self._in_use, self._history
        cost = max(round_ms / history.plain_ms, LEAST_COST)
        tokens_behind = cost * history.plain_rate(self._temperature_class) - num_tokens
        if current.num_rounds == 0:
            self._used.append(current)
        self._num_rounds += 1
        self._num_unread += num_tokens
        if is_pending and self._reading is not None:
            current.count_pending_round(num_tokens, round_ms)
            self._reading.count_round(tokens_behind)
            is_typical = False
        else:
            self._end_reading()
            current.count_round(num_tokens, round_ms, tokens_behind)
            self._rounds_in_use += 1
            if self._trial is not None:
                self._trial.charge(num_tokens, cost, history)
            is_settling = self._is_settling(cost, tokens_behind)
            # In the first round after a switch the drafter starts from nothing: its time counts, but it is not
            # representative.
            is_typical = is_typical and self._rounds_in_use > 1 and not is_settling
        # Before `learn_round`, which compares the round with a record that contains it.
        history.add_round(current.record, self._temperature_class, num_tokens, cost, is_typical)
        if is_typical:
            current.learn_round(num_tokens, cost, self._num_rounds)
        self._must_decide = True

    def _end_reading(self) -> None:
        if self._in_use.is_drafted:
            self._num_unread = 0
        if self._reading is not None:
            self._reading.end()
            self._reading = None

    def _is_settling(self, cost: float, tokens_behind: float) -> bool:
        """Returns true if a draft model that was sent to sleep has slowed a round down, which is charged to trials."""
        if self._num_settling == 0:
            return False
        self._num_settling -= 1
        # Only the cost of a plain round is known. Other rounds may cost as much without a draft model.
        if self._current is not self._plain:
            return False
        if cost * self._plain_rate < SETTLED_COST:
            self._num_settling = 0
            return False
        self._history.charge_trial(max(0.0, tokens_behind))
        return True

    def decisions(self) -> list[Decision]:
        """Returns the rounds of each strategy, in the order of its first use. All observed rounds are in it."""
        return [used.decision for used in self._used]

    @property
    def _in_use(self) -> SessionStrategy:
        if self._current is None:
            raise ValueError("no strategy was asked for yet")
        return self._current

    def _decide(self) -> None:
        current = self._current
        if current is None or self._must_restart or not current.is_available:
            self._must_restart, self._trial = False, None
            self._switch_to(self._first())
        elif self._reading is not None:
            # Before the trial that needs it: nothing is measured until the reading has ended.
            if self._reading.is_too_dear:
                self._give_up_reading(current)
        elif self._trial is not None:
            # Before the guard: a trial has its own rules for giving up.
            self._continue_trial(self._trial)
        elif current is not self._plain and self._is_losing(current):
            self._abandon(current)
        elif (
            self._num_rounds % COMPARE_EVERY == 0
            and self._rounds_in_use >= MIN_ROUNDS
            # If all its rounds were untypical, there is no record to compare.
            and (current is self._plain or current.record.num_rounds > 0)
        ):
            self._compare(current)

    def _switch_to(self, target: SessionStrategy) -> None:
        if target is self._current:
            return
        was_probing, was_drafted = self.is_probing, self._current is not None and self._current.is_drafted
        self._current = target
        self._rounds_in_use = 0
        target.begin()
        if not target.is_drafted:
            self._reading = None
            self._num_settling = MAX_SETTLING_ROUNDS if was_probing and was_drafted else self._num_settling
        elif not was_drafted:
            self._num_settling = 0
            most = self._most_lost_by_reading(target)
            self._reading = Reading(self._history, self._num_unread, most)

    def _most_lost_by_reading(self, target: SessionStrategy) -> float:
        """Returns the plain rounds that may be lost while the draft model reads for a strategy."""
        if not self.is_probing:
            return math.inf
        if self._trial is None:
            return MAX_READING_LOSS
        return max(MAX_READING_LOSS, MAX_READING_EXCESS * self._history.reading_cost(self._num_unread))

    def _give_up_reading(self, current: SessionStrategy) -> None:
        """Returns from a strategy whose draft model takes too long to read the text."""
        assert self._reading is not None
        self._reading.end()
        trial, self._trial = self._trial, None
        current.abandon(self._num_rounds)
        self._history.record_failure(current.record)
        if trial is not None:
            trial.lose(self._history, is_clear=True)
        usual = self._plain if trial is None or not trial.usual.is_available else trial.usual
        # After the switch, which sets this by `is_probing`: without its trial the strategy may look established.
        self._num_settling = MAX_SETTLING_ROUNDS
        self._switch_to(usual)

    def _estimate(self, session_strategy: SessionStrategy) -> Estimate:
        if session_strategy is self._plain:
            # All others are compared with it, so its rate counts as exact.
            return Estimate(self._history.plain_rate(self._temperature_class), 0.0, math.inf, 0.0)
        # Records decay when they are read or added to: a round of one strategy touches no record of another.
        session_strategy.record.decay(self._history.num_rounds)
        return session_strategy.estimate(self._others, self._num_rounds)

    @property
    def _plain_rate(self) -> float:
        return self._history.plain_rate(self._temperature_class)

    def _candidates(self, other_than: SessionStrategy | None = None) -> list[SessionStrategy]:
        """Returns the strategies that could be used instead, except plain rounds."""
        return [
            other
            for other in self._others
            if other.is_available and other is not other_than and other.held_until <= self._num_rounds
        ]

    def _first(self) -> SessionStrategy:
        """Returns the strategy that a session begins with: the first preference until the history knows better."""
        candidates, first = self._candidates(), self._first_preference
        # A failure without a round means that it was held back for its cost (`hold_drafts`): only trials use it.
        if first in candidates and not first.is_tried and first.record.num_failures == 0:
            return first
        return self._best([candidate for candidate in candidates if candidate.is_tried])

    def _best(self, tried: Sequence[SessionStrategy]) -> SessionStrategy:
        """Returns the one with the highest lower confidence bound among those above plain rounds, else plain rounds.
        Strategies that use a draft model must gain something by it."""
        best, best_floor = self._plain, -math.inf
        for candidate in tried:
            estimate = self._estimate(candidate)
            floor = estimate.rate - GAIN_ERRORS * estimate.error
            least = (MIN_GAIN if candidate.is_drafted else 1.0) * self._plain_rate
            if estimate.rate > least and floor > best_floor:
                best, best_floor = candidate, floor
        return best

    def _is_losing(self, current: SessionStrategy) -> bool:
        """Returns true if it is worse than plain rounds: measured with some certainty, or by far in the last rounds."""
        if _is_hopeless(current):
            return True
        if self._rounds_in_use < 2 or not current.is_tried:
            return False
        estimate = self._estimate(current)
        return estimate.weight >= MIN_GUARD_WEIGHT and self._plain_rate - estimate.rate > GUARD_ERRORS * estimate.error

    def _abandon(self, current: SessionStrategy) -> None:
        """Switches to the best strategy without the same trouble: if the abandoned one had a draft model, to one
        without."""
        current.abandon(self._num_rounds)  # first: `_candidates` leaves out held strategies
        if current.record.num_rounds < ESTABLISHED_ROUNDS:
            # A strategy's first rounds anywhere are a trial in all but name, so the same budget pays for them.
            self._history.charge_trial(max(0.0, current.tokens_behind))
        if not current.is_tried or current.record.rate.value < self._plain_rate:
            self._history.record_failure(current.record)
        others = [other for other in self._candidates() if not (other.is_drafted and current.is_drafted)]
        untried = [other for other in others if not (other.is_tried or other.is_drafted)]
        best = self._best([other for other in others if other.is_tried])
        self._switch_to(untried[0] if untried and best is self._plain else best)

    def _gain(self, other: SessionStrategy, usual: Estimate) -> float:
        """Returns by how much a strategy is better beyond the least gain, errors subtracted. 0 or less: not better."""
        estimate = self._estimate(other)
        margin = GAIN_ERRORS * math.hypot(estimate.error, usual.error)
        return estimate.rate - MIN_GAIN * usual.rate - margin

    def _compare(self, current: SessionStrategy) -> None:
        """Changes to a better strategy, or begins a trial."""
        usual = self._estimate(current)
        candidates = self._candidates(current)
        gains = [(self._gain(other, usual), other) for other in candidates if other.is_tried]
        gains.append((self._gain(self._plain, usual), self._plain))
        # Plain rounds are always among them, so there is a best. By a key: for equal gains, tuples would compare the
        # strategies, which have no order.
        gain, best = max(gains, key=lambda pair: pair[0])
        if gain > 0:
            self._switch_to(best)
        elif self._num_rounds >= self._first_trial_at and self._history.is_trial_due:
            candidates = [other for other in candidates if self._can_afford(other, usual.rate)]
            is_plain = self._may_plain_be_better(usual.rate)
            tried = self._plain if is_plain else self._worth_trying(candidates, usual.rate)
            if tried is not None:
                self._trial = Trial(tried, current, usual.rate)
                self._history.begin_trial()
                self._switch_to(tried)

    def _can_afford(self, other: SessionStrategy, usual_rate: float) -> bool:
        """Returns true if a trial of a strategy is within the budget, or nearly free."""
        if other.is_drafted:
            is_awake = self._in_use.is_drafted
            return self._history.can_afford(None if is_awake else self._history.reading_cost(self._num_unread))
        return self._history.can_afford() or usual_rate < CHEAP_RATE * self._plain_rate

    def _worth_trying(self, candidates: Sequence[SessionStrategy], usual_rate: float) -> SessionStrategy | None:
        """Returns a strategy that could be better: the first one never tried, else the highest upper confidence
        bound."""
        now = self._history.num_rounds
        candidates = [other for other in candidates if other.record.retry_at <= now]
        if self._history.num_rounds_at(self._temperature_class) < SECOND_TRIED_AFTER and not self._is_first_bad():
            candidates = [other for other in candidates if not other.is_tried][:1]
            return candidates[0] if candidates and candidates[0] is self._first_preference else None
        best, best_ceiling = None, usual_rate
        for other in candidates:
            if not other.is_tried:
                return other
            estimate = self._estimate(other)
            # The last term is for records of few rounds, which may vary little by chance: they are tried all the same.
            ceiling = estimate.rate + CEILING_ERRORS * estimate.error + usual_rate / estimate.weight
            if ceiling > best_ceiling:
                best, best_ceiling = other, ceiling
        return best

    def _may_plain_be_better(self, usual_rate: float) -> bool:
        """Returns true if plain rounds should be measured: the current strategy is close to them, and the budget allows
        it."""
        plain_rate = self._plain_rate
        ceiling = plain_rate + PLAIN_ERRORS * self._history.plain_error(self._temperature_class)
        is_paid = usual_rate < MIN_GAIN * plain_rate or self._history.can_afford()
        return self._current is not self._plain and is_paid and usual_rate < ceiling

    @property
    def _first_preference(self) -> SessionStrategy | None:
        return next((other for other in self._others if other.is_available), None)

    def _is_first_bad(self) -> bool:
        """Returns true if the first preference is worse than plain rounds, as far as known, or does not exist."""
        first = self._first_preference
        if first is None or not first.is_tried:
            return first is None or first.record.num_failures > 0
        return self._estimate(first).rate < self._plain_rate

    def _continue_trial(self, trial: Trial) -> None:
        """Goes on with a trial, or ends it: the tried strategy has won, or the session returns to the usual one."""
        tried, usual = trial.tried, self._estimate(trial.usual)
        outcome = TrialOutcome.CLEARLY_LOST if _is_hopeless(tried) else TrialOutcome.OPEN
        if outcome is TrialOutcome.OPEN and (tried.is_tried or tried is self._plain):
            outcome = trial.outcome(self._estimate(tried), usual)
        # `prolong` is asked last, because it plans further rounds. When it refuses, a trial that goes well has won.
        if outcome is TrialOutcome.OPEN or (
            outcome is TrialOutcome.GOOD and self._gain(tried, usual) <= 0 and trial.prolong()
        ):
            return
        self._trial = None
        if outcome is TrialOutcome.GOOD:
            trial.win(self._history)
            return
        trial.lose(self._history, outcome is TrialOutcome.CLEARLY_LOST)
        if not tried.is_tried or self._estimate(tried).rate < self._plain_rate:
            tried.abandon(self._num_rounds)
            self._history.record_failure(tried.record)
        self._switch_to(trial.usual if trial.usual.is_available else self._first())


def _is_hopeless(strategy: SessionStrategy) -> bool:
    """Returns true if the last rounds alone are reason to leave a strategy."""
    return strategy.deficit > MAX_DEFICIT or (strategy.is_drafted and strategy.num_futile >= MAX_FUTILE_ROUNDS)


class Reading:
    """The draft model reads the tokens that it has missed, while rounds go on without it."""

    def __init__(self, history: StrategyHistory, num_tokens: float, most_lost: float) -> None:
        """
        Args:
            history: Its budget pays, and it learns the cost.
            num_tokens: Tokens to be read.
            most_lost: Plain rounds that it may cost. Infinity means that the strategy is known to be worth it; the
                budget of trials then does not pay.
        """
        self._history = history
        self._num_tokens = num_tokens
        self._most_lost = most_lost
        self._num_rounds = 0
        self._lost = self._charged = 0.0

    def count_round(self, tokens_behind: float) -> None:
        """Counts a round that brought so many tokens fewer than plain ones."""
        self._num_rounds += 1
        self._lost += tokens_behind
        if self._most_lost < math.inf:
            # Charged round by round, because the session may end before the reading.
            charged = max(0.0, self._lost)
            self._history.charge_trial(charged - self._charged)
            self._charged = charged

    @property
    def is_too_dear(self) -> bool:
        """True if it should be given up."""
        return self._lost > self._most_lost or self._num_rounds >= MAX_PENDING_ROUNDS

    def end(self) -> None:
        """Ends it. Nothing is learnt of a reading without a round: it has overlapped with the target's own reading of
        the prompt."""
        if self._num_rounds:
            self._history.learn_reading(self._num_tokens, self._lost)


class TrialOutcome(Enum):
    """The state of a trial after its rounds so far."""

    OPEN = 0
    GOOD = 1
    """Not worse than the usual strategy after the planned rounds. The trial may be prolonged."""
    LOST = 2
    CLEARLY_LOST = 3


class Trial:
    """Tries a strategy in one session, which returns to its usual one if the trial loses."""

    def __init__(self, tried: SessionStrategy, usual: SessionStrategy, usual_rate: float) -> None:
        self.tried = tried
        self.usual = usual
        self._usual_rate = usual_rate
        self._planned_rounds = TRIAL_ROUNDS
        self._num_rounds = 0
        self._cost = self._gain = self._charged = 0.0

    def charge(self, num_tokens: float, cost: float, history: StrategyHistory) -> None:
        """Charges a round to the budget: the time that the trial has lost against the usual strategy so far.

        It is called after each round, because the session may end in the middle of a trial.
        """
        self._num_rounds += 1
        self._cost += cost
        self._gain += num_tokens / self._usual_rate
        charged = max(0.0, self._cost - self._gain)
        # The change since the last round, which is negative when the trial catches up.
        history.charge_trial(charged - self._charged)
        self._charged = charged

    def outcome(self, tried: Estimate, usual: Estimate) -> TrialOutcome:
        """Returns the outcome after the rounds so far."""
        if self._num_rounds < MIN_TRIAL_ROUNDS:
            return TrialOutcome.OPEN
        # A few poor rounds vary little, so the tried strategy is assumed to vary at least as much as the usual one.
        error = math.hypot(max(tried.error, usual.deviation / math.sqrt(tried.weight)), usual.error)
        is_over = self._num_rounds >= self._planned_rounds
        if tried.rate >= usual.rate - (0.0 if is_over else GIVE_UP_ERRORS * error):
            return TrialOutcome.GOOD if is_over else TrialOutcome.OPEN
        is_clear = tried.rate + CLEAR_ERRORS * error < usual.rate
        return TrialOutcome.CLEARLY_LOST if is_clear else TrialOutcome.LOST

    def prolong(self) -> bool:
        """Plans more rounds. Returns false if there were enough."""
        self._planned_rounds += TRIAL_ROUNDS
        return self._num_rounds < MAX_TRIAL_ROUNDS

    def win(self, history: StrategyHistory) -> None:
        """Pays back what the trial was charged: it has found a better strategy."""
        history.charge_trial(-self._charged)
        history.record_won_trial(self.tried.record)

    def lose(self, history: StrategyHistory, is_clear: bool) -> None:
        """Charges all time of a trial that has clearly lost.

        Trials without a draft model are cheap, and do not delay other trials.
        """
        if is_clear:
            history.charge_trial(self._cost - self._charged)
        history.record_lost_trial(is_clear and self.tried.is_drafted)
