"""A probe: some rounds of another way, to see whether it is better. It pays for what it loses."""

from __future__ import annotations

import math
from enum import Enum

from outrider.core.experience import Experience
from outrider.core.option import Estimate, Option

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


class Outcome(Enum):
    """How a probe stands."""

    OPEN = 0
    GOOD = 1
    """Not worse than the usual way, as far as it was to go. It may be prolonged."""
    LOST = 2
    CLEARLY_LOST = 3


class Probe:
    """Of one session: an option is tried, and the usual one gone back to if it loses."""

    def __init__(self, option: Option, usual: Option, usual_rate: float) -> None:
        self.option = option
        self.usual = usual
        self._usual_rate = usual_rate
        self._planned_rounds = PROBE_ROUNDS
        self._num_rounds = 0
        self._cost = self._gain = self._paid = 0.0

    def pay(self, num_tokens: int, cost: float, experience: Experience) -> None:
        """After each round: the time that the probe is behind the usual way so far, for it may be cut off any time."""
        self._num_rounds += 1
        self._cost += cost
        self._gain += num_tokens / self._usual_rate
        paid = max(0.0, self._cost - self._gain)
        experience.pay_probe(paid - self._paid)
        self._paid = paid

    def outcome(self, now: Estimate, was: Estimate) -> Outcome:
        """How it stands after these rounds.

        Args:
            now: What the option promises.
            was: What the usual one does.
        """
        if self._num_rounds < MIN_PROBE_ROUNDS:
            return Outcome.OPEN
        # Few rounds that all bring little vary little: another way is taken to vary as much as the usual one.
        error = math.hypot(max(now.error, was.deviation / math.sqrt(now.weight)), was.error)
        is_over = self._num_rounds >= self._planned_rounds
        if now.rate >= was.rate - (0.0 if is_over else GIVE_UP_ERRORS * error):
            return Outcome.GOOD if is_over else Outcome.OPEN
        return Outcome.CLEARLY_LOST if now.rate + CLEAR_ERRORS * error < was.rate else Outcome.LOST

    def prolong(self) -> bool:
        """Some more rounds, to be sure. False = there were enough."""
        self._planned_rounds += PROBE_ROUNDS
        return self._num_rounds < MAX_PROBE_ROUNDS

    def win(self, experience: Experience) -> None:
        """It has found a better way: what it cost was well spent."""
        experience.pay_probe(-self._paid)
        experience.win_probe(self.option.record)

    def lose(self, experience: Experience, is_clear: bool) -> None:
        """It has found nothing. If that is clear, all its time was lost. Trying what takes no draft model is cheap, and
        puts off no other probe."""
        if is_clear:
            experience.pay_probe(self._cost - self._paid)
        experience.lose_probe(is_clear and self.option.is_drafted)
