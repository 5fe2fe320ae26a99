"""Running means of what rounds and peers cost, from which rounds decide how much to verify and how long to wait."""

from __future__ import annotations

from outrider.core.auto.history import StrategyHistory
from outrider.core.calibration import RetrievalCalibration
from outrider.core.costs import ForwardTimes
from outrider.core.statistics import RunningMean

FIRST_OVERHEAD_MS = 0.5
"""Overhead of a round until one was measured."""


class EngineTimings:
    """Holds what an engine has measured over all its sessions. Owned by the engine's thread."""

    def __init__(self, forward_times: ForwardTimes, max_num_rows: int = 32) -> None:
        """
        Args:
            forward_times: Times of the target's forwards by their rows, as measured when the server started.
            max_num_rows: Most drafted rows of a sub-tree, where the request names no number.
        """
        self.max_num_rows = max_num_rows
        self.num_sessions = 0
        """Sessions that share the forwards now."""
        self._num_numbered = 0

        # The target.
        self.forward_times = forward_times
        self.forward_ms = RunningMean()
        # Without a first value a forward would seem to take no time, and no draft be worth a wait.
        self.forward_ms.add(forward_times.of(1))
        self._overhead_ms = RunningMean(0.05)

        # The peers.
        self.speculator_ms = RunningMean()
        """Time from a commit that leaves nothing to verify to the drafter's first answer."""
        self.draft_forward_ms = RunningMean()
        """The part of it that the draft model's forwards took."""
        self.datastore_ms = RunningMean()
        """Time from a commit to the datastore's answer."""
        self.answer_value = RunningMean(0.1)
        """Tokens of such an answer that the target emits."""

        # What the choices of all sessions have brought.
        self.retrieval = RetrievalCalibration()
        self.history = StrategyHistory(self.plain_ms)
        """Strategies that `Method.AUTO` has tried."""

    def number_session(self) -> int:
        """Returns the number of a new session of `Method.AUTO`, from 1 on."""
        self._num_numbered += 1
        return self._num_numbered

    def set_num_sessions(self, count: int) -> None:
        """Sets how many sessions share the forwards from here on."""
        self.num_sessions = count
        self.history.plain_ms = self.plain_ms
        self.history.num_sharing = max(1, count)

    def add_overhead(self, overhead_ms: float) -> None:
        """Adds the time of a round that went neither to its forward nor to waiting."""
        self._overhead_ms.add(overhead_ms)

    @property
    def overhead_ms(self) -> float:
        """Time of a round that goes neither to its forward nor to waiting."""
        return self._overhead_ms.get(FIRST_OVERHEAD_MS)

    @property
    def plain_ms(self) -> float:
        """Time of a round that verifies nothing."""
        return self.forward_times.of(max(1, self.num_sessions)) + self.overhead_ms
