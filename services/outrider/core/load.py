"""The load of a server among several that can do the same work, as one of its callers sees it."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

MOST_SESSIONS = 1 << 20
"""Most sessions that a server is believed to have, or to take."""
USUAL_MAX_NUM_SESSIONS = 64
"""Most sessions of a server that has not said how many it takes."""


class LoadEstimate:
    """Estimates how many sessions a server has: its last report, and the sessions that this process has begun and ended
    there since.

    Without the second part a burst of sessions would all go to the server that was least loaded before it. A session is
    any object that lives as long as the session does, or until `end`.
    """

    __slots__ = ("_own", "_unreported", "busy", "max_num_sessions", "num_reported")

    def __init__(self) -> None:
        self.num_reported = 0
        """Sessions of the last report, less those of this process that have ended since."""
        self.max_num_sessions = 0
        """Most sessions at a time. 0 means that the server has not said it."""
        self.busy = 0.0
        """Share of the time that the server is busy, 0 to 1."""
        # Weak: a session that is dropped without `end` must not count for ever.
        self._own: WeakSet[object] = WeakSet()
        self._unreported: WeakSet[object] = WeakSet()

    def begin(self, session: object) -> None:
        """Counts a session that this process opens there. Does nothing if it is counted."""
        if session not in self._own:
            self._own.add(session)
            self._unreported.add(session)

    def opened(self, session: object) -> None:
        """Records that the server has taken a session without reporting its load."""
        if session in self._unreported:
            self._unreported.discard(session)
            self.num_reported += 1

    def report(
        self, num_sessions: int, max_num_sessions: int, busy: float = 0.0, session: object | None = None
    ) -> None:
        """Takes in a report of the server.

        Args:
            num_sessions: Sessions there now, of all callers.
            max_num_sessions: Most of them at a time.
            busy: Share of the time that it is busy, 0 to 1.
            session: The session whose opening the report came with; `num_sessions` includes it. None means that it came
                with no opening.
        """
        if session is not None:
            self._unreported.discard(session)
        # Reports come from the network: impossible values must not make a server look empty, or full for ever.
        self.num_reported = min(MOST_SESSIONS, max(0, num_sessions))
        self.max_num_sessions = min(MOST_SESSIONS, max(0, max_num_sessions))
        self.busy = min(1.0, max(0.0, busy))

    def end(self, session: object) -> None:
        """Counts a session that is over. Does nothing if it is not counted."""
        if session in self._own:
            if session not in self._unreported:
                self.num_reported = max(0, self.num_reported - 1)
            self._own.discard(session)
            self._unreported.discard(session)

    def forget(self) -> None:
        """Forgets the last report: it is old, or the process that made it is gone."""
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
        """True if the server would refuse a session, by its last report."""
        return 0 < self.max_num_sessions <= self.num_sessions

    def share_with(self, num_more: int = 0) -> float:
        """Returns the share of the server that would be in use with so many more sessions.

        A server that is busy all the time counts as having one session more: among servers with equally many sessions
        it is the fullest, whatever else it does.
        """
        return (self.num_sessions + num_more + self.busy) / (self.max_num_sessions or USUAL_MAX_NUM_SESSIONS)


AVOID_S = 1.0
"""Least time for which a failed server is avoided, in seconds."""
MAX_AVOID_S = 30.0
BELIEVED_S = 5.0
"""Time for which a report of a server's load is believed, in seconds. After that the server is tried again."""


class ReplicaLoads:
    """Chooses a server for each call, among several that can do the same work: the least loaded one.

    Holds each server's reported load, and which ones have just failed. Servers are numbered from 0. `now` is in seconds
    since any fixed moment, the same one in all calls.
    """

    def __init__(self, count: int, turn: int = 0) -> None:
        """
        Args:
            count: Servers, at least one.
            turn: The one whose turn is first among equals.
        """
        self._turn = turn
        self._loads = [LoadEstimate() for _ in range(count)]
        self._believed_until = [0.0] * count
        self._avoided_until = [0.0] * count  # in the past: none is avoided

    def choose(self, now: float, num_failures: Sequence[int] = (), session: object | None = None) -> int:
        """Returns the number of the server to call: the least loaded one; among equals, the next one in turn.

        Servers that have just failed come after all others. In either group, the one that has failed this call least
        often comes first. Among those that have just failed, the first to come back is next.

        Args:
            now: The time.
            num_failures: How often each has failed this call. Empty means that none has.
            session: Counts as a session there until `end`, or as long as it lives. None means a call that is soon over.
        """
        count = len(self._loads)

        def merit(number: int) -> tuple[bool, int, float]:
            failures = num_failures[number] if num_failures else 0
            is_avoided = self._avoided_until[number] > now
            return is_avoided, failures, self._avoided_until[number] if is_avoided else self._share(number, now)

        # `min` takes the first of equals, so the one in turn.
        chosen = min(((self._turn + offset) % count for offset in range(count)), key=merit)
        self._turn = (chosen + 1) % count
        if session is not None:
            self.begin(chosen, session)
        return chosen

    def _share(self, number: int, now: float) -> float:
        load = self._loads[number]
        if now >= self._believed_until[number]:
            load.forget()
        return load.share_with()

    def begin(self, number: int, session: object) -> None:
        """Counts a session that goes to a server, whatever the server's load."""
        self._loads[number].begin(session)

    def started(
        self, number: int, session: object, now: float, *, num_sessions: int, num_queued: int, max_num_sessions: int
    ) -> None:
        """Records that a server has begun with a session, and its report of its load.

        Args:
            number: The server.
            session: The session.
            now: The time.
            num_sessions: Sessions there, of all callers. 0 means that it does not report its load.
            num_queued: How many of them wait for room.
            max_num_sessions: Most of them at a time.
        """
        if not num_sessions:
            self._loads[number].opened(session)
            return
        # A session that waits for room counts twice: the next one would have to wait, too.
        self._loads[number].report(num_sessions + num_queued, max_num_sessions, session=session)
        self._believed_until[number] = now + BELIEVED_S

    def end(self, number: int, session: object) -> None:
        """Records that a session is over at a server."""
        self._loads[number].end(session)

    def answered(self, number: int) -> None:
        """Records that a server has answered: it gets calls in its turn again."""
        self._avoided_until[number] = 0.0

    def failed(self, number: int, now: float, silent_s: float) -> None:
        """Records that a server has failed after sending nothing for `silent_s`. It is avoided for as long: otherwise
        every call would wait again for a server that hangs."""
        self._avoided_until[number] = now + min(MAX_AVOID_S, max(AVOID_S, silent_s))

    def has_fresh(self, now: float) -> bool:
        """Returns True if at least one server has not just failed."""
        return min(self._avoided_until) <= now
