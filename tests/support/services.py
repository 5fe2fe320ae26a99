"""Real services inside the test process: real gRPC on loopback, real models, with access to their internals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import grpc

from outrider.edge.service import EdgeService
from outrider.edge.settings import EdgeSettings
from outrider.models.loading import LoadedModel, load_model
from outrider.peers.speculator import MAX_NODES_PER_S
from outrider.security.quotas import Quotas
from outrider.server.malformed import MalformedRequests
from outrider.speculator.engine import Engine as SpeculatorEngine
from outrider.speculator.service import SpeculatorService
from outrider.speculator.servicer import SpeculatorServicer
from outrider.speculator.settings import SpeculatorSettings
from outrider.verifier.engine import Engine as VerifierEngine
from outrider.verifier.service import VerifierService
from outrider.verifier.servicer import VerifierServicer
from outrider.verifier.settings import VerifierSettings
from tests.support.waiting import until


@cache
def target_model() -> LoadedModel:
    """The demo target. Tests share it: a runner keeps no state between forwards."""
    return load_model("demo/target", dtype="float32")


@cache
def other_target_model() -> LoadedModel:
    """A second copy of the demo target, for a verifier next to another one: two engines may not share a pool."""
    return load_model("demo/target", dtype="float32")


@cache
def draft_model() -> LoadedModel:
    """The demo draft model."""
    return load_model("demo/draft", dtype="float32")


@dataclass
class RunningVerifier:
    """A verifier that serves."""

    address: str
    servicer: VerifierServicer
    engine: VerifierEngine
    model: LoadedModel
    server: grpc.aio.Server

    async def is_idle(self) -> bool:
        """True if no session is left anywhere, once the loop and the engine have had a moment."""
        return await _settles(lambda: self.servicer.num_sessions == 0 and self.engine.num_sessions == 0)


@dataclass
class RunningSpeculator:
    """A speculator that serves."""

    address: str
    servicer: SpeculatorServicer
    engine: SpeculatorEngine
    model: LoadedModel

    async def is_idle(self) -> bool:
        """See `RunningVerifier.is_idle`."""
        return await _settles(lambda: self.servicer.num_sessions == 0 and self.engine.num_sessions == 0)


@dataclass
class RunningEdge:
    """An edge that serves."""

    address: str
    service: EdgeService
    settings: EdgeSettings

    async def is_idle(self) -> bool:
        """See `RunningVerifier.is_idle`."""
        drafter = self.service.draft_model.drafter
        return await _settles(
            lambda: self.service.servicer.num_sessions == 0 and (drafter is None or drafter.num_sessions == 0)
        )


async def _settles(condition: Callable[[], bool]) -> bool:
    try:
        return bool(await until(condition))
    except TimeoutError:
        return False


@asynccontextmanager
async def running_verifier(
    *,
    speculator: str = "",
    datastore: str = "",
    max_num_sessions: int = 16,
    max_num_queued: int = 0,
    queue_timeout_s: float = 30.0,
    stall_timeout_s: float = 30.0,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    quotas: Quotas | None = None,
    max_draft_nodes_per_s: float = MAX_NODES_PER_S,
    max_prompt_tokens: int = 0,
    prefill_chunk: int = 256,
    model: LoadedModel | None = None,
    draft: LoadedModel | None = None,
    device: str = "cpu",
) -> AsyncIterator[RunningVerifier]:
    """A verifier with the demo target or `model`, on a free port. A `draft` model runs in its process. Neither is
    measured, so that tests begin at once. Both run on `device`."""
    settings = VerifierSettings.model_validate(
        {
            "speculator": speculator,
            "drafter": "speculator" if draft is None else "in-process",
            "device": device,
            **({} if draft is None else {"draft_device": device}),
            "datastore": datastore,
            "default_method": "off",
            "num_speculative_tokens": 8,
            "lookahead": 32,
            "min_path_probability": 0.1,
            "max_num_sessions": max_num_sessions,
            "max_num_queued": max_num_queued,
            "queue_timeout_s": queue_timeout_s,
            "max_prompt_tokens": max_prompt_tokens,
            "prefill_chunk": prefill_chunk,
            "max_draft_nodes_per_s": max_draft_nodes_per_s,
            "stall_timeout_s": stall_timeout_s,
        }
    )
    service = VerifierService(settings, model or target_model(), {1: 2.0}, quotas, draft)
    server = grpc.aio.server(interceptors=[*interceptors, MalformedRequests()])
    service.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        await service.load()
        assert service.serving is not None
        yield RunningVerifier(
            f"127.0.0.1:{port}", service.servicer, service.serving.engine, service.serving.model, server
        )
    finally:
        await server.stop(0)
        await service.close()


@asynccontextmanager
async def running_speculator(
    max_num_sessions: int = 16,
    datastore: str = "",
    model: LoadedModel | None = None,
    stall_timeout_s: float = 60.0,
) -> AsyncIterator[RunningSpeculator]:
    """A speculator with the demo draft model or `model`, on a free port."""
    settings = SpeculatorSettings.model_validate(
        {
            "max_num_sessions": max_num_sessions,
            "datastore": datastore,
            "keep_warm_ms": 0,
            "stall_timeout_s": stall_timeout_s,
        }
    )
    model = model or draft_model()
    service = SpeculatorService(settings, model)
    await service.load()
    assert service.engine is not None
    server = grpc.aio.server(interceptors=[MalformedRequests()])
    service.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield RunningSpeculator(f"127.0.0.1:{port}", service.servicer, service.engine, model)
    finally:
        await server.stop(0)
        await service.close()


@asynccontextmanager
async def running_edge(
    *upstreams: str, model: LoadedModel | None = None, settings_model: str = "demo/draft", **settings: Any
) -> AsyncIterator[RunningEdge]:
    """An edge with this draft model on a free port; None = the model keeps loading for the whole test."""
    told = EdgeSettings(upstream=",".join(upstreams), model=settings_model, **settings)
    service = EdgeService(told, model=model)
    server = grpc.aio.server()
    service.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield RunningEdge(f"127.0.0.1:{port}", service, told)
    finally:
        await server.stop(0)
        await service.close()
