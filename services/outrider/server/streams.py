"""Requests that take so long to look through that everybody else on the event loop would wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from google.protobuf.message import Message

LARGE_BYTES = 16_384
"""A tokenizer takes some 30 ms for so much text; a thread, 0.1 ms to get going."""

T = TypeVar("T")


async def offload_if_large(request: Message, work: Callable[[], T]) -> T:
    """What `work` returns or raises: called here, or in a thread if the request that it is about is large."""
    return await asyncio.to_thread(work) if request.ByteSize() >= LARGE_BYTES else work()


_Request = TypeVar("_Request")


class DrainableStreams:
    """The streams of a server. Lives on the event loop."""

    def __init__(self, max_age_s: float) -> None:
        """`max_age_s`: a stream ends after that time, so that its caller opens another, where there may be fewer by
        now; 0 = never."""
        self._max_age_s = max_age_s
        self._streams: set[DrainableStream] = set()

    @contextmanager
    def open(self, *, ages: bool = True) -> Iterator[DrainableStream]:
        """Around the stream of the task that runs. Its body is left when the stream ends. `ages`: False = it ends with
        the server only."""
        task = asyncio.current_task()
        assert task is not None
        stream = DrainableStream(task)
        self._streams.add(stream)
        timer = None
        if ages and self._max_age_s:
            timer = asyncio.get_running_loop().call_later(self._max_age_s, stream.end)
        try:
            yield stream
        except asyncio.CancelledError:
            if not stream.was_cancelled:
                raise
            task.uncancel()
        finally:
            self._streams.discard(stream)
            if timer is not None:
                timer.cancel()

    def end(self) -> None:
        """Ends all of them: each with OK, once what was taken in is answered."""
        for stream in self._streams:
            stream.end()


class DrainableStream:
    """One of them."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.was_cancelled = False
        """Whether it was ended while it waited."""
        self._task = task
        self._is_busy = self._is_over = False

    async def requests(self, requests: AsyncIterator[_Request]) -> AsyncIterator[_Request]:
        """The caller's requests, until it has no more or the stream ends. One that was yielded is answered still."""
        async for request in requests:
            self._is_busy = True
            yield request
            self._is_busy = False
            if self._is_over:
                return

    def end(self) -> None:
        """Ends it: at once while it waits for a request, else after the one that it works at."""
        if self._is_over:
            return
        self._is_over = True
        if not self._is_busy:
            self.was_cancelled = True
            self._task.cancel()
