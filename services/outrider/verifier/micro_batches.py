"""Two halves of a batch of sessions: the device verifies the drafts of one while the host works for the other.

A drafted round follows from the verdict before it, so a device that verifies all sessions at once waits while the host
makes their verdicts and chooses their next nodes. Two smaller forwards take longer than a large one, as each reads all
weights; they are faster where that costs less than what the host does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from outrider.core.costs import Contexts, ForwardTimes
from outrider.verifier.session import VerifySession

MARGIN = 1.1
"""Ratio of the times without and with micro-batches from which on there are some: the times are only expected."""

NUM_TIMES = 9
"""Latest times of the host that count for a number of sessions. Their median does: some rounds have more to do."""
MIN_TIMES = 5
"""Times that are needed for that."""
MAX_AGE = 300
"""Rounds after which a time of the host is forgotten: what it has to do changes with the texts."""


class HostTimes:
    """Holds how long the host works between two forwards, by the number of sessions: what is done once for all of them
    makes it shorter for each of many."""

    def __init__(self) -> None:
        self._num_rounds = 0
        self._latest: dict[int, deque[tuple[int, float]]] = {}
        """Rounds by the class of the number of sessions: the number of each, and milliseconds for each session."""

    def add(self, time_ms: float, num_sessions: int) -> None:
        """Takes in a round of so many sessions."""
        self._num_rounds += 1
        latest = self._latest.setdefault(_class_of(num_sessions), deque(maxlen=NUM_TIMES))
        latest.append((self._num_rounds, time_ms / num_sessions))

    def of(self, num_sessions: int) -> float | None:
        """Returns the usual time in milliseconds; None if there are not enough rounds of about as many sessions."""
        latest = self._latest.get(_class_of(num_sessions), ())
        times_ms = [time_ms for number, time_ms in latest if number > self._num_rounds - MAX_AGE]
        return num_sessions * median(times_ms) if len(times_ms) >= MIN_TIMES else None


def _class_of(num_sessions: int) -> int:
    """Returns the class of a number: 1, 2, 3 to 4, 5 to 8, and so on, so that either half is of a lower one."""
    return (num_sessions - 1).bit_length()


class Load(NamedTuple):
    """Describes the work of a forward."""

    num_rows: int
    contexts: Contexts

    @classmethod
    def of(cls, sessions: Sequence[VerifySession], max_num_nodes: int) -> Load:
        """Returns that of the next forward of these sessions, whose nodes are chosen.

        Args:
            sessions: Some that decode.
            max_num_nodes: Most nodes of each.
        """
        num_rows = sum(1 + min(max_num_nodes, len(session.nodes)) for session in sessions)
        return cls(num_rows, Contexts(sum(session.cache.length for session in sessions), len(sessions)))

    def and_of(self, other: Load) -> Load:
        """Returns that of a forward that has the rows of both."""
        num_slots, num_sessions = (sum(both) for both in zip(self.contexts, other.contexts, strict=True))
        return Load(self.num_rows + other.num_rows, Contexts(num_slots, num_sessions))


class MicroBatches:
    """Decides when a batch is verified in two halves. Owned by the engine's thread."""

    def __init__(self, forward_times: ForwardTimes) -> None:
        """
        Args:
            forward_times: Times of a forward by its rows.
        """
        self._forward_times = forward_times
        self._host_times = HostTimes()
        """Times from the draws of rounds with drafts to the next forward of their sessions."""
        self._busy_since: tuple[float, int] | None = None
        """Time since which the host works for some sessions, and how many they are. None means that it does not."""

    def begin_host_time(self, now: float, drawing: Sequence[VerifySession]) -> None:
        """Takes in that the host works for these sessions from now on: their draws are known."""
        has_drafts = any(session.nodes for session in drawing)
        self._busy_since = (now, len(drawing)) if has_drafts else None

    def end_host_time(self, now: float) -> None:
        """Learns from the time until now, where a device was asked for the next forward."""
        if self._busy_since is not None:
            since, num_sessions = self._busy_since
            self._host_times.add(1e3 * (now - since), num_sessions)
            self._busy_since = None

    def forget_host_time(self) -> None:
        """Takes in that the host waits for somebody."""
        self._busy_since = None

    def first_of(self, ready: Sequence[VerifySession], max_num_nodes: int) -> Sequence[VerifySession]:
        """Returns the sessions that a device is asked for first, of all that are ready: a half of them, or all.

        Args:
            ready: Sessions whose round begins now.
            max_num_nodes: Most nodes of each.
        """
        half, rest = ready[: len(ready) // 2], ready[len(ready) // 2 :]
        return half if half and self.may_go_on(ready) and self.go_on(half, rest, max_num_nodes) else ready

    def may_go_on(self, sessions: Sequence[VerifySession]) -> bool:
        """Returns False if these sessions are to be verified together, whatever nodes they have.

        They are for a few rounds, until it is known how long the host works for them; and while one reads a prompt,
        waits for a draft model, or has something read of its logits behind the verdict: it would come behind the
        forward of the other half.
        """
        return self._host_times.of(len(sessions)) is not None and not any(map(_stays_together, sessions))

    def go_on(self, first: Sequence[VerifySession], second: Sequence[VerifySession], max_num_nodes: int) -> bool:
        """Returns True if the one half should be verified behind the other one, where it may be.

        Args:
            first: Sessions whose forward begins, or has begun.
            second: Sessions whose round is ready.
            max_num_nodes: Most nodes of each.
        """
        if not any(session.nodes for session in (*first, *second)):
            return False  # without drafts all can be asked for ahead
        return self._pays(Load.of(first, max_num_nodes), Load.of(second, max_num_nodes))

    def _pays(self, first: Load, second: Load) -> bool:
        """Returns True if two forwards, during each of which the host works for the sessions of the other, take less
        time than one forward of all and then the host."""
        times, both = self._forward_times, first.and_of(second)
        num_sessions = both.contexts.num_sessions
        host_ms = self._host_times.of(num_sessions) or 0.0
        of_first, of_second = (
            self._host_times.of(load.contexts.num_sessions) or host_ms * load.contexts.num_sessions / num_sessions
            for load in (first, second)
        )
        together_ms = times.of(*both) + host_ms
        apart_ms = max(times.of(*first), of_second) + max(times.of(*second), of_first)
        return together_ms > MARGIN * apart_ms


def _stays_together(session: VerifySession) -> bool:
    """Returns True for a session that has all others verified together with it."""
    generation, report = session.session, session.session.spec.report
    return (
        session.is_prefilling
        or session.is_drafting
        or session.takes_turns
        or generation.decides_by_ratio
        or not generation.is_as_drawn
        or report.logprobs is not None
        or report.prompt_logprobs is not None
    )
