"""The number of steps that a draft model is asked for at once, where its device can make several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from outrider.core.statistics import RunningMean

FIRST_GAP_S = 0.0005
"""Seconds between two loops, until they were measured."""
LEARNING_RATE = 0.1
"""Weight of one loop in the running means."""
_Shares = defaultdict[int, RunningMean]


def _new_share() -> RunningMean:
    return RunningMean(LEARNING_RATE)


class LoopChoice:
    """Chooses among the lengths of a loop by what loops have cost so far. Owned by an engine's thread.

    Steps after the ends of the chains are wasted; steps that are asked for in a second loop wait for the host.
    """

    def __init__(self) -> None:
        self._begin, self._rest = _Shares(_new_share), _Shares(_new_share)
        """Share of the loops in which a chain went on after a number of steps: of loops that begin chains, and of loops
        that continue one."""
        self._goes_on = self._begin
        """The one of these two that the latest choice used."""
        self._shorter: Sequence[int] = ()
        """All lengths of the latest choice but the longest one."""
        self._step_s, self._gap_s = RunningMean(LEARNING_RATE), RunningMean(LEARNING_RATE)
        self._ended_at: float | None = None
        """End of the latest loop, if a chain goes on after it."""

    def choose(self, lengths: Sequence[int]) -> int:
        """Returns one of some lengths, of which there is at least one.

        Args:
            lengths: Ascending.
        """
        self._goes_on, self._shorter = self._begin if self._ended_at is None else self._rest, lengths[:-1]
        for shorter, longer in pairwise(lengths):
            rest_s = (longer - shorter) * self._step_s.get(0.0)
            # Compares the remaining steps at once with the same steps after a gap, in the loops that want them.
            if rest_s >= self._goes_on[shorter].get(0.0) * (self._gap_s.get(FIRST_GAP_S) + rest_s):
                return shorter
        return lengths[-1]

    def could_end_at(self, num_steps: int) -> bool:
        """Returns True if the latest choice could have been so many steps; it may have been more."""
        return num_steps in self._shorter

    def observe(
        self,
        length: int,
        started: float,
        ended: float,
        *,
        num_used: int,
        goes_on: bool,
    ) -> None:
        """Learns from a loop.

        Args:
            length: Its steps.
            started: Time at which the engine began with it, in seconds.
            ended: Time at which it was done.
            num_used: Most of its steps that were worth their time to a chain.
            goes_on: True if a chain goes on after it with another loop.
        """
        if self._ended_at is not None:
            self._gap_s.add(started - self._ended_at)
        self._ended_at = ended if goes_on else None
        self._step_s.add((ended - started) / length)
        for shorter in self._shorter:
            # A loop shows nothing of what would come after its own length.
            if shorter <= length:
                self._goes_on[shorter].add(float(num_used > shorter or (num_used == shorter == length and goes_on)))
