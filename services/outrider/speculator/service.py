"""The speculator as a service: what `serve` runs."""

from __future__ import annotations

import asyncio

import grpc

from outrider.core.params import RetrievalScope
from outrider.models.loading import LoadedModel, UnknownModel, load_model, set_num_threads
from outrider.models.runner import UnsupportedModel
from outrider.peers.channel import read_peers
from outrider.peers.datastore import DatastorePeer
from outrider.security.quotas import Quotas
from outrider.server.run import CannotLoad
from outrider.speculator.engine import Engine
from outrider.speculator.servicer import SpeculatorServicer
from outrider.speculator.settings import SpeculatorSettings
from outrider.telemetry.metrics import Metrics, build_info
from outrider.v1 import speculator_pb2_grpc


class SpeculatorService:
    """The speculator, as `serve` runs it."""

    name = "outrider.v1.SpeculatorService"

    def __init__(self, settings: SpeculatorSettings) -> None:
        self._settings = settings
        quotas = Quotas(settings.max_sessions_per_caller)
        self._servicer = SpeculatorServicer(settings.max_num_sessions, quotas, settings.stall_timeout_s)
        self._engine: Engine | None = None
        self._datastore: DatastorePeer | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        speculator_pb2_grpc.add_SpeculatorServiceServicer_to_server(self._servicer, server)

    async def load(self) -> None:
        """Loads the draft model."""
        security = self._settings.peer_security()
        try:
            model = await asyncio.to_thread(self._load_model)
        except (UnknownModel, UnsupportedModel, OSError) as error:
            raise CannotLoad(f"--model {self._settings.model}: {error}") from error
        settings = self._settings
        # An accelerator has no other tenants in its caches.
        keep_warm_s = settings.keep_warm_ms / 1e3 if settings.device == "cpu" else 0.0
        if settings.datastore:
            self._datastore = DatastorePeer(
                settings.datastore,
                model.tokenizer_hash,
                model.vocab_size,
                settings.corpus,
                settings.tenant,
                security,
            )
        tiers = self._datastore.tiers(RetrievalScope.SESSION) if self._datastore is not None else None
        self._engine = Engine(model, prefill_chunk=settings.prefill_chunk, keep_warm_s=keep_warm_s, tiers=tiers)
        self._servicer.ready(model, self._engine)

    def _load_model(self) -> LoadedModel:
        settings = self._settings
        set_num_threads(settings.num_threads or len(settings.cores))
        return load_model(settings.model, dtype=settings.dtype, device=settings.device)

    def metrics(self) -> Metrics:
        """See `outrider.speculator.metrics`."""
        settings = self._settings
        yield build_info("speculator", model=settings.model, dtype=settings.dtype, device=settings.device)
        yield from self._servicer.metrics()
        yield from read_peers([] if self._datastore is None else [self._datastore.state])

    def drain(self) -> None:
        """Refuses new sessions, and ends those that there are."""
        self._servicer.drain()

    def fault(self) -> str:
        """Why nothing can be drafted here; empty = it can."""
        return "" if self._engine is None else self._engine.fault()

    async def close(self) -> None:
        """Ends the engine and hangs up."""
        if self._datastore is not None:
            await self._datastore.close()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)
