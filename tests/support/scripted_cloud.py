"""A cloud that follows a script: for answers that a real verifier could not be made to give."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from outrider.wire.handshake import model_info
from tests.support.services import target_model

Context = grpc.aio.ServicerContext[Any, Any]
Collaborate = Callable[[AsyncIterator[verifier_pb2.CollaborateRequest], Context], Awaitable[None]]
Generate = Callable[[verifier_pb2.GenerateRequest, Context], Awaitable[None]]


class ScriptedCloud(verifier_pb2_grpc.VerifierServiceServicer):
    """Serves the demo target's name, and two scripts."""

    def __init__(self, collaborate: Collaborate, generate: Generate | None = None) -> None:
        self.info = verifier_pb2.GetInfoResponse(
            model=model_info(target_model()),
            default_method=types_pb2.METHOD_AUTO,
            max_num_speculative_tokens=32,
            max_num_rows=32,
        )
        self.num_infos = 0
        self._collaborate, self._generate = collaborate, generate

    async def GetInfo(self, request: verifier_pb2.GetInfoRequest, context: Context) -> verifier_pb2.GetInfoResponse:
        self.num_infos += 1
        return self.info

    async def Tokenize(self, request: verifier_pb2.TokenizeRequest, context: Context) -> verifier_pb2.TokenizeResponse:
        raise AssertionError("nobody was to call Tokenize")

    async def Detokenize(
        self, request: verifier_pb2.DetokenizeRequest, context: Context
    ) -> verifier_pb2.DetokenizeResponse:
        raise AssertionError("nobody was to call Detokenize")

    async def Collaborate(self, requests, context):  # type: ignore[no-untyped-def, override]
        await self._collaborate(requests, context)

    async def Generate(self, request, context):  # type: ignore[no-untyped-def, override]
        assert self._generate is not None, "nobody was to call Generate"
        await self._generate(request, context)


@asynccontextmanager
async def serving(cloud: ScriptedCloud) -> AsyncIterator[str]:
    """The cloud's address, while it serves."""
    server = grpc.aio.server()
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(cloud, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def started(prompt: list[int], *, shows_prompt: bool = True) -> verifier_pb2.CollaborateResponse:
    """The generation was admitted."""
    return verifier_pb2.CollaborateResponse(
        started=verifier_pb2.Started(
            session_id="s", seed=1, num_prompt_tokens=len(prompt), prompt_token_ids=prompt if shows_prompt else ()
        )
    )


def chunk(*token_ids: int) -> verifier_pb2.CollaborateResponse:
    """A round is over."""
    return verifier_pb2.CollaborateResponse(chunk=verifier_pb2.Chunk(token_ids=token_ids, text="x" * len(token_ids)))


def steering(method: int, num_tokens: int | None = None, **fields: int) -> verifier_pb2.CollaborateResponse:
    """A new choice of method and number of tokens."""
    speculation = types_pb2.SpeculationParams(method=method, num_speculative_tokens=num_tokens)  # type: ignore[arg-type]
    return verifier_pb2.CollaborateResponse(steering=types_pb2.Steering(speculation=speculation, **fields))


def finished(num_output_tokens: int) -> verifier_pb2.CollaborateResponse:
    """The generation is complete."""
    return verifier_pb2.CollaborateResponse(
        finished=verifier_pb2.Finished(
            reason=verifier_pb2.FINISH_REASON_LENGTH, num_output_tokens=num_output_tokens, summary={}
        )
    )


async def finish(requests: AsyncIterator[verifier_pb2.CollaborateRequest], context: Context, num_tokens: int) -> None:
    """Completes the generation as a verifier does: a draft that is under way when the call ends would hide its end."""
    await context.write(finished(num_tokens))
    async for _ in requests:
        pass
