"""The controller behind `Method.AUTO`: which way a session goes on, round after round.

It takes the way that yields most tokens for the time, as measured: by the session's own rounds where there are some, by
the experience of all sessions where there are none. A session stays with its way unless another one is clearly better
(hysteresis), leaves it quickly when it is worse than plain rounds (the guard), and tries others seldom, only where they
could be better and only within the budget of `outrider.core.auto.history` (probes).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum

from outrider.core.auto.history import PLAIN, Strategy, StrategyHistory, TemperatureClass
from outrider.core.auto.strategies import Decision, Estimate, SessionStrategy
from outrider.core.params import Method

MIN_GAIN = 1.03
"""Least gain for which a session changes its way."""
GAIN_ERRORS = 0.5
"""Standard errors by which it must be sure of the gain."""
MIN_ROUNDS = 8
"""Least rounds between two changes, unless the way in use is worse than plain rounds. More than make a way known."""
COMPARE_EVERY = 4
"""Rounds between two looks at the other ways."""

GUARD_ERRORS = 0.7
"""Standard errors below plain rounds at which a way is left."""
MIN_GUARD_WEIGHT = 5.0
"""Rounds that must be known for that."""
MAX_DEFICIT = 4.0
"""Tokens behind plain rounds at which it is left, whatever it has brought before."""

PROBE_ERRORS = 1.0
"""Standard errors by which a way may be better than measured when it is asked whether it could be the best."""
SECOND_TRIED_AFTER = 256
"""Rounds of all sessions before a second way is tried while the first one is better than plain rounds."""

PLAIN_ERRORS = 2.0
"""Standard errors by which plain rounds may be better than measured when it is asked whether to try them."""
CHEAP_RATE = 1.2
"""Rate of the usual way, in plain rounds, below which a probe without a draft model costs next to nothing."""
TRIAL_ROUNDS = 32
"""Rounds of all sessions before a way is established: what it loses until then is charged to the budget of probes."""

LEAST_COST = 1e-3
"""Of a round, in plain rounds: a clock's resolution is no rate."""


class Controller:
    """Of one session. `way()` before each decoding round, `observe()` after it; prefill is not observed."""

    def __init__(
        self, experience: StrategyHistory, temperature: float, ways: Sequence[Strategy], session_number: int = 0
    ) -> None:
        """
        Args:
            experience: Of all sessions of the process.
            temperature: The session's.
            ways: What there is to choose from, the one expected to be best first. Plain rounds always belong to it;
                where they stand says nothing.
            session_number: Varies when a session probes, so that not all do so at the same place of a text.

        Raises:
            ValueError: A way twice, `Method.AUTO`, or plain rounds that are not plain.
        """
        is_sound = all(way == PLAIN if way.is_plain else way.method is not Method.AUTO for way in ways)
        if len(set(ways)) != len(ways) or not is_sound:
            raise ValueError(f"ways must be different, none of them auto, and OFF just {PLAIN}, got {list(ways)}")
        self._experience = experience
        self._temperatures = TemperatureClass.of(temperature)
        self._plain = SessionStrategy(PLAIN, experience, self._temperatures)
        self._options = [SessionStrategy(way, experience, self._temperatures) for way in ways if not way.is_plain]
        self._first_probe_at = MIN_ROUNDS + session_number % MIN_ROUNDS
        self._num_rounds = 0
        self._is_due = self._is_anew = True  # anew: as if the session began
        self._option: SessionStrategy | None = None  # in use
        self._probe: Trial | None = None  # of the option in use, while it is only tried
        self._rounds_in_use = 0
        self._used: list[SessionStrategy] = []

    def set_available(self, ways: Iterable[Strategy]) -> None:
        """Says which ways can be gone from the next round on; at first, all. Plain rounds always can.

        A way that comes back after it was lost may be better or worse than it was: what was known of it counts less.

        Raises:
            ValueError: Not one of the controller's ways.
        """
        available = set(ways)
        unknown = available - {option.way for option in self._options} - {PLAIN}
        if unknown:
            raise ValueError(f"not ways of this controller: {list(unknown)}")
        for option in self._options:
            if option.way in available:
                self._is_anew |= not option.is_available
                if option.is_lost:
                    option.renew()
                    self._experience.discount(option.record)
            elif option.is_available:
                option.is_lost = self._num_rounds > 0
            option.is_available = option.way in available
        self._is_due = True

    def way(self) -> Strategy:
        """The way for the next round. Asked twice, it says the same."""
        if self._is_due or self._option is None:
            self._is_due = False
            self._decide()
        return self._in_use.way

    def observe(self, num_tokens: int, round_ms: float) -> None:
        """Takes in a round that went the way that `way` said last.

        Args:
            num_tokens: Tokens it has committed.
            round_ms: From the commit before it to its own.

        Raises:
            ValueError: Negative, or not a number; or no way was asked for yet.
        """
        if num_tokens < 0 or not 0 <= round_ms < math.inf:
            raise ValueError(f"a round cannot commit {num_tokens} tokens in {round_ms} ms")
        option, experience = self._in_use, self._experience
        cost = max(round_ms / experience.plain_ms, LEAST_COST)
        if option.num_rounds == 0:
            self._used.append(option)
        option.count(num_tokens, round_ms, cost * experience.plain_rate(self._temperatures) - num_tokens)
        self._num_rounds += 1
        self._rounds_in_use += 1
        if self._probe is not None:
            self._probe.pay(num_tokens, cost, experience)
        # In the first round, the drafter begins anew: it is paid for, but it does not say what the way brings.
        is_typical = self._rounds_in_use > 1
        experience.count(option.record, self._temperatures, num_tokens, cost, is_typical)
        if is_typical:
            option.learn(num_tokens, cost, self._num_rounds)
        self._is_due = True

    def decisions(self) -> list[Decision]:
        """What each way was used for, in the order of its first use. All observed rounds are in it."""
        return [option.decision for option in self._used]

    @property
    def _in_use(self) -> SessionStrategy:
        if self._option is None:
            raise ValueError("no way was asked for yet")
        return self._option

    def _decide(self) -> None:
        option = self._option
        if option is None or self._is_anew or not option.is_available:
            self._is_anew, self._probe = False, None
            self._go(self._first())
        elif self._probe is not None:
            self._go_on_probing(self._probe)
        elif option is not self._plain and self._is_losing(option):
            self._flee(option)
        elif self._num_rounds % COMPARE_EVERY == 0 and self._rounds_in_use >= MIN_ROUNDS:
            self._compare(option)

    def _go(self, option: SessionStrategy) -> None:
        if option is not self._option:
            self._option = option
            self._rounds_in_use = 0
            option.begin()

    def _estimate(self, option: SessionStrategy) -> Estimate:
        if option is self._plain:
            return Estimate(self._experience.plain_rate(self._temperatures), 0.0, math.inf, 0.0)
        option.record.fade(self._experience.num_rounds)
        return option.estimate(self._options, self._num_rounds)

    def _candidates(self, other_than: SessionStrategy | None = None) -> list[SessionStrategy]:
        """What could be gone instead, but plain rounds."""
        return [
            option
            for option in self._options
            if option.is_available and option is not other_than and option.held_until <= self._num_rounds
        ]

    def _first(self) -> SessionStrategy:
        """Where a session begins: the first preference, until all sessions know better."""
        candidates, first = self._candidates(), self._first_preference
        if first in candidates and not first.is_tried and first.record.retry_at <= self._experience.num_rounds:
            return first
        return self._best([option for option in candidates if option.is_tried])

    def _best(self, tried: Sequence[SessionStrategy]) -> SessionStrategy:
        """The one that is best for sure, if it is better than plain rounds."""
        best, best_floor = self._plain, -math.inf
        plain_rate = self._estimate(self._plain).rate
        for option in tried:
            estimate = self._estimate(option)
            floor = estimate.rate - GAIN_ERRORS * estimate.error
            if estimate.rate > plain_rate and floor > best_floor:
                best, best_floor = option, floor
        return best

    def _is_losing(self, option: SessionStrategy) -> bool:
        """Whether a way is worse than plain rounds, measured with some certainty or felt strongly."""
        if option.deficit > MAX_DEFICIT:
            return True
        if self._rounds_in_use < 2 or not option.is_tried:
            return False
        estimate = self._estimate(option)
        behind = self._estimate(self._plain).rate - estimate.rate
        return estimate.weight >= MIN_GUARD_WEIGHT and behind > GUARD_ERRORS * estimate.error

    def _flee(self, option: SessionStrategy) -> None:
        """To what has no part in the trouble: without a draft model, if that was the trouble."""
        option.abandon(self._num_rounds)
        if option.record.num_rounds < TRIAL_ROUNDS:
            self._experience.pay_probe(max(0.0, option.behind))
        if not option.is_tried or option.record.evidence.rate < self._estimate(self._plain).rate:
            self._experience.fail(option.record)
        others = [other for other in self._candidates() if not (other.is_drafted and option.is_drafted)]
        untried = [other for other in others if not (other.is_tried or other.is_drafted)]
        best = self._best([other for other in others if other.is_tried])
        self._go(untried[0] if untried and best is self._plain else best)

    def _gain(self, option: SessionStrategy, usual: Estimate) -> float:
        """By how much a way is better for sure, beyond what a change must bring; 0 or less = it is not."""
        estimate = self._estimate(option)
        doubt = GAIN_ERRORS * math.hypot(estimate.error, usual.error)
        return estimate.rate - MIN_GAIN * usual.rate - doubt

    def _compare(self, option: SessionStrategy) -> None:
        """Changes to a better way, or begins a probe."""
        usual = self._estimate(option)
        candidates = self._candidates(option)
        gains = [(self._gain(other, usual), other) for other in candidates if other.is_tried]
        gains.append((self._gain(self._plain, usual), self._plain))
        gain, best = max(gains, key=lambda pair: pair[0])
        if gain > 0:
            self._go(best)
        elif self._num_rounds >= self._first_probe_at and self._experience.is_probe_due:
            if not self._experience.can_pay_probe:
                is_cheap = usual.rate < CHEAP_RATE * self._estimate(self._plain).rate
                candidates = [other for other in candidates if is_cheap and not other.is_drafted]
            is_plain = self._may_plain_be_better(usual.rate)
            probed = self._plain if is_plain else self._worth_probing(candidates, usual.rate)
            if probed is not None:
                self._probe = Trial(probed, option, usual.rate)
                self._experience.begin_probe()
                self._go(probed)

    def _worth_probing(self, candidates: Sequence[SessionStrategy], usual_rate: float) -> SessionStrategy | None:
        """What could be better: the first that was never tried, then the one that promises most."""
        now = self._experience.num_rounds
        candidates = [option for option in candidates if option.record.retry_at <= now]
        if self._experience.num_rounds_at(self._temperatures) < SECOND_TRIED_AFTER and not self._is_first_bad():
            candidates = [option for option in candidates if not option.is_tried][:1]
            return candidates[0] if candidates and candidates[0] is self._first_preference else None
        best, best_ceiling = None, usual_rate
        for option in candidates:
            if not option.is_tried:
                return option
            estimate = self._estimate(option)
            ceiling = estimate.rate + PROBE_ERRORS * estimate.error + usual_rate / estimate.weight
            if ceiling > best_ceiling:
                best, best_ceiling = option, ceiling
        return best

    def _may_plain_be_better(self, usual_rate: float) -> bool:
        """Whether plain rounds should be measured: the way in use is close to them, and it can be paid."""
        plain_rate = self._estimate(self._plain).rate
        ceiling = plain_rate + PLAIN_ERRORS * self._experience.plain_error(self._temperatures)
        is_paid = usual_rate < MIN_GAIN * plain_rate or self._experience.can_pay_probe
        return self._option is not self._plain and is_paid and usual_rate < ceiling

    @property
    def _first_preference(self) -> SessionStrategy | None:
        return next((option for option in self._options if option.is_available), None)

    def _is_first_bad(self) -> bool:
        """Whether the first preference is known to be worse than plain rounds."""
        first = self._first_preference
        if first is None or not first.is_tried:
            return first is None or first.record.num_failures > 0
        return self._estimate(first).rate < self._estimate(self._plain).rate

    def _go_on_probing(self, probe: Trial) -> None:
        """Goes on with a probe, or ends it: the other way has won, or the usual one goes on."""
        option, was = probe.option, self._estimate(probe.usual)
        outcome = TrialOutcome.CLEARLY_LOST if option.deficit > MAX_DEFICIT else TrialOutcome.OPEN
        if outcome is TrialOutcome.OPEN and (option.is_tried or option is self._plain):
            outcome = probe.outcome(self._estimate(option), was)
        if outcome is TrialOutcome.OPEN or (
            outcome is TrialOutcome.GOOD and self._gain(option, was) <= 0 and probe.prolong()
        ):
            return
        self._probe = None
        if outcome is TrialOutcome.GOOD:
            probe.win(self._experience)
            return
        probe.lose(self._experience, outcome is TrialOutcome.CLEARLY_LOST)
        if not option.is_tried or self._estimate(option).rate < self._estimate(self._plain).rate:
            option.abandon(self._num_rounds)
            self._experience.fail(option.record)
        self._go(probe.usual if probe.usual.is_available else self._first())


PROBE_ROUNDS = 8
"""Rounds of a probe, the first one included, which says nothing. One that goes well is prolonged by as many."""
MAX_PROBE_ROUNDS = 64
"""A probe that has gone well for so long has won."""
MIN_PROBE_ROUNDS = 4
"""Rounds of a probe before it is given up, unless it falls far behind plain rounds."""
GIVE_UP_ERRORS = 1.5
"""Standard errors below the usual way at which it is."""
CLEAR_ERRORS = 1.0
"""Standard errors below the usual way at which it has clearly lost."""


class TrialOutcome(Enum):
    """How a probe stands."""

    OPEN = 0
    GOOD = 1
    """Not worse than the usual way, as far as it was to go. It may be prolonged."""
    LOST = 2
    CLEARLY_LOST = 3


class Trial:
    """Of one session: an option is tried, and the usual one gone back to if it loses."""

    def __init__(self, option: SessionStrategy, usual: SessionStrategy, usual_rate: float) -> None:
        self.option = option
        self.usual = usual
        self._usual_rate = usual_rate
        self._planned_rounds = PROBE_ROUNDS
        self._num_rounds = 0
        self._cost = self._gain = self._paid = 0.0

    def pay(self, num_tokens: int, cost: float, experience: StrategyHistory) -> None:
        """After each round: the time that the probe is behind the usual way so far, for it may be cut off any time."""
        self._num_rounds += 1
        self._cost += cost
        self._gain += num_tokens / self._usual_rate
        paid = max(0.0, self._cost - self._gain)
        experience.pay_probe(paid - self._paid)
        self._paid = paid

    def outcome(self, now: Estimate, was: Estimate) -> TrialOutcome:
        """How it stands after these rounds.

        Args:
            now: What the option promises.
            was: What the usual one does.
        """
        if self._num_rounds < MIN_PROBE_ROUNDS:
            return TrialOutcome.OPEN
        # Few rounds that all bring little vary little: another way is taken to vary as much as the usual one.
        error = math.hypot(max(now.error, was.deviation / math.sqrt(now.weight)), was.error)
        is_over = self._num_rounds >= self._planned_rounds
        if now.rate >= was.rate - (0.0 if is_over else GIVE_UP_ERRORS * error):
            return TrialOutcome.GOOD if is_over else TrialOutcome.OPEN
        return TrialOutcome.CLEARLY_LOST if now.rate + CLEAR_ERRORS * error < was.rate else TrialOutcome.LOST

    def prolong(self) -> bool:
        """Some more rounds, to be sure. False = there were enough."""
        self._planned_rounds += PROBE_ROUNDS
        return self._num_rounds < MAX_PROBE_ROUNDS

    def win(self, experience: StrategyHistory) -> None:
        """It has found a better way: what it cost was well spent."""
        experience.pay_probe(-self._paid)
        experience.win_probe(self.option.record)

    def lose(self, experience: StrategyHistory, is_clear: bool) -> None:
        """It has found nothing. If that is clear, all its time was lost. Trying what takes no draft model is cheap, and
        puts off no other probe."""
        if is_clear:
            experience.pay_probe(self._cost - self._paid)
        experience.lose_probe(is_clear and self.option.is_drafted)
