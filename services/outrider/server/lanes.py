"""Lanes: threads for work that would hold up the event loop. Each kind of work has its own, and callers take turns."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from outrider.wire.errors import ResourceExhausted

LARGE_BYTES = 16_384
"""Requests from this size on are processed in a thread. Measured: a tokenizer takes some 30 ms for this much text, and
a thread takes 0.1 ms to start."""
MAX_WAITING_BYTES = 64 << 20
"""Most bytes of the requests that wait in a lane."""
MAX_WAIT_S = 10.0
"""Longest time that a request waits in a lane, in seconds."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A request in the queue of its caller."""

    num_bytes: int
    turn: asyncio.Future[None]
    """Done when a thread is free for it."""


class Lane:
    """A few threads for one kind of work. Waiting callers are served in turn: however much one caller sends, another
    waits only for the running requests, and for one request of each other caller. Lives on the event loop."""

    def __init__(
        self,
        name: str,
        num_threads: int,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        """
        Args:
            name: The kind of work, for the names of threads and for errors: "tokenizing".
            num_threads: Most requests that are processed at a time.
            max_waiting_bytes: Most bytes of the waiting requests. Beyond that, the caller with the most waiting bytes
                is refused.
            max_wait_s: Longest time that a request waits for a thread, in seconds.
        """
        self._name, self._num_free = name, num_threads
        self._max_waiting_bytes, self._max_wait_s = max_waiting_bytes, max_wait_s
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._queues: dict[str, deque[_Waiting]] = {}
        """Waiting requests by caller; the first caller is the next one."""

    async def run(self, work: Callable[[], _T], caller: str, num_bytes: int = 0, timeout_s: float | None = None) -> _T:
        """Calls `work` in a thread of the lane, and returns or raises what it does.

        Args:
            work: Function to call. It is not interrupted: if its caller leaves, or its time is up, the thread is free
                only when it ends.
            caller: Distinguishes the caller from others.
            num_bytes: Size of the waiting request.
            timeout_s: Longest time of the work itself, in seconds.

        Raises:
            ResourceExhausted: too much waits, or the request has waited for too long. Says when to retry.
            TimeoutError: the work has not ended in its time.
        """
        await self._turn(caller, num_bytes)
        loop = asyncio.get_running_loop()
        running = self._threads.submit(contextvars.copy_context().run, work)

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may have been closed meanwhile
                loop.call_soon_threadsafe(self._next)

        running.add_done_callback(ended)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(running)
        finally:
            # An error of the work holds this frame through its traceback, and everything that the work made: the frame
            # must not hold the error, too.
            del running

    async def _turn(self, caller: str, num_bytes: int) -> None:
        """Waits until a thread is free."""
        if self._num_free:
            self._num_free -= 1
            return
        waiting = _Waiting(num_bytes, asyncio.get_running_loop().create_future())
        self._queues.setdefault(caller, deque()).append(waiting)
        self._refuse_excess()
        try:
            async with asyncio.timeout(self._max_wait_s):
                await waiting.turn
        except BaseException as error:
            if waiting in (queue := self._queues.get(caller, deque())):
                queue.remove(waiting)
                if not queue:
                    del self._queues[caller]
            elif waiting.turn.done() and not waiting.turn.cancelled() and waiting.turn.exception() is None:
                self._next()  # the turn came just when the caller had stopped waiting
            if isinstance(error, TimeoutError):
                busy = f"all threads for {self._name} have been busy for {self._max_wait_s:g} s"
                raise ResourceExhausted(busy) from None
            raise

    def _next(self) -> None:
        """Gives a thread that has become free to the next caller."""
        while self._queues:
            caller = next(iter(self._queues))
            queue = self._queues.pop(caller)
            waiting = queue.popleft()
            if queue:
                self._queues[caller] = queue  # after all others
            if not waiting.turn.done():
                waiting.turn.set_result(None)
                return
        self._num_free += 1

    def _refuse_excess(self) -> None:
        """Refuses the latest requests of the caller with the most waiting bytes, as long as too much waits."""
        sizes = {caller: sum(each.num_bytes for each in queue) for caller, queue in self._queues.items()}
        while sum(sizes.values()) > self._max_waiting_bytes:
            largest = max(sizes, key=lambda caller: sizes[caller])
            refused = self._queues[largest].pop()
            if not self._queues[largest]:
                del self._queues[largest]
            sizes[largest] -= refused.num_bytes
            if not refused.turn.done():
                refused.turn.set_exception(
                    ResourceExhausted(f"requests of {self._max_waiting_bytes} bytes wait for {self._name} already")
                )
