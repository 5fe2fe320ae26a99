"""The thread of an engine: it owns all sessions of one model and runs them, a packed forward at a time.

The target's engine and the draft model's differ in what a step does. Everything around it is here: the inbox, the
isolation of a session that fails, the check for a failed device, the end.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

import structlog

from outrider.models.packing import Segment
from outrider.models.runner import Runner

log = structlog.get_logger(__name__)

MAX_FAILED_STEPS = 3
"""Steps in a row that fail before the device is suspected."""

OnFailure = Callable[[bool], object]
"""Called when the engine cannot go on with a session, after removing it. Gets True if that is the session's own fault:
its request would fail again wherever it is sent."""


def is_own_fault(error: Exception) -> bool:
    """Returns False for an error of the process or of its machine: another one may serve the same request."""
    return not isinstance(error, MemoryError | OSError)


Session = TypeVar("Session")


class EngineThread(ABC, Generic[Session]):
    """Runs the steps of all sessions on one thread. No other thread touches the sessions, so they need no lock.

    Two engines whose models share a device take turns on one thread: one of them is the other's guest. Any thread may
    call `begin`, `post` and `close`; they return at once. What they post is handled between two turns. Everything
    posted in one iteration of the event loop wakes the thread once. A subclass defines `turn`, and calls `start` as the
    last thing in its constructor.
    """

    def __init__(
        self,
        name: str,
        runner: Runner,
        loop: asyncio.AbstractEventLoop | None = None,
        host: EngineThread[Any] | None = None,
    ) -> None:
        """
        Args:
            name: Name of the thread.
            runner: Runs the forwards, on this thread only.
            loop: Event loop that posts for many sessions in one iteration. None means that there is none.
            host: Engine that lends its thread to this one's turns. None means that it has a thread of its own.
        """
        self.sessions: dict[str, Session] = {}
        """All sessions, by id. Changed by the engine's thread alone."""
        self._runner = runner
        self._host: EngineThread[Any] = host or self
        self._guests: list[EngineThread[Any]] = []
        """Engines that take turns with this one."""
        self._on_failure: dict[str, OnFailure] = {}
        self._posting_loop = loop
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Wakes the thread. Separate from the inbox: a thread that the first of many posts wakes would plan for each of
        them."""
        self._is_waiting = self._is_about_to_ring = False
        self._posted_at = 0.0
        """Time of the last step that found something in the inbox, by `time.perf_counter`."""
        self._is_over = False
        self._num_failed_steps = 0
        self._fault = ""
        self._ended = threading.Event()
        self._thread: threading.Thread = (
            host._thread if host else threading.Thread(target=self._run, name=name, daemon=True)
        )

    def start(self) -> None:
        """Begins to take turns."""
        if self._host is self:
            self._thread.start()
        else:
            self._host._guests.append(self)

    def stop(self) -> None:
        """Ends the turns after the current one, and waits for that. Idempotent."""
        self._inbox.put(None)
        self._host._ring()  # not by way of the loop, which may be waiting for the thread here
        if self._host is self:
            self._thread.join()
        elif self._thread.is_alive():
            self._ended.wait()

    # Called by any thread.

    def begin(self, session_id: str, open_session: Callable[[], Session], on_failure: OnFailure) -> None:
        """Begins a session.

        Args:
            session_id: Names the session for `post` and `close`.
            open_session: Makes the session, on the engine's thread.
            on_failure: Called on the engine's thread, see `OnFailure`.
        """
        self._put(partial(self._begin, session_id, open_session, on_failure))

    def post(self, session_id: str, action: Callable[[Session], object]) -> None:
        """Has the engine's thread call the action with a session. Does nothing if the session has ended by then."""
        self._put(partial(self._act, session_id, action))

    def close(self, session_id: str) -> None:
        """Ends a session, if it is still there. Its listener may still be called with results that are on their way."""
        self._put(partial(self.remove, session_id))

    def _put(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)
        host = self._host
        if not host._is_waiting:
            return  # the thread checks the inbox before it waits
        if self._posting_loop is None or asyncio._get_running_loop() is not self._posting_loop:
            host._ring()
        elif not host._is_about_to_ring:
            host._is_about_to_ring = True
            self._posting_loop.call_soon(host._ring)

    def _ring(self) -> None:
        self._is_about_to_ring = False
        if self._is_waiting:
            self._is_waiting = False
            self._bell.put(None)

    @property
    def num_sessions(self) -> int:
        """Sessions that hold keys and values right now."""
        return len(self.sessions)

    @property
    def has_ended(self) -> bool:
        """True if the engine takes no more turns, because of `stop` or of an error of the thread."""
        return self._ended.is_set() or not self._thread.is_alive()

    def fault(self) -> str:
        """Reason why this engine can do no more steps; empty means that it can. May be called by any thread."""
        return "the engine's thread has ended" if self.has_ended else self._fault

    # Called on the engine's thread.

    @abstractmethod
    def turn(self, now: float) -> float | None:
        """Does one turn of the engine's loop. Calls `step_done` when the device has done a step.

        Args:
            now: `time.perf_counter()`.

        Returns:
            Seconds to wait for something to be posted: 0 while there is work; None means without end.
        """

    def step_done(self) -> None:
        """Notes that the device has done a step without a fault."""
        self._num_failed_steps, self._fault = 0, ""

    def removed(self, session: Session, *, has_failed: bool) -> None:
        """Called when a session has ended for whatever reason. `has_failed` is True if the engine could not go on with
        it."""

    def settle(self) -> None:
        """Called before the thread waits: does what a turn has put off."""

    def remove(self, session_id: str, *, has_failed: bool = False) -> None:
        """Forgets a session, if it is there."""
        session = self.sessions.pop(session_id, None)
        self._on_failure.pop(session_id, None)
        if session is not None:
            self.removed(session, has_failed=has_failed)

    def take_posted(self, timeout_s: float | None) -> None:
        """Runs everything that was posted. Waits at most timeout_s for the first of it (None means without end)."""
        if timeout_s != 0:
            self.settle()
            self._wait(timeout_s)
        # What is posted from here on waits for the next call: a caller that posts without end would keep all sessions
        # from their steps. Only this thread takes anything out: at least as many as `qsize` says are there, and `get`
        # never raises.
        actions = [self._inbox.get(block=False) for _ in range(self._inbox.qsize())]
        if not actions:
            return
        self._posted_at = time.perf_counter()
        for action in actions:
            if action is None:
                self._is_over = True
                return  # what was posted after the end is dropped
            action()

    def _wait(self, timeout_s: float | None) -> None:
        """Waits until something may have been posted, or until the timeout."""
        # In this order: either this thread sees what is posted just now, or the thread that posts it sees that this one
        # waits.
        self._is_waiting = True
        if self._inbox.empty() and all(guest._inbox.empty() for guest in self._guests):
            with suppress(queue.Empty):
                self._bell.get(timeout=timeout_s)
        self._is_waiting = False

    def _run(self) -> None:
        try:
            wait_s: float | None = None
            # A turn may run posted actions too, the end among them. So this is checked before every wait, which may be
            # endless.
            while not self._is_over:
                self.take_posted(wait_s)
                if not self._is_over:
                    waits = [self._next_turn(), *(guest._turn_as_guest() for guest in list(self._guests))]
                    wait_s = min((each for each in waits if each is not None), default=None)
        finally:
            for engine in (self, *self._guests):
                engine._ended.set()

    def _turn_as_guest(self) -> float | None:
        self.take_posted(0.0)
        if not self._is_over:
            return self._next_turn()
        self._host._guests.remove(self)
        self._ended.set()
        return None

    def _next_turn(self) -> float | None:
        """Does a turn; returns how long the next one may wait for something to be posted."""
        try:
            return self.turn(time.perf_counter())
        except Exception:
            # A packed forward does not tell which session's rows broke it, and caches may be half written: all sessions
            # must go.
            log.exception("engine.step_failed", num_sessions=len(self.sessions))
            # A copy of the ids, because `_fail` takes them out.
            for session_id in list(self.sessions):
                self._fail(session_id, is_own=False)
            self._suspect_device()
            return None  # no session is left: only what is posted can bring work

    def _begin(self, session_id: str, open_session: Callable[[], Session], on_failure: OnFailure) -> None:
        # Set before the session is made: if that raises, `_fail` looks it up.
        self._on_failure[session_id] = on_failure
        with self.isolated(session_id):
            self.sessions[session_id] = open_session()

    def _act(self, session_id: str, action: Callable[[Session], object]) -> None:
        session = self.sessions.get(session_id)
        if session is not None:
            # What is posted comes from peers: with other peers the same request may be served.
            with self.isolated(session_id, is_own=False):
                action(session)

    @contextmanager
    def isolated(self, session_id: str, *, is_own: bool = True) -> Iterator[None]:
        """Removes only this session if the body raises: work for one session is no reason to lose the others. `is_own`
        is the argument of `OnFailure`."""
        try:
            yield
        except Exception as error:
            log.exception("engine.session_failed", session_id=session_id)
            self._fail(session_id, is_own=is_own and is_own_fault(error))

    def _fail(self, session_id: str, *, is_own: bool) -> None:
        on_failure = self._on_failure.get(session_id)  # read before `remove` forgets it
        self.remove(session_id, has_failed=True)
        if on_failure is not None:  # None: the part that failed has ended the session already
            on_failure(is_own)

    def _suspect_device(self) -> None:
        """Runs a forward without a session after several failed steps, to find out if the device is at fault."""
        self._num_failed_steps += 1
        if self._num_failed_steps < MAX_FAILED_STEPS:
            return
        # A session that breaks its steps says nothing about the others. A device may fail for ever after, as CUDA does
        # once it has seen an illegal access; then only another process helps.
        try:
            cache = self._runner.new_cache()
            self._runner.forward([Segment(cache, [0], 1)])
            cache.clear()
        except Exception as error:
            log.exception("engine.unable", num_failed_steps=self._num_failed_steps)
            self._fault = (
                f"{self._num_failed_steps} steps in a row have failed, the last one with {type(error).__name__}"
            )
        else:
            self.step_done()
