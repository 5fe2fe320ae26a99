"""Whether a peer is worth dialling. Once it is known to be down, one probe asks for the whole process whether it is
back, instead of every session for itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Protocol, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.rpc.peer_state import SPOILT

_Stub = TypeVar("_Stub")

FIRST_PROBE_S, LAST_PROBE_S = 0.5, 2.0
"""What a probe waits for its answer: each twice as long as the one before."""
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 1.0


class Probed(Protocol):
    """A peer, as far as it is probed."""

    def stub(self, kind: Callable[[grpc.aio.Channel], _Stub]) -> _Stub:
        """For a call that begins now."""

    def down(self, reason: str) -> None:
        """It has failed."""

    def dial_anew(self) -> None:
        """The connection to it may be at fault."""


class Breaker:
    """Closed while the peer is well; open from a failure until it answers SERVING. Lives on the event loop."""

    def __init__(self, peer: Probed) -> None:
        self._peer = peer
        self._closed = asyncio.Event()
        self._closed.set()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the peer is not known to be down."""
        return self._closed.is_set()

    async def wait_closed(self) -> None:
        """Returns when the peer may be dialled."""
        await self._closed.wait()

    def trip(self, reason: str, pause_s: float = 0.0) -> None:
        """The peer has failed: nobody dials it until it answers a probe, the first of which is made after a pause."""
        self._peer.down(reason)
        if self.is_closed:
            self._closed.clear()
            self._task = asyncio.create_task(self._probe(pause_s))

    def stop(self) -> None:
        """Ends the probing."""
        if self._task is not None:
            self._task.cancel()

    async def _probe(self, pause_s: float) -> None:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(pause_s)
        pause_s, timeout_s = FIRST_PAUSE_S, FIRST_PROBE_S
        began = clock()
        try:
            while not await self._serves(timeout_s):
                # A probe that had to wait has been a pause itself.
                await asyncio.sleep(max(0.0, began + pause_s * random.uniform(0.8, 1.2) - clock()))
                pause_s, began = min(LAST_PAUSE_S, 2 * pause_s), clock()
                timeout_s = min(LAST_PROBE_S, 2 * timeout_s)
        except grpc.aio.UsageError:
            return  # the channel was closed: nobody dials any more
        self._closed.set()

    async def _serves(self, timeout_s: float) -> bool:
        """Whether it answers SERVING. Waits for the connection, so that a peer that comes back is noticed at once."""
        stub = self._peer.stub(health_pb2_grpc.HealthStub)
        request = health_pb2.HealthCheckRequest()
        try:
            response = await stub.Check(request, timeout=timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() in SPOILT:
                self._peer.dial_anew()
            return error.code() is grpc.StatusCode.UNIMPLEMENTED  # it has no health checks, but it answers
        return response is not None and response.status == health_pb2.HealthCheckResponse.SERVING
