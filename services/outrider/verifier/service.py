"""The verifier as a service: makes its parts and puts them together."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import grpc

from outrider.core.blocks import PrefixScope
from outrider.core.costs import ForwardTimes
from outrider.core.methods import METHODS
from outrider.core.params import RetrievalScope
from outrider.core.speculation import SpeculationLimits, SpeculationParams
from outrider.models.generation_config import default_sampling
from outrider.models.loading import CannotLoadModel, LoadedModel, Weights, is_same_gpu, load_for
from outrider.models.pool_size import Beside
from outrider.models.runner import cache_shape
from outrider.models.structure import Grammars
from outrider.models.text import TextCodec
from outrider.models.threads import in_own_thread
from outrider.models.timing import measure_attention, measure_buckets, measure_forward
from outrider.peers.datastore import DatastorePeer
from outrider.peers.fleet import SpeculatorFleet
from outrider.peers.speculator import Speculators
from outrider.security.addresses import addresses_of
from outrider.security.peer_channel import PeerSecurity
from outrider.security.quotas import Quotas
from outrider.server.process import say_step
from outrider.server.run import CannotLoad
from outrider.speculator.drafter import Drafter
from outrider.telemetry.metrics import Metrics, build_info
from outrider.v1 import verifier_pb2_grpc
from outrider.verifier.admission import Limits
from outrider.verifier.engine import Engine
from outrider.verifier.in_process_speculator import (
    InProcessSpeculator,
    check_tokenizer,
    load_draft_model,
    read_draft_weights,
)
from outrider.verifier.servicer import Serving, VerifierServicer
from outrider.verifier.settings import VerifierSettings

MEASURED_ROWS = (*range(1, 13), 14, 16, 20, 24, 32)
"""Rows of the forwards that are timed at the start: every small number, as a CPU's time rises in steps there."""
ACCELERATOR_ROWS = (48, 64, 96, 128, 192, 256)
"""Rows that are also timed on an accelerator, where they are nearly free. On a CPU they would take long."""


class VerifierService:
    """Implements the verifier for `outrider.server.run.serve`: makes all its parts, and ends them."""

    name = "outrider.v1.VerifierService"

    def __init__(
        self,
        settings: VerifierSettings,
        model: LoadedModel | None = None,
        forward_times_ms: dict[int, float] | None = None,
        quotas: Quotas | None = None,
        draft_model: LoadedModel | None = None,
    ) -> None:
        """
        Args:
            settings: Flags and variables.
            model: The target. None means that `load` loads the one named in the settings.
            forward_times_ms: Times of its forwards by their rows. None means that `load` measures them.
            quotas: Limits of callers and tenants. None means those of the settings.
            draft_model: The draft model of --drafter in-process, not measured. None means that `load` loads and
                measures the one named in the settings.
        """
        self._draft_model = draft_model
        self._settings, self._model, self._forward_times_ms = settings, model, forward_times_ms
        self.serving: Serving | None = None
        self.servicer = VerifierServicer(
            settings.max_num_sessions,
            settings.stall_timeout_s,
            quotas or Quotas(settings.max_sessions_per_caller),
            settings.max_draft_nodes_per_s,
            settings.max_num_queued,
        )

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self.servicer, server)

    async def load(self) -> None:
        """Loads the target model and measures it. The peers are dialled, but not waited for. Raises CannotLoad."""
        settings = self._settings
        security = settings.peer_security()
        try:
            # In a thread, as it takes seconds: the loop answers health checks and refuses calls meanwhile.
            draft_weights = await in_own_thread(self._weights_beside)
            beside = None if draft_weights is None else _pool_beside(draft_weights, settings)
            model, forward_times_ms, forward_times = await in_own_thread(lambda: self._load_model(beside))
            draft_model, draft_us = await in_own_thread(lambda: self._load_draft_model(model, draft_weights))
        except CannotLoadModel as error:
            raise CannotLoad(str(error)) from error
        engine = Engine(
            model,
            asyncio.get_running_loop(),
            forward_times=forward_times,
            prefill_chunk=settings.prefill_chunk,
            max_rows=settings.max_rows,
            max_num_rows=settings.max_num_rows,
            max_num_sessions=settings.max_num_sessions,
            queue_timeout_s=settings.queue_timeout_s,
            overlaps=settings.overlap,
        )
        grammars = Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)
        datastore = _datastore(settings, model, security)
        speculators: Speculators | None = None
        if draft_model is not None:
            make_drafter = partial(
                Drafter,
                draft_model,
                settings.draft,
                grammars=grammars,
                # The scope of one session has no shared tier, so what is copied is the prior alone.
                tiers=None if datastore is None else datastore.tiers(RetrievalScope.SESSION),
                forward_us=draft_us,
                host=engine if shares_gpu(settings) else None,
            )
            speculators = InProcessSpeculator(make_drafter, engine)
        elif settings.speculator:
            addresses = addresses_of(settings.speculator)
            speculators = fleet = SpeculatorFleet(addresses, model, security, settings.max_draft_nodes_per_s)
            fleet.start()
        self.serving = Serving(
            model=model,
            codec=TextCodec(model.tokenizer),
            grammars=grammars,
            engine=engine,
            limits=limits_of(settings),
            speculators=speculators,
            datastore=datastore,
            forward_times_ms=forward_times_ms,
        )
        self.servicer.ready(self.serving)

    def _weights_beside(self) -> Weights | None:
        """Reads the draft model's weights first if it shares a GPU with the target: the memory that is left for the
        target's pool is then known. Returns None if it does not share one."""
        is_given = self._draft_model is not None or self._model is not None
        return None if is_given or not shares_gpu(self._settings) else read_draft_weights(self._settings.draft)

    def _load_model(self, beside: Beside | None) -> tuple[LoadedModel, dict[int, float], ForwardTimes]:
        """Returns the target, and the times of its forwards: as told to callers, and as used by the engine."""
        model, forward_times_ms = self._model, self._forward_times_ms
        if model is None:
            model = load_for(self._settings, beside=beside, on_step=say_step)
            if model.runner.head_token_ids is not None:
                reason = (
                    f"its head has {len(model.runner.head_token_ids)} of {model.vocab_size} tokens: it can only draft"
                )
                raise CannotLoadModel(f"--model {self._settings.model}: {reason}")
            if self._settings.generation_config == "auto":
                model = replace(model, default_sampling=default_sampling(model.checkpoint))
        if forward_times_ms is not None:
            return model, forward_times_ms, ForwardTimes(forward_times_ms)
        say_step("timing forwards")
        context_len = min(200, model.max_context_len // 2)
        attention = measure_attention(model.runner, context_len)
        if model.runner.buckets:
            bucket_ms = measure_buckets(model.runner, self._settings.max_rows, context_len, num_repeats=7)
            # Callers want the time of a plain round.
            return (
                model,
                {1: bucket_ms[min(bucket_ms)], **bucket_ms},
                ForwardTimes(bucket_ms, is_filled_up=True, attention=attention),
            )
        is_accelerated = model.runner.device.type != "cpu"
        rows = (*MEASURED_ROWS, *ACCELERATOR_ROWS) if is_accelerated else MEASURED_ROWS
        forward_times_ms = measure_forward(model.runner, rows, context=context_len, num_repeats=7)
        return model, forward_times_ms, ForwardTimes(forward_times_ms, attention=attention)

    def _load_draft_model(self, target: LoadedModel, weights: Weights | None) -> tuple[LoadedModel | None, int]:
        """Returns the draft model of this process, None if there is none, and the time of its forward in
        microseconds, 0 if it was not measured."""
        if self._settings.drafter != "in-process":
            return None, 0
        model, forward_us = self._draft_model, 0
        if model is None:
            model, forward_us = load_draft_model(self._settings.draft, weights)
        check_tokenizer(model, target)
        return model, forward_us

    def metrics(self) -> Metrics:
        """Yields the metrics of `outrider.verifier.metrics`."""
        settings = self._settings
        graphs = "none" if self.serving is None else self.serving.model.runner.graphs
        yield build_info("verifier", model=settings.model, dtype=settings.dtype, device=settings.device, graphs=graphs)
        yield from self.servicer.metrics()

    def drain(self) -> None:
        """Refuses new sessions."""
        self.servicer.drain()

    def fault(self) -> str:
        """Returns why no generation can go on here; empty if they can."""
        return "" if self.serving is None else self.serving.engine.fault()

    async def close(self) -> None:
        """Ends the engine and hangs up."""
        if self.serving is None:
            return
        if self.serving.speculators is not None:
            await self.serving.speculators.close()
        if self.serving.datastore is not None:
            await self.serving.datastore.close()
        await asyncio.to_thread(self.serving.engine.stop)  # waits for the step that is running


def _pool_beside(draft_weights: Weights, settings: VerifierSettings) -> Beside:
    return Beside(cache_shape(draft_weights.model).bytes_per_slot, settings.draft_kv_cache_tokens)


def _datastore(settings: VerifierSettings, model: LoadedModel, security: PeerSecurity) -> DatastorePeer | None:
    if not settings.datastore:
        return None
    tokens = model.tokenizer_hash, model.vocab_size
    return DatastorePeer(settings.datastore, *tokens, settings.corpus, settings.tenant, security)


def limits_of(settings: VerifierSettings) -> Limits:
    """Returns the defaults and limits of requests."""
    scope = None if settings.retrieval_scope is None else RetrievalScope[settings.retrieval_scope.upper()]
    defaults = SpeculationParams(
        method=METHODS[settings.default_method],
        num_speculative_tokens=min(settings.num_speculative_tokens, settings.max_num_speculative_tokens),
        # `SpeculationParams` refuses a lookahead that is shorter than the longest chain.
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
        has_speculator=settings.has_drafter,
        has_datastore=bool(settings.datastore),
        max_prompt_tokens=settings.max_prompt_tokens,
        prefix_scope=PrefixScope(settings.prefix_scope),
        max_num_choices=settings.max_num_choices,
        shares_gpu=shares_gpu(settings),
    )


def shares_gpu(settings: VerifierSettings) -> bool:
    """Returns True if the draft model runs in this process, on the GPU that the target runs on."""
    return settings.drafter == "in-process" and is_same_gpu(settings.device, settings.draft.device)
