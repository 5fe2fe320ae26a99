"""The number of steps that a draft model is asked for at once, where its device can make several."""

from __future__ import annotations

from outrider.core.statistics import RunningMean

FIRST_GAP_S = 0.0005
"""Seconds between two loops, until they were measured."""
LEARNING_RATE = 0.1
"""Weight of one loop in the running means."""


class LoopChoice:
    """Chooses between two lengths of a loop by what loops have cost so far. Owned by an engine's thread.

    Steps behind the ends of the chains are made in vain; steps that are asked for in a second loop wait for the host.
    """

    def __init__(self) -> None:
        self._begin_goes_on, self._rest_goes_on = RunningMean(LEARNING_RATE), RunningMean(LEARNING_RATE)
        """Share of the loops behind whose first steps, as many as the shorter length has, a chain went on: of those
        that begin chains, and of those that go on with one."""
        self._goes_on = self._begin_goes_on
        """The one of the two that the latest choice was made by."""
        self._step_s, self._gap_s = RunningMean(LEARNING_RATE), RunningMean(LEARNING_RATE)
        self._num_first = 0
        """The shorter length of the latest choice. 0 means that there was none."""
        self._ended_at: float | None = None
        """End of the latest loop, if a chain goes on behind it."""

    def choose(self, longer: int, shorter: int) -> int:
        """Returns one of two lengths; the longer one where `shorter` is 0, as there is no other."""
        self._num_first = shorter
        self._goes_on = self._begin_goes_on if self._ended_at is None else self._rest_goes_on
        rest_s = (longer - shorter) * self._step_s.get(0.0)
        # The other steps, made at once, or behind a gap and only where they are wanted.
        is_longer = rest_s < self._goes_on.get(0.0) * (self._gap_s.get(FIRST_GAP_S) + rest_s)
        return longer if is_longer or not shorter else shorter

    def observe(self, length: int, started: float, ended: float, *, num_used: int, goes_on: bool) -> None:
        """Learns from a loop.

        Args:
            length: Its steps.
            started: Time at which the engine began with it, in seconds.
            ended: Time at which it was done.
            num_used: Most of its steps that a chain has taken.
            goes_on: True if a chain goes on behind it with another loop.
        """
        if self._ended_at is not None:
            self._gap_s.add(started - self._ended_at)
        self._ended_at = ended if goes_on else None
        self._step_s.add((ended - started) / length)
        if self._num_first:
            self._goes_on.add(float(num_used > self._num_first or (num_used == length == self._num_first and goes_on)))
