"""A session on a call to a speculator: its requests and its responses."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import grpc

from outrider.v1 import speculator_pb2, types_pb2
from outrider.wire.convert import PROTOCOL_VERSION
from outrider.wire.errors import ended_from_proto
from tests.support.services import RunningSpeculator

Code = grpc.StatusCode
PROMPT = list(range(10, 20))


class Session:
    """The only session of its own call. Written and read like a call; its end is raised as the end of a call is."""

    def __init__(self, stub: Any) -> None:
        self.call = stub.Speculate()
        self._read: deque[speculator_pb2.SessionResponse] = deque()

    async def write(self, *requests: speculator_pb2.SessionRequest) -> None:
        await self.call.write(speculator_pb2.SpeculateRequest(sessions=requests))

    async def read(self) -> Any:
        """The next response; EOF at the end of the call. Raises AioRpcError if the session or its call has ended."""
        while not self._read:
            if (message := await self.call.read()) is grpc.aio.EOF:
                return message
            self._read.extend(message.sessions)
        response = self._read.popleft()
        if response.HasField("ended"):
            self.cancel()
            ended = ended_from_proto(response.ended)
            assert ended is not None
            raise ended
        return response

    async def draft(self) -> types_pb2.Draft:
        """The next draft."""
        while not (response := await self.read()).HasField("draft"):
            pass
        draft: types_pb2.Draft = response.draft.draft
        return draft

    async def end(self) -> tuple[Code, str]:
        """Reads to the end; returns the status."""
        try:
            while await self.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return Code.OK, ""

    def cancel(self) -> None:
        self.call.cancel()


def opening(speculator: RunningSpeculator, **changes: Any) -> speculator_pb2.SessionRequest:
    handshake = types_pb2.Handshake(
        protocol_version=PROTOCOL_VERSION,
        tokenizer_hash=changes.pop("tokenizer_hash", speculator.model.tokenizer_hash),
        vocab_size=2048,
        model_id="the target",
    )
    fields: dict[str, Any] = {
        "handshake": handshake,
        "session_id": "s",
        "committed_token_ids": PROMPT,
        "num_prompt_tokens": len(PROMPT),
        "sampling": types_pb2.SamplingParams(seed=1, temperature=0),
        "speculation": types_pb2.SpeculationParams(method=types_pb2.METHOD_SPECULATIVE, num_speculative_tokens=4),
    }
    return speculator_pb2.SessionRequest(number=1, open=speculator_pb2.SpeculateOpen(**(fields | changes)))


def commit(base_len: int, token_ids: Sequence[int]) -> speculator_pb2.SessionRequest:
    return speculator_pb2.SessionRequest(number=1, commit=types_pb2.Commit(base_len=base_len, token_ids=token_ids))


async def refusal(stub: Any, *requests: speculator_pb2.SessionRequest) -> tuple[Code, str]:
    """The status of a session that sends these requests and then waits."""
    session = Session(stub)
    await session.write(*requests)
    return await session.end()
