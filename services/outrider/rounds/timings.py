"""Running means of what rounds and peers cost. Rounds decide from them how much to verify and how long to wait."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from outrider.core.auto.group import Group, Share, load_class_of
from outrider.core.auto.history import StrategyHistory
from outrider.core.auto.strategies import Strategy
from outrider.core.calibration import RetrievalCalibration
from outrider.core.costs import Contexts, ForwardTimes
from outrider.core.statistics import RunningMean

FIRST_OVERHEAD_MS = 0.5
"""Assumed overhead of a round until one was measured."""
LEARNING_RATE = 0.05
"""Weight of one round in the running mean of overheads."""
QUIET_STEPS = 8
"""Steps without a draft model after which it no longer slows a step down."""


class Activity(IntEnum):
    """The work of a session besides its forward."""

    NONE = 0
    RETRIEVING = 1
    DRAFTING = 2

    @classmethod
    def of(cls, strategy: Strategy) -> Activity:
        """Returns the activity of a session that follows a strategy."""
        if strategy.method.has_draft_model:
            return cls.DRAFTING
        return cls.NONE if strategy.is_plain else cls.RETRIEVING


class EngineTimings:
    """Holds what an engine has measured over all its sessions. Owned by the engine's thread."""

    def __init__(self, forward_times: ForwardTimes, max_num_rows: int = 32) -> None:
        """
        Args:
            forward_times: Times of the target's forwards by their rows, as measured when the server started.
            max_num_rows: Most drafted rows of a sub-tree if the request names no number.
        """
        self.max_num_rows = max_num_rows
        self.num_sessions = 0
        """Sessions that share the forwards now."""
        self.max_num_nodes = RunningMean(0.5)
        """Most nodes of a session in a forward, whose rows all sessions share; at most `MAX_ROWS`, which no request
        exceeds."""
        self._activity = Activity.NONE
        self._num_quiet_steps = 0
        self._stepped_at: float | None = None
        """End of the latest step. None means that nothing ran before this one."""
        self._num_numbered = 0

        # The target.
        self.forward_times = forward_times
        self.forward_ms = RunningMean()
        # Without a first value, forwards would seem to take no time, and no draft would be worth a wait.
        self.forward_ms.add(forward_times.of(1))
        self._overheads = Overheads()

        # The peers.
        self.speculator_ms = RunningMean()
        """Time from a commit that leaves nothing to verify (in turns: any commit) to the drafter's first answer."""
        self.draft_forward_ms = RunningMean()
        """The part of it that the draft model's forwards take."""
        self.datastore_ms = RunningMean()
        """Time from a commit to the datastore's answer."""
        self.answer_value = RunningMean(0.1)
        """Tokens of such an answer that the target emits."""

        # What the choices of all sessions have brought.
        self.retrieval = RetrievalCalibration()
        self.history = StrategyHistory(self.plain_ms)
        """Strategies that `auto` has tried with sessions that ran alone."""
        self.group = Group()
        """Chooses among them for sessions that share forwards."""

    def number_session(self) -> int:
        """Returns the number of a new session of `auto`, counted from 1."""
        self._num_numbered += 1
        return self._num_numbered

    def set_sessions(self, activities: Sequence[Activity], num_slots: int = 0) -> None:
        """Sets the activities of the sessions that share the forwards from now on, and the slots of all their
        contexts."""
        self.num_sessions = len(activities)
        self.forward_times.contexts = Contexts(num_slots, max(1, len(activities)))
        self._activity = max(activities, default=Activity.NONE)
        self._num_quiet_steps = 0 if self._activity is Activity.DRAFTING else self._num_quiet_steps + 1
        plain_ms = self.history.plain_ms = self.plain_ms
        self.group.set_load(self.num_sessions, plain_ms)
        if not activities:
            self._stepped_at = None

    def end_step(self, shares: Sequence[Share], now: float, *, is_typical: bool) -> None:
        """Has the sessions that share forwards learn from a step.

        Args:
            shares: As `Group.end_step` wants them.
            now: Its end, in seconds.
            is_typical: False if the step's duration is not representative.
        """
        if shares and self.num_sessions > 1 and self._stepped_at is not None:
            self.group.end_step(shares, (now - self._stepped_at) * 1e3, is_typical=is_typical)
        self._stepped_at = now

    def set_draft_ms(self, draft_ms: float) -> None:
        """Sets the time of a draft forward of one row, in milliseconds; 0 leaves it as it is."""
        self.history.draft_ms = self.group.draft_ms = draft_ms or self.history.draft_ms

    def add_overhead(self, overhead_ms: float) -> None:
        """Adds the time of a round that went neither to its forward nor to waiting."""
        # A draft model that was told to pause finishes its current work, and may slow down steps that seem to run
        # without it.
        if self._activity is Activity.DRAFTING or self._num_quiet_steps >= QUIET_STEPS:
            self._overheads.add(overhead_ms, max(1, self.num_sessions), self._activity)

    def overhead_ms(self, activity: Activity) -> float:
        """Returns the time of a round that goes neither to its forward nor to waiting, if all sessions have this
        activity."""
        return self._overheads.of(max(1, self.num_sessions), activity)

    @property
    def plain_ms(self) -> float:
        """Time of a round that verifies nothing, while the other sessions verify nothing either."""
        return self.forward_times.of(max(1, self.num_sessions)) + self.overhead_ms(Activity.NONE)


class Overheads:
    """Holds the running means of a round's time besides its forward: by the number of sessions, and by their highest
    activity."""

    def __init__(self) -> None:
        # By activity, then by class of the number of sessions.
        self._means: list[dict[int, RunningMean]] = [{} for _ in Activity]

    def add(self, overhead_ms: float, num_sessions: int, activity: Activity) -> None:
        """Adds a round."""
        means, load_class = self._means[activity], load_class_of(num_sessions)
        mean = means.get(load_class)
        if mean is None:
            mean = means[load_class] = RunningMean(LEARNING_RATE)
        mean.add(overhead_ms)

    def of(self, num_sessions: int, activity: Activity) -> float:
        """Returns the usual overhead in milliseconds, known for the nearest number of sessions."""
        means, load_class = self._means[activity], load_class_of(num_sessions)
        if means:
            nearest = load_class if load_class in means else min(means, key=lambda each: (abs(each - load_class), each))
            return means[nearest].get(FIRST_OVERHEAD_MS)
        return self.of(num_sessions, Activity(activity - 1)) if activity else FIRST_OVERHEAD_MS
