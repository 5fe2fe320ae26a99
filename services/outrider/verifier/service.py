"""The verifier as a service: what `serve` runs."""

from __future__ import annotations

import asyncio

import grpc

from outrider.core.costs import ForwardTimes
from outrider.core.params import Method, RetrievalScope, SpeculationParams
from outrider.models.loading import LoadedModel, UnknownModel, load_model, set_num_threads
from outrider.models.runner import UnsupportedModel
from outrider.models.text import TextCodec
from outrider.models.timing import measure_forward
from outrider.peers.datastore import DatastorePeer
from outrider.peers.speculator import SpeculatorPeer
from outrider.security.quotas import Quotas
from outrider.server.run import CannotLoad
from outrider.telemetry.metrics import Metrics, build_info
from outrider.v1 import verifier_pb2_grpc
from outrider.verifier.admission import Limits
from outrider.verifier.engine import Engine
from outrider.verifier.servicer import Serving, VerifierServicer
from outrider.verifier.settings import VerifierSettings
from outrider.wire.speculation import SpeculationLimits

MEASURED_ROWS = (*range(1, 13), 14, 16, 20, 24, 32)


class VerifierService:
    """The verifier, as `serve` runs it."""

    name = "outrider.v1.VerifierService"

    def __init__(self, settings: VerifierSettings) -> None:
        self._settings = settings
        self._servicer = VerifierServicer(
            settings.max_num_sessions,
            settings.stall_timeout_s,
            Quotas(settings.max_sessions_per_caller),
            settings.max_draft_nodes_per_s,
        )
        self._serving: Serving | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self._servicer, server)

    async def load(self) -> None:
        """Loads the target model and measures it. The peers are dialled, not waited for."""
        settings = self._settings
        security = settings.peer_security()
        try:
            model, forward_times_ms = await asyncio.to_thread(self._load_model)
        except (UnknownModel, UnsupportedModel, OSError) as error:
            raise CannotLoad(f"--model {settings.model}: {error}") from error
        engine = Engine(
            model,
            asyncio.get_running_loop(),
            forward_times=ForwardTimes(forward_times_ms),
            prefill_chunk=settings.prefill_chunk,
            max_rows=settings.max_rows,
            max_num_rows=settings.max_num_rows,
        )
        self._serving = Serving(
            model=model,
            codec=TextCodec(model.tokenizer),
            engine=engine,
            limits=limits_of(settings),
            speculator=(
                SpeculatorPeer(settings.speculator, model, security, settings.max_draft_nodes_per_s)
                if settings.speculator
                else None
            ),
            datastore=(
                DatastorePeer(
                    settings.datastore,
                    model.tokenizer_hash,
                    model.vocab_size,
                    settings.corpus,
                    settings.tenant,
                    security,
                )
                if settings.datastore
                else None
            ),
            forward_times_ms=forward_times_ms,
        )
        self._servicer.ready(self._serving)

    def _load_model(self) -> tuple[LoadedModel, dict[int, float]]:
        settings = self._settings
        set_num_threads(settings.num_threads or len(settings.cores))
        model = load_model(settings.model, dtype=settings.dtype, device=settings.device)
        return model, measure_forward(
            model.runner, MEASURED_ROWS, context=min(200, model.max_context_len // 2), num_repeats=7
        )

    def metrics(self) -> Metrics:
        """See `outrider.verifier.metrics`."""
        settings = self._settings
        yield build_info("verifier", model=settings.model, dtype=settings.dtype, device=settings.device)
        yield from self._servicer.metrics()

    def drain(self) -> None:
        """Refuses new sessions."""
        self._servicer.drain()

    def fault(self) -> str:
        """Why no generation can go on here; empty = they can."""
        return "" if self._serving is None else self._serving.engine.fault()

    async def close(self) -> None:
        """Ends the engine and hangs up."""
        if self._serving is None:
            return
        if self._serving.speculator is not None:
            await self._serving.speculator.close()
        if self._serving.datastore is not None:
            await self._serving.datastore.close()
        await asyncio.to_thread(self._serving.engine.stop)


def limits_of(settings: VerifierSettings) -> Limits:
    """What requests get by default, and what they may ask for."""
    scope = None if settings.retrieval_scope is None else RetrievalScope[settings.retrieval_scope.upper()]
    defaults = SpeculationParams(
        method=Method(settings.default_method),
        num_speculative_tokens=min(settings.num_speculative_tokens, settings.max_num_speculative_tokens),
        lookahead=max(settings.lookahead, settings.num_speculative_tokens),
        min_path_probability=settings.min_path_probability,
        retrieval_scope=RetrievalScope.SESSION if scope is None else scope,
    )
    limits = SpeculationLimits(
        max_num_speculative_tokens=settings.max_num_speculative_tokens,
        max_num_rows=settings.max_num_rows,
        max_beam_width=settings.max_beam_width,
        max_budget=settings.max_budget,
        spacelike_scope=RetrievalScope.TENANT if scope is None else scope,
    )
    return Limits(
        defaults,
        limits,
        has_speculator=bool(settings.speculator),
        has_datastore=bool(settings.datastore),
        max_prompt_tokens=settings.max_prompt_tokens,
    )
