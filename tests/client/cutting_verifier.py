"""A proxy of a real verifier that cuts calls off after a given number of messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from outrider.v1 import verifier_pb2_grpc
from outrider.v1.verifier_pb2 import GenerateRequest


class CuttingVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Forwards the real verifier's responses; the first calls end with a status after so many messages each."""

    def __init__(self, stub: Any) -> None:
        self.address = ""
        self.requests: list[GenerateRequest] = []
        self._stub = stub
        self._cuts: Sequence[int] = ()

    def cut(self, *cuts: int) -> None:
        """The next calls are cut after so many messages each; later ones are not."""
        self.requests, self._cuts = [], cuts

    async def Generate(self, request: GenerateRequest, context: Any) -> None:  # type: ignore[override]
        number = len(self.requests)
        self.requests.append(request)
        num_left = self._cuts[number] if number < len(self._cuts) else -1
        call = self._stub.Generate(request)
        while num_left != 0 and (response := await call.read()) is not grpc.aio.EOF:
            await context.write(response)
            num_left -= 1
        if num_left == 0:
            call.cancel()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")


@asynccontextmanager
async def cutting(address: str, *cuts: int) -> AsyncIterator[CuttingVerifier]:
    """Runs one in front of the verifier at an address."""
    async with grpc.aio.insecure_channel(address) as channel:
        servicer = CuttingVerifier(verifier_pb2_grpc.VerifierServiceStub(channel))
        servicer.cut(*cuts)
        server = grpc.aio.server()
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server)
        servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        yield servicer
        await server.stop(0)
