"""The speculator as a service that `outrider.server.run.serve` runs."""

from __future__ import annotations

import asyncio

import grpc

from outrider.core.blocks import PrefixScope
from outrider.core.params import RetrievalScope
from outrider.models.loading import CannotLoadModel, LoadedModel, load_for
from outrider.models.threads import in_own_thread
from outrider.models.timing import forward_us_of
from outrider.peers.channel import read_peers
from outrider.peers.datastore import DatastorePeer
from outrider.security.quotas import Quotas
from outrider.server.process import say_step
from outrider.server.run import CannotLoad
from outrider.speculator.engine import Engine
from outrider.speculator.servicer import SpeculatorServicer
from outrider.speculator.settings import SpeculatorSettings
from outrider.telemetry.metrics import Metrics, build_info
from outrider.v1 import speculator_pb2_grpc


class SpeculatorService:
    """Runs the speculator: its model, engine, servicer and peers, put together from the settings."""

    name = "outrider.v1.SpeculatorService"

    def __init__(self, settings: SpeculatorSettings, model: LoadedModel | None = None) -> None:
        """
        Args:
            settings: All flags.
            model: The draft model, if it is loaded already; None means that `load` loads the one in the settings.
        """
        self._settings = settings
        self._model = model
        self.servicer = SpeculatorServicer(
            settings.max_num_sessions,
            Quotas(settings.max_sessions_per_caller, max_read_tokens_per_minute=settings.max_read_tokens_per_minute),
            settings.stall_timeout_s,
        )
        self.engine: Engine | None = None
        """None until the model is loaded."""
        self._datastore: DatastorePeer | None = None
        self._graphs = "none"

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        speculator_pb2_grpc.add_SpeculatorServiceServicer_to_server(self.servicer, server)

    async def load(self) -> None:
        """Loads the draft model. The datastore is dialled, not waited for."""
        settings = self._settings
        security = settings.peer_security()
        try:
            # In a thread: calls that come meanwhile are answered, with the status that the model is loading.
            model, forward_us = await in_own_thread(self._load_model)
        except CannotLoadModel as error:
            raise CannotLoad(str(error)) from error
        if settings.datastore:
            self._datastore = DatastorePeer(
                settings.datastore,
                model.tokenizer_hash,
                model.vocab_size,
                settings.corpus,
                settings.tenant,
                security,
            )
        self._graphs = model.runner.graphs
        self.engine = Engine(
            model,
            prefill_chunk=settings.prefill_chunk,
            keep_warm_s=settings.keep_warm_s,
            max_num_sessions=settings.max_num_sessions,
            # The scope of one session has no shared tier, so what is copied is the prior alone.
            tiers=None if self._datastore is None else self._datastore.tiers(RetrievalScope.SESSION),
            forward_us=forward_us,
            prefix_scope=PrefixScope(settings.prefix_scope),
            loop=asyncio.get_running_loop(),
        )
        self.servicer.ready(model, self.engine)

    def _load_model(self) -> tuple[LoadedModel, int]:
        """Loads the model, and captures what the engine replays. Returns the model, and the time of a forward of one
        row in microseconds."""
        model = self._model or load_for(self._settings, on_step=say_step)
        say_step("timing forwards")
        model.runner.make_loop()
        return model, forward_us_of(model.runner)

    def metrics(self) -> Metrics:
        """Yields the engine's counts (`outrider.speculator.metrics`) and the state of the datastore."""
        settings = self._settings
        about = {"model": settings.model, "dtype": settings.dtype, "device": settings.device}
        yield build_info("speculator", **about, graphs=self._graphs)
        yield from self.servicer.metrics()
        yield from read_peers([] if self._datastore is None else [self._datastore.state])

    def drain(self) -> None:
        """Refuses new sessions, and ends the present ones."""
        self.servicer.drain()

    def fault(self) -> str:
        """Returns why nothing can be drafted here; empty means that it can."""
        return "" if self.engine is None else self.engine.fault()

    async def close(self) -> None:
        """Ends the engine and hangs up."""
        if self._datastore is not None:
            await self._datastore.close()
        if self.engine is not None:
            # In a thread: it waits for the forward that is running, and would hold up the event loop.
            await asyncio.to_thread(self.engine.stop)
