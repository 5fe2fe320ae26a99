"""Streams of a server: a deadline for each write, and an end between two requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from outrider.server import streams
from outrider.server.streams import DrainableStreams
from outrider.v1 import verifier_pb2
from outrider.wire.errors import DeadlineExceeded

MESSAGE = verifier_pb2.TokenizeResponse(token_ids=[1, 2])


class Context:
    """The part of a call's context that a stream is written to."""

    def __init__(self, *, reads: bool) -> None:
        self.written: list[Any] = []
        self._reads = reads

    async def write(self, message: Any) -> None:
        if not self._reads:
            await asyncio.Event().wait()
        self.written.append(message)


def context_that(*, reads: bool) -> tuple[Context, grpc.aio.ServicerContext[Any, Any]]:
    context = Context(reads=reads)
    return context, cast("grpc.aio.ServicerContext[Any, Any]", context)


async def test_a_caller_that_reads_gets_the_message() -> None:
    context, written_to = context_that(reads=True)
    await streams.write(written_to, MESSAGE, 60.0, "client")
    assert context.written == [MESSAGE]


async def test_a_caller_that_does_not_read_is_given_up() -> None:
    _, written_to = context_that(reads=False)
    with pytest.raises(DeadlineExceeded, match=r"^the watcher has read nothing for 0.01 s$"):
        await streams.write(written_to, MESSAGE, 0.01, "watcher")


async def test_a_cancelled_call_is_not_taken_for_a_slow_one() -> None:
    _, written_to = context_that(reads=False)
    task = asyncio.create_task(streams.write(written_to, MESSAGE, 60.0, "client"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class Requests:
    """A caller's requests, as many as the test adds."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[int] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[int]:
        while True:
            yield await self.queue.get()


class Served:
    """A stream that is being served: it answers each request when the test lets it."""

    def __init__(self, lasting: DrainableStreams, *, ages: bool = True) -> None:
        self.requests, self.answered = Requests(), list[int]()
        self.may_answer, self.has_begun = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._serve(lasting, ages=ages))

    async def _serve(self, lasting: DrainableStreams, *, ages: bool) -> str:
        with lasting.open(ages=ages) as stream:
            self.has_begun.set()
            async for request in stream.until_end(aiter(self.requests)):
                self.has_begun.set()
                await self.may_answer.wait()
                self.answered.append(request)
        return "OK"


async def test_a_stream_that_waits_ends_at_once() -> None:
    lasting = DrainableStreams(0)
    served = Served(lasting)
    await served.has_begun.wait()
    lasting.end()
    assert await served.task == "OK"


async def test_a_stream_that_works_answers_before_it_ends() -> None:
    lasting = DrainableStreams(0)
    served = Served(lasting)
    await served.has_begun.wait()
    served.has_begun.clear()
    served.requests.queue.put_nowait(7)
    await served.has_begun.wait()
    lasting.end()
    served.may_answer.set()
    assert await served.task == "OK"
    assert served.answered == [7]


async def test_a_stream_ends_when_it_is_old_enough() -> None:
    assert await Served(DrainableStreams(0.01)).task == "OK"


async def test_a_caller_that_hangs_up_cancels_its_stream() -> None:
    served = Served(DrainableStreams(0))
    await served.has_begun.wait()
    served.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await served.task
