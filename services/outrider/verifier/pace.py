"""What the verifier's engine has measured, over all sessions. Times in milliseconds."""

from __future__ import annotations

from outrider.core.calibration import Calibration
from outrider.core.experience import Experience
from outrider.core.rows import ForwardTimes
from outrider.core.statistics import RunningMean
from outrider.verifier.counts import RoundCounts


class Pace:
    """Owned by the engine's thread."""

    def __init__(self, forward_times: ForwardTimes, max_num_rows: int = 32) -> None:
        self.max_num_rows = max_num_rows
        """Most drafted rows of a sub-tree whose size nobody has asked for."""
        self.forward_times = forward_times
        """As measured when the server started."""
        self.forward_ms = RunningMean()
        self.forward_ms.add(forward_times.of(1))
        self.overhead_ms = RunningMean(0.05)
        """Of a round: all but the forward and the waiting."""
        self.speculator_ms = RunningMean()
        """From a commit that leaves nothing to verify to the speculator's first answer."""
        self.draft_forward_ms = RunningMean()
        """What the draft model's forwards took of that."""
        self.datastore_ms = RunningMean()
        """From a commit to the datastore's answer."""
        self.answer_value = RunningMean(0.1)
        """Tokens of its answer that the target says."""
        self.retrieval = Calibration()
        self.counts = RoundCounts()
        self.num_sessions = 0
        """Sessions that share the forwards now."""
        self._num_opened = 0
        self.experience = Experience(self.plain_ms)
        """Of `Method.AUTO`."""

    def number_session(self) -> int:
        """Sessions are numbered."""
        self._num_opened += 1
        return self._num_opened

    def set_num_sessions(self, count: int) -> None:
        """So many sessions share the forwards from here on."""
        self.num_sessions = count
        self.experience.plain_ms = self.plain_ms

    @property
    def plain_ms(self) -> float:
        """A round that verifies nothing."""
        return self.forward_times.of(max(1, self.num_sessions)) + self.overhead_ms.get(0.5)
