"""Writes, drains and reads the streams of a server, without holding up other calls on its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from outrider.wire.errors import DeadlineExceeded

_Request = TypeVar("_Request")
_Item = TypeVar("_Item")


async def write(
    context: grpc.aio.ServicerContext[Any, Any], message: Message, stall_timeout_s: float, reader: str
) -> None:
    """Sends a message on a stream, and gives up on a caller that does not read.

    Args:
        context: Context of the call. Its method writes to the context instead of being a generator: gRPC drives a
            generator itself, which leaves no place for a deadline on a single write.
        message: A response of the call's type.
        stall_timeout_s: Seconds that the write may wait. It waits only while the flow-control windows of HTTP/2 are
            full, that is, while the other end reads nothing.
        reader: Name for the caller in the error, like "client".

    Raises:
        DeadlineExceeded: the caller has read nothing in that time.
    """
    try:
        async with asyncio.timeout(stall_timeout_s):
            await context.write(message)
    except TimeoutError:
        raise DeadlineExceeded(f"the {reader} has read nothing for {stall_timeout_s:g} s") from None


async def opened(requests: AsyncIterator[_Request], stall_timeout_s: float) -> AsyncIterator[_Request]:
    """Yields the requests of a stream whose first one comes in time: a caller must not hold a call without sending
    anything. Later it may be silent for as long as its connection lives.

    Raises:
        DeadlineExceeded: the caller has sent nothing in that time.
    """
    try:
        async with asyncio.timeout(stall_timeout_s):
            first = await anext(aiter(requests), None)
    except TimeoutError:
        raise DeadlineExceeded(f"the caller has said nothing for {stall_timeout_s:g} s") from None
    if first is not None:  # None: half-closed without a message
        yield first
        async for request in requests:
            yield request


class DrainableStreams:
    """Holds those streams of a server that would last as long as their callers. Lives on the event loop."""

    def __init__(self, max_age_s: float) -> None:
        """`max_age_s`: a stream ends after that time, so that its caller opens another one, perhaps on a replica with
        fewer streams; 0 = never."""
        self._max_age_s = max_age_s
        self._streams: set[DrainableStream] = set()

    @contextmanager
    def open(self, *, ages: bool = True) -> Iterator[DrainableStream]:
        """Holds the stream of the running task. The body is left, without an error, when the stream ends.

        Args:
            ages: False for a stream that ends only with the server.
        """
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
            # gRPC cancels the same task when the caller hangs up; only our own cancellation is taken back.
            task.uncancel()
        finally:
            self._streams.discard(stream)
            if timer is not None:
                timer.cancel()

    def end(self) -> None:
        """Ends all streams: each with OK, once the message that it works on is answered or sent."""
        for stream in self._streams:
            stream.end()  # only schedules the cancellation: the set does not change during the loop


class DrainableStream:
    """A stream that can be ended between two of its messages."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.was_cancelled = False
        """True if the stream was ended while it waited for a message."""
        self._task = task
        self._is_busy = self._is_over = False

    async def until_end(self, items: AsyncIterator[_Item]) -> AsyncIterator[_Item]:
        """Yields the caller's requests, or the messages to it, until there are no more or the stream ends. A request
        that was yielded is still answered, and a message is still sent: if the first write of a call is cancelled, gRPC
        cannot send its status either, and the call never ends."""
        async for item in items:
            self._is_busy = True
            yield item
            # The servicer asks for the next one only after it has sent the answer to this one, or this one.
            self._is_busy = False
            if self._is_over:
                return

    def end(self) -> None:
        """Ends the stream: at once if it waits for a message, otherwise after the one that it works on."""
        if self._is_over:
            return
        self._is_over = True
        if not self._is_busy:
            self.was_cancelled = True
            # There is no other way to end a read of gRPC: the request iterator has no method to close it.
            self._task.cancel()
