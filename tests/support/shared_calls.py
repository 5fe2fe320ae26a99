"""A speculator's side of the call that verifiers share, for tests that write each session as a stream of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from outrider.v1 import speculator_pb2 as pb

WHOLE_CALL = (grpc.StatusCode.UNIMPLEMENTED,)
"""Statuses that end the call of all sessions if a test's session raises them, as a server without the method does."""

Session = Callable[[AsyncIterator[pb.SessionRequest], Any], AsyncIterator[pb.SessionResponse | bytes]]
"""Answers one session, whose number is added here; bytes stand for a whole message of the call."""


class _Context:
    """The context of one session; aborting it ends only that session."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise _Ended(pb.SpeculateEnded(code=code.value[0], message=details))

    async def abort_with_status(self, status: Any) -> None:
        details = dict(status.trailing_metadata)["grpc-status-details-bin"]
        raise _Ended(pb.SpeculateEnded(code=status.code.value[0], message=status.details, status=details))


class _Ended(Exception):
    def __init__(self, ended: pb.SpeculateEnded) -> None:
        self.ended = ended


async def shared(
    speculate: Session, requests: AsyncIterator[pb.SpeculateRequest], context: Any
) -> AsyncIterator[pb.SpeculateResponse | bytes]:
    """Implements `Speculate` by calling `speculate` for each session."""
    said: asyncio.Queue[pb.SpeculateResponse | bytes | pb.SpeculateEnded | None] = asyncio.Queue()
    heard: dict[int, asyncio.Queue[pb.SessionRequest | None]] = {}
    tasks: list[asyncio.Task[None]] = []

    async def session(number: int) -> None:
        async def requests_of_session() -> AsyncIterator[pb.SessionRequest]:
            while (request := await heard[number].get()) is not None:
                yield request

        try:
            async for response in speculate(requests_of_session(), _Context(context)):
                if isinstance(response, bytes):
                    said.put_nowait(response)
                    continue
                response.number = number
                said.put_nowait(pb.SpeculateResponse(sessions=[response]))
        except _Ended as error:
            if error.ended.code in [code.value[0] for code in WHOLE_CALL]:
                said.put_nowait(error.ended)
            answer = pb.SessionResponse(number=number, ended=error.ended)
            said.put_nowait(pb.SpeculateResponse(sessions=[answer]))

    async def read() -> None:
        async for message in requests:
            for request in message.sessions:
                if request.HasField("open"):
                    heard[request.number] = asyncio.Queue()
                    tasks.append(asyncio.create_task(session(request.number)))
                heard[request.number].put_nowait(None if request.HasField("close") else request)
        said.put_nowait(None)

    tasks.append(asyncio.create_task(read()))
    try:
        while (response := await said.get()) is not None:
            if isinstance(response, pb.SpeculateEnded):
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, response.message)
            else:
                yield response
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
