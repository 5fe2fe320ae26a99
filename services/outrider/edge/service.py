"""The edge as a service, run by `outrider.server.run.serve` or by an application in its own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from outrider.edge.draft_model import DraftModel
from outrider.edge.servicer import EdgeServicer
from outrider.edge.settings import EdgeSettings
from outrider.edge.upstream import Upstreams
from outrider.telemetry.metrics import Metrics, build_info
from outrider.telemetry.tasks import keep_running
from outrider.v1 import verifier_pb2_grpc

if TYPE_CHECKING:
    from outrider.models.loading import LoadedModel


class EdgeService:
    """Runs the edge: its draft model, channels and servicer. Must be made and used inside one event loop."""

    name = "outrider.v1.VerifierService"

    def __init__(
        self,
        settings: EdgeSettings,
        on_loaded: Callable[[], None] = lambda: None,
        model: LoadedModel | None = None,
        announce: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args:
            settings: All flags.
            on_loaded: Called once the draft model is ready.
            model: The draft model, if it is loaded already; None means that `load` begins to load it.
            announce: Called with a line whenever the cloud or the draft model comes or goes.

        Raises:
            UnusableFile: A file with a certificate or with credentials cannot be used.
        """
        self._settings, self._announce = settings, announce
        self.upstreams = Upstreams(settings.upstreams, settings.peer_security())
        self.draft_model = DraftModel(settings, on_loaded, model, announce)
        self.servicer = EdgeServicer(
            self.upstreams, self.draft_model, settings.resume_timeout_s, settings.stall_timeout_s
        )
        self._watching: asyncio.Task[None] | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self.servicer, server)

    async def load(self) -> None:
        """Begins to load the draft model and dials the cloud; waits for neither."""
        self.draft_model.start()
        self._watching = keep_running("upstreams", lambda: self.upstreams.watch(self._announce))

    def metrics(self) -> Metrics:
        """Yields what was counted since the start. May be called in any thread."""
        settings = self._settings
        yield build_info("edge", model=settings.model, dtype=settings.dtype, device=settings.device)
        yield from self.servicer.metrics()

    def drain(self) -> None:
        """Refuses new calls."""
        self.servicer.drain()

    def fault(self) -> str:
        """Returns no fault: without drafts, generations still come from the cloud."""
        return ""

    async def close(self) -> None:
        """Ends the draft model's engine and hangs up."""
        if self._watching is not None:
            self._watching.cancel()
        await self.upstreams.close()
        await self.draft_model.close()
