"""Restarts services that have died, for as long as `outrider up` runs.

Any of them may be killed, the verifier too: generations go on at once without a speculator or a datastore, and clients
resume theirs when a verifier is back. Each pause before a new start is longer than the one before; a service that dies
soon after every start is given up.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from outrider.wire.channels import doubled
from outrider_cli.local.process import ManagedProcess, ProcessFailed

FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 30.0
QUICK_S = 30.0
"""A service that has lived for less than these seconds has died soon after its start."""
MAX_QUICK_ENDS = 5
"""A service that dies so often in a row, soon after each start, is given up."""


@dataclass(slots=True)
class _Life:
    """Holds what is known of the life of a process, for the next decision about it."""

    began_at: float
    num_quick_ends: int = 0
    due_at: float | None = None
    """Time of its next start; None means that it runs, or was given up."""
    away_s: float | None = None
    """Seconds for which it stays away, if it was killed here on purpose."""


class Supervisor:
    """Watches processes, and restarts those that end.

    Use it in the thread that started them, and for as long as they shall live: the kernel ties them to it.
    """

    def __init__(
        self,
        processes: Collection[ManagedProcess],
        vital: Collection[ManagedProcess],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            processes: Processes that run already.
            vital: Those without which there is nothing to run for: `run` ends when the last of them is given up.
            say: Takes a sentence about each death.
            clock: Returns the seconds of any monotonic clock.
        """
        self.selector = selectors.DefaultSelector()
        """For others that want to be served in this thread: `step` calls the function that is registered as the `data`
        of whatever has become ready."""
        self._vital, self._say, self._clock = set(vital), say, clock
        self._lives = {process: _Life(clock()) for process in processes}
        for process in processes:
            self._watch(process)

    def run(self) -> NoReturn:
        """Watches until the last vital process is given up. Raises ProcessFailed then."""
        while True:
            self.step()

    def step(self) -> None:
        """Waits for the next event, and handles it. Raises ProcessFailed."""
        due = [life.due_at for life in self._lives.values() if life.due_at is not None]
        timeout_s = max(0.0, min(due) - self._clock()) if due else None
        for key, _ in self.selector.select(timeout_s):
            key.data()
        for process, life in self._lives.items():
            if life.due_at is not None and life.due_at <= self._clock():
                life.due_at, life.began_at = None, self._clock()
                process.spawn()
                self._watch(process)

    def kill(self, process: ManagedProcess, away_s: float) -> None:
        """Kills a process on purpose; it stays away for so many seconds. One that does not run is left alone."""
        if process.is_running:
            self._lives[process].away_s = away_s
            process.signal_kill()

    def _watch(self, process: ManagedProcess) -> None:
        self.selector.register(process, selectors.EVENT_READ, partial(self._hear, process))

    def _hear(self, process: ManagedProcess) -> None:
        if not process.drain_stdout():
            return
        self.selector.unregister(process)
        ending = process.wait_for_ending()
        was_killed, complaint, tail = process.was_killed, process.complaint(), process.log_tail()
        process.kill()  # it has ended: this only closes the pipe
        life = self._lives[process]
        if life.away_s is not None:
            pause_s, life.away_s = life.away_s, None
        else:
            is_quick = self._clock() - life.began_at < QUICK_S
            life.num_quick_ends = life.num_quick_ends + 1 if is_quick else 0
            pause_s = doubled(FIRST_PAUSE_S, LAST_PAUSE_S, life.num_quick_ends)
        # A process that was killed has not said why: the end of its log is about what it did before.
        why = "" if was_killed else f": {complaint}" if complaint else f"; the end of its log:\n{tail}"
        if life.num_quick_ends >= MAX_QUICK_ENDS:
            self._give_up(process, f"the {process.name} {ending} soon after each of {MAX_QUICK_ENDS} starts", why)
            return
        life.due_at = self._clock() + pause_s
        when = f" in {pause_s:g} s" if pause_s >= 1 else ""
        self._say(f"the {process.name} {ending}; started anew{when}{why}")

    def _give_up(self, process: ManagedProcess, what: str, why: str) -> None:
        was_vital = process in self._vital
        self._vital.discard(process)
        if was_vital and not self._vital:
            raise ProcessFailed(f"{what}{why}")
        self._say(f"{what}, and is given up{why}")
