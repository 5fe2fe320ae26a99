"""The load of a server among several that can do the same work, as one of its callers sees it."""

from __future__ import annotations

from weakref import WeakSet

USUAL_MAX_NUM_SESSIONS = 64
"""Most sessions of a server that has not said how many it takes."""


class LoadEstimate:
    """Estimates how many sessions a server has: as it last said, and what this process has begun and ended there since.

    Without the second part a burst of sessions would all go to the server that had least to do before it. A session is
    any object that lives as long as it does, or until `end`.
    """

    __slots__ = ("_own", "_unreported", "busy", "max_num_sessions", "num_reported")

    def __init__(self) -> None:
        self.num_reported = 0
        """Sessions of the last report, less those of this process that have ended since."""
        self.max_num_sessions = 0
        """Most sessions at a time. 0 means that the server has not said it."""
        self.busy = 0.0
        """Share of the time that the server is busy, 0 to 1."""
        # Weak: whoever drops a session without a word must not count for ever.
        self._own: WeakSet[object] = WeakSet()
        self._unreported: WeakSet[object] = WeakSet()

    def begin(self, session: object) -> None:
        """Counts a session that this process opens there. Does nothing if it is counted."""
        if session not in self._own:
            self._own.add(session)
            self._unreported.add(session)

    def opened(self, session: object) -> None:
        """Takes in that the server has taken a session, without a word on its load."""
        if session in self._unreported:
            self._unreported.discard(session)
            self.num_reported += 1

    def report(
        self, num_sessions: int, max_num_sessions: int, busy: float = 0.0, session: object | None = None
    ) -> None:
        """Takes in what the server says.

        Args:
            num_sessions: Sessions there now, of all callers.
            max_num_sessions: Most of them at a time.
            busy: Share of the time that it is busy, 0 to 1.
            session: The session with whose opening this comes, which `num_sessions` includes. None means that it comes
                with no opening.
        """
        if session is not None:
            self._unreported.discard(session)
        # Reports come from the network: what is impossible must not make a server look empty, or full for ever.
        self.num_reported, self.max_num_sessions = max(0, num_sessions), max(0, max_num_sessions)
        self.busy = min(1.0, max(0.0, busy))

    def end(self, session: object) -> None:
        """Counts a session that is over. Does nothing if it is not counted."""
        if session in self._own:
            if session not in self._unreported:
                self.num_reported = max(0, self.num_reported - 1)
            self._own.discard(session)
            self._unreported.discard(session)

    def forget(self) -> None:
        """Forgets the last report, which is old, or of a process that is gone."""
        self.num_reported, self.busy = 0, 0.0

    @property
    def num_own_sessions(self) -> int:
        """Sessions of this process there."""
        return len(self._own)

    @property
    def num_sessions(self) -> int:
        """Sessions there, of all callers."""
        return max(len(self._own), self.num_reported + len(self._unreported))

    @property
    def is_full(self) -> bool:
        """True if the server would refuse a session by its own word."""
        return 0 < self.max_num_sessions <= self.num_sessions

    def share_with(self, num_more: int = 0) -> float:
        """Returns the share of the server that is in use if it had so many sessions more.

        A server that is busy all the time counts one session more: of those with as many sessions each it is the
        fullest, whatever it has besides.
        """
        return (self.num_sessions + num_more + self.busy) / (self.max_num_sessions or USUAL_MAX_NUM_SESSIONS)
