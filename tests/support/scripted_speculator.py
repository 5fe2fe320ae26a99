"""A speculator that does what a test wants, on a real gRPC server, and a recorder of a session's callbacks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.core.methods import PEARL
from outrider.core.params import SamplingParams
from outrider.core.speculation import SpeculationParams
from outrider.core.statistics import Absence
from outrider.core.tree import Draft
from outrider.peers.speculator import SpeculationSpec, SpeculationStream, SpeculatorPeer
from outrider.v1 import speculator_pb2 as pb
from outrider.v1 import speculator_pb2_grpc, types_pb2
from outrider.wire.errors import NotServing, to_status
from tests.support.shared_calls import shared

Context = grpc.aio.ServicerContext[object, object]


class ScriptedSpeculator(
    speculator_pb2_grpc.SpeculatorServiceServicer,
    health_pb2_grpc.HealthServicer,  # type: ignore[misc]  # it has no types
):
    """Answers the opening and every commit with a node. The test sets everything else."""

    def __init__(self) -> None:
        self.opened: list[pb.SpeculateOpen] = []
        self.commits: list[types_pb2.Commit] = []
        self.steerings: list[types_pb2.Steering] = []
        self.num_streams = 0
        """Open streams."""
        self.num_checks = self.num_polls = 0
        self.callers: set[str] = set()
        """Connections over which streams came."""
        self.num_bytes_heard = self.num_bytes_said = 0
        self.health = health_pb2.HealthCheckResponse.SERVING
        self.is_silent = False
        """True if it accepts everything and answers nothing."""
        self.refusal: grpc.StatusCode | None = None
        self.is_garbage = self.is_loading = False
        self.forward_us = 0
        """What it reports of its draft model's speed."""
        self.load: pb.SpeculatorLoad | None = None
        """The load that it reports in every message; None = no report."""
        self.is_reading = False
        """True if it accepts sessions, and has no draft for them yet."""

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        self.num_checks += 1
        return health_pb2.HealthCheckResponse(status=self.health)

    async def GetInfo(
        self, request: pb.SpeculatorServiceGetInfoRequest, context: Context
    ) -> pb.SpeculatorServiceGetInfoResponse:
        self.num_polls += 1
        load = self.load or pb.SpeculatorLoad(num_sessions=self.num_streams)
        return pb.SpeculatorServiceGetInfoResponse(
            num_sessions=load.num_sessions, max_num_sessions=load.max_num_sessions, busy_percent=load.busy_percent
        )

    async def _session(
        self, requests: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse | bytes]:
        self.num_streams += 1
        self.callers.add(context.peer())
        try:
            async for request in requests:
                self.num_bytes_heard += request.ByteSize()
                match request.WhichOneof("event"):
                    case "open":
                        self.opened.append(request.open)
                        if self.is_loading:
                            await context.abort_with_status(to_status(NotServing("as the test wants it")))
                        if self.refusal is not None:
                            await context.abort(self.refusal, "as the test wants it")
                        if not self.is_silent:
                            told = pb.SpeculateOpened(forward_us=self.forward_us, load=self.load)
                            opened = pb.SessionResponse(opened=told)
                            yield b"\xff\xff\xff" if self.is_garbage else self._said(opened)
                    case "commit":
                        self.commits.append(request.commit)
                    case "steering":
                        self.steerings.append(request.steering)
                if not self.is_silent and not self.is_reading:
                    draft = pb.SpeculatorDraft(draft=types_pb2.Draft(base_len=1), load=self.load)
                    yield self._said(pb.SessionResponse(draft=draft))
        finally:
            self.num_streams -= 1

    async def Speculate(  # type: ignore[override]  # garbage is bytes
        self, requests: AsyncIterator[pb.SpeculateRequest], context: Context
    ) -> AsyncIterator[pb.SpeculateResponse | bytes]:
        async for response in shared(self._session, requests, context):
            yield response

    def _said(self, response: pb.SessionResponse) -> pb.SessionResponse:
        self.num_bytes_said += response.ByteSize() + 2  # +2: the session's number, below 128, not set yet
        return response


@asynccontextmanager
async def serving(servicer: ScriptedSpeculator, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Serves there; yields its address."""
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.Speculate,
        request_deserializer=pb.SpeculateRequest.FromString,
        response_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
    )
    info = grpc.unary_unary_rpc_method_handler(
        servicer.GetInfo,
        request_deserializer=pb.SpeculatorServiceGetInfoRequest.FromString,
        response_serializer=pb.SpeculatorServiceGetInfoResponse.SerializeToString,
    )
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"Speculate": handler, "GetInfo": info}
    handlers = grpc.method_handlers_generic_handler("outrider.v1.SpeculatorService", methods)
    server.add_generic_rpc_handlers((handlers,))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


class Listener:
    """Records a session's callbacks."""

    def __init__(self) -> None:
        self.num_attached = self.num_detached = self.num_drafts = 0
        self.absences: list[Absence] = []

    def on_attached(self, forward_us: int) -> None:
        self.num_attached += 1

    def on_draft(self, draft: Draft) -> None:
        self.num_drafts += 1

    def on_detached(self, absence: Absence) -> None:
        self.num_detached += 1
        self.absences.append(absence)


@dataclass(frozen=True)
class AModel:
    """A target's identity, as handshakes need it."""

    model_id: str = "target"
    tokenizer_hash: str = "hash"
    vocab_size: int = 100
    max_context_len: int = 100
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    numerics_id: str = ""
    default_sampling: Mapping[str, float] = field(default_factory=dict)


SPEC = SpeculationSpec("s", 2, SamplingParams(seed=1), SpeculationParams(PEARL, 8, 32))


@asynccontextmanager
async def dialling(address: str) -> AsyncIterator[SpeculatorPeer]:
    """A peer that dials it."""
    peer = SpeculatorPeer(address, AModel())
    try:
        yield peer
    finally:
        await peer.close()


def speculate(peer: SpeculatorPeer, listener: Listener, committed: list[int] | None = None) -> SpeculationStream:
    """A session's stream, after two tokens; `committed` starts with them, for tests that commit more."""
    return peer.speculate(SPEC, [1, 2] if committed is None else committed, listener)
