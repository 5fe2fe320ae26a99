"""The edge of the verifier: proto in, engine calls, proto out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import grpc
import structlog

from outrider.core.params import Method, Steering
from outrider.core.session import SessionSpec, Verdict
from outrider.core.statistics import COUNTS
from outrider.models.loading import LoadedModel
from outrider.models.text import TextCodec
from outrider.peers.channel import PeerState
from outrider.peers.datastore import DatastorePeer
from outrider.peers.speculator import MAX_NODES_PER_S, DraftLimit, SpeculatorPeer
from outrider.security.callers import current_caller, current_tenant, name_of_caller
from outrider.security.quotas import Quotas, TenantQuota
from outrider.server import streams
from outrider.server.streams import offload_if_large
from outrider.telemetry.generation_metrics import GenerationCall, GenerationCalls
from outrider.telemetry.metrics import Metrics
from outrider.telemetry.tracing import COLLABORATE, GENERATE, Attributes, Span, current_span, traced_call
from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from outrider.verifier import servicer as events
from outrider.verifier.admission import Limits, missing_peer, prompt_token_ids, session_spec
from outrider.verifier.collaborate import CallerDrafts, opening_of
from outrider.verifier.engine import Engine
from outrider.verifier.generation import Generation
from outrider.verifier.measurements import SessionCounts
from outrider.verifier.metrics import read_engine, read_sessions
from outrider.version import __version__
from outrider.wire.convert import finish_reason_to_proto, source_to_proto, summary_to_proto, token_ids_from_proto
from outrider.wire.errors import NotServing, ResourceExhausted, rpc_errors
from outrider.wire.handshake import Model, model_info
from outrider.wire.speculation import METHODS_TO_PROTO
from outrider.wire.steering import steering_to_proto

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class Serving:
    """Everything that exists once the model is loaded."""

    model: LoadedModel
    codec: TextCodec
    engine: Engine
    limits: Limits
    speculator: SpeculatorPeer | None
    datastore: DatastorePeer | None
    forward_times_ms: dict[int, float]


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Serves generations. Refuses everything until `ready` was called."""

    def __init__(
        self,
        max_num_sessions: int,
        stall_timeout_s: float,
        quotas: Quotas | None = None,
        max_draft_nodes_per_s: float = MAX_NODES_PER_S,
    ) -> None:
        """`quotas`: what callers may take; None = as much as there is. `max_draft_nodes_per_s`: of a caller's own
        drafts."""
        self._max_num_sessions = max_num_sessions
        self._stall_timeout_s = stall_timeout_s
        self._quotas = Quotas() if quotas is None else quotas
        self._max_draft_nodes_per_s = max_draft_nodes_per_s
        self._serving: Serving | None = None
        self._is_draining = False
        self.num_sessions = 0
        self.calls = GenerationCalls()
        self.counts = SessionCounts()

    def ready(self, serving: Serving) -> None:
        """The model is loaded."""
        self._serving = serving

    def drain(self) -> None:
        """Refuses new sessions from here on."""
        self._is_draining = True

    def metrics(self) -> Metrics:
        """What was counted since the start. May be called in any thread."""
        serving = self._serving
        peers = () if serving is None else (serving.speculator, serving.datastore)
        yield from read_sessions(self.calls, self.counts, [peer.state for peer in peers if peer is not None])
        if serving is not None:
            yield from read_engine(serving.engine, serving.limits.speculation.max_num_speculative_tokens)

    def _ready(self) -> Serving:
        if self._is_draining:
            raise NotServing("the verifier is draining")
        if self._serving is None:
            raise NotServing("the target model is loading")
        return self._serving

    async def Generate(self, request: verifier_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """One generation; the speculator and the datastore of this server draft."""
        with (
            traced_call(GENERATE, context),
            self.calls.call(context) as call,
            rpc_errors(context),
            self._session(context) as quota,
        ):
            serving = self._ready()
            spec = await _session_spec(request, serving, brings_drafts=False)
            generation = self._admit(spec, serving, serving.speculator)
            call.admit()

            def write(event: Event) -> Awaitable[None]:
                return streams.write(context, events.generate_response(event), self._stall_timeout_s, "client")

            try:
                await self._stream(generation, serving, quota, call, write)
            finally:
                self._dismiss(generation)

    async def Collaborate(  # type: ignore[override]
        self, requests: AsyncIterator[verifier_pb2.CollaborateRequest], context: Context
    ) -> None:
        """One generation; the caller drafts."""
        with traced_call(COLLABORATE, context), self.calls.call(context) as call, rpc_errors(context):
            opening = await opening_of(requests, self._ready().model)
            with self._session(context) as quota:
                await self._collaborate(opening, requests, context, quota, call)

    async def _collaborate(
        self,
        opening: verifier_pb2.CollaborateOpen,
        requests: AsyncIterator[verifier_pb2.CollaborateRequest],
        context: Context,
        quota: TenantQuota,
        call: GenerationCall,
    ) -> None:
        serving = self._ready()
        spec = await _session_spec(opening.request, serving, brings_drafts=True)
        generation = self._admit(spec, serving, None, brings_drafts=True)
        call.admit()
        traffics = generation.traffic, self.counts.caller_traffic
        drafts = CallerDrafts(generation, DraftLimit(self._max_draft_nodes_per_s, spec.session_id), traffics)
        drafts.count(opening)
        reader = asyncio.create_task(drafts.read(requests))

        def write(event: Event) -> Awaitable[None]:
            response = events.collaborate_response(event)
            num_bytes = response.ByteSize()
            for traffic in traffics:
                traffic.num_bytes_sent += num_bytes
            return streams.write(context, response, self._stall_timeout_s, "client")

        try:
            await self._stream(
                generation, serving, quota, call, write, drafts, shows_prompt=opening.wants_prompt_token_ids
            )
        finally:
            reader.cancel()
            self._dismiss(generation)

    def _session(self, context: Context) -> AbstractContextManager[TenantQuota]:
        """Around a session of the caller, whatever comes of it: a wrong request is a request."""
        self._ready()  # one that is sent elsewhere is none
        return self._quotas.session(name_of_caller(context), current_caller())

    def _admit(
        self, spec: SessionSpec, serving: Serving, speculator: SpeculatorPeer | None, *, brings_drafts: bool = False
    ) -> Generation:
        if self.num_sessions >= self._max_num_sessions:
            raise ResourceExhausted(f"the verifier has all {self._max_num_sessions} sessions in use")
        self.num_sessions += 1
        self.counts.begin(spec)
        span = current_span()
        log.info(
            "session.started",
            session_id=spec.session_id,
            method=spec.speculation.method.value,
            num_prompt_tokens=len(spec.prompt_token_ids),
            max_tokens=spec.max_tokens,
            **span.log_fields,
        )
        if span.is_recorded:
            span.set_attributes(opening_attributes(spec, serving.model))
        return Generation(
            spec, serving.engine, speculator, serving.datastore, current_tenant(), brings_drafts=brings_drafts
        )

    def _dismiss(self, generation: Generation) -> None:
        self.num_sessions -= 1
        generation.close()
        log.info("session.ended", session_id=generation.spec.session_id, num_rounds=generation.statistics.num_rounds)

    async def _stream(
        self,
        generation: Generation,
        serving: Serving,
        quota: TenantQuota,
        call: GenerationCall,
        write: Callable[[Event], Awaitable[None]],
        drafts: CallerDrafts | None = None,
        *,
        shows_prompt: bool = False,
    ) -> None:
        """Started, a chunk for each round, Finished; between them what a caller that brings drafts should know."""
        await write(events.started(generation, serving.model, shows_prompt=shows_prompt))
        text = serving.codec.stream()
        text.step(generation.spec.resume_token_ids)
        with SessionSpans(current_span(), generation) as spans:
            async for event in generation.events():
                if isinstance(event, Steering):
                    await write(steering_to_proto(event))
                    continue
                spans.on_verdict(event)
                quota.charge(len(event.token_ids))
                call.chunk(len(event.token_ids))
                piece = text.step(event.token_ids)
                if event.token_ids:
                    acknowledged_node_id = 0 if drafts is None else drafts.last_node_id
                    await write(events.chunk(event, piece, acknowledged_node_id))
                if event.finish_reason is not None:
                    # A message of its own: whoever resumes behind it knows that this text has come.
                    if rest := text.finish():
                        await write(verifier_pb2.Chunk(text=rest))
                    finished = events.finished(generation, event)
                    self.counts.end(generation.statistics)
                    await write(finished)
                    call.finish(finished.reason)

    async def Tokenize(self, request: verifier_pb2.TokenizeRequest, context: Context) -> verifier_pb2.TokenizeResponse:
        """Text to token ids."""
        response = verifier_pb2.TokenizeResponse()
        with rpc_errors(context):
            serving = self._ready()
            response.token_ids.extend(
                await offload_if_large(request, partial(prompt_token_ids, request.prompt, serving.model, serving.codec))
            )
        return response

    async def Detokenize(
        self, request: verifier_pb2.DetokenizeRequest, context: Context
    ) -> verifier_pb2.DetokenizeResponse:
        """Token ids to text."""
        response = verifier_pb2.DetokenizeResponse()
        with rpc_errors(context):
            serving = self._ready()
            token_ids = token_ids_from_proto(request.token_ids, serving.model.vocab_size, "token_ids")
            response.text = await offload_if_large(request, partial(serving.codec.decode, token_ids))
        return response

    async def GetInfo(self, request: verifier_pb2.GetInfoRequest, context: Context) -> verifier_pb2.GetInfoResponse:
        """What this server is."""
        verifier_pb2.GetInfoResponse()
        with rpc_errors(context):
            serving = self._ready()
            methods = [method for method in Method if missing_peer(method, serving.limits) is None]
            return verifier_pb2.GetInfoResponse(
                model=model_info(serving.model),
                methods=[METHODS_TO_PROTO[method] for method in methods],
                default_method=METHODS_TO_PROTO[serving.limits.defaults.method],
                max_num_speculative_tokens=serving.limits.speculation.max_num_speculative_tokens,
                max_num_sessions=self._max_num_sessions,
                num_sessions=self.num_sessions,
                speculator=_peer_info(serving.speculator.state) if serving.speculator else None,
                datastore=_peer_info(serving.datastore.state) if serving.datastore else None,
                version=__version__,
                forward_times=[
                    verifier_pb2.ForwardTime(num_rows=rows, forward_ms=ms)
                    for rows, ms in sorted(serving.forward_times_ms.items())
                ],
                max_num_rows=serving.limits.speculation.max_num_rows,
            )


async def _session_spec(request: verifier_pb2.GenerateRequest, serving: Serving, *, brings_drafts: bool) -> SessionSpec:
    resolved = partial(session_spec, request, serving.model, serving.codec, serving.limits, brings_drafts=brings_drafts)
    return await offload_if_large(request, resolved)


def _peer_info(state: PeerState) -> verifier_pb2.PeerInfo:
    return verifier_pb2.PeerInfo(
        address=state.address,
        connected=state.is_connected,
        last_error=state.last_error,
        num_shed_tokens=state.num_shed_tokens,
    )


Event = verifier_pb2.Started | verifier_pb2.Chunk | verifier_pb2.Finished | types_pb2.Steering


def generate_response(event: Event) -> verifier_pb2.GenerateResponse:
    """For a caller that only reads. Raises TypeError for what only a drafter is told."""
    match event:
        case verifier_pb2.Chunk():
            return verifier_pb2.GenerateResponse(chunk=event)
        case verifier_pb2.Started():
            return verifier_pb2.GenerateResponse(started=event)
        case verifier_pb2.Finished():
            return verifier_pb2.GenerateResponse(finished=event)
    raise TypeError("only a caller that brings drafts is told how to")


def collaborate_response(event: Event) -> verifier_pb2.CollaborateResponse:
    """For a caller that brings the drafts."""
    match event:
        case verifier_pb2.Chunk():
            return verifier_pb2.CollaborateResponse(chunk=event)
        case verifier_pb2.Started():
            return verifier_pb2.CollaborateResponse(started=event)
        case verifier_pb2.Finished():
            return verifier_pb2.CollaborateResponse(finished=event)
    return verifier_pb2.CollaborateResponse(steering=event)


def started(generation: Generation, model: Model, *, shows_prompt: bool) -> verifier_pb2.Started:
    """The first event."""
    spec = generation.spec
    return verifier_pb2.Started(
        session_id=spec.session_id,
        seed=spec.sampling.seed,
        num_prompt_tokens=len(spec.prompt_token_ids),
        prompt_token_ids=spec.prompt_token_ids if shows_prompt else (),
        model=model_info(model),
    )


def chunk(verdict: Verdict, text: str, acknowledged_node_id: int) -> verifier_pb2.Chunk:
    """What a round committed. `text` is that of its tokens as far as it is decided."""
    return verifier_pb2.Chunk(
        token_ids=verdict.token_ids,
        sources=[source_to_proto(source) for source in verdict.sources],
        text=text,
        num_drafted=verdict.num_drafted,
        acknowledged_node_id=acknowledged_node_id,
    )


def finished(generation: Generation, verdict: Verdict) -> verifier_pb2.Finished:
    """The last event."""
    spec = generation.spec
    assert verdict.finish_reason is not None
    return verifier_pb2.Finished(
        reason=finish_reason_to_proto(verdict.finish_reason),
        stop_token_id=verdict.stop_token_id,
        num_prompt_tokens=len(spec.prompt_token_ids),
        num_output_tokens=verdict.base_len + len(verdict.token_ids) - len(spec.prompt_token_ids),
        summary=summary_to_proto(
            spec.speculation.method, generation.statistics, spec.requested_method, generation.traffic
        ),
    )


class SessionSpans:
    """Around the rounds of a session: the spans of its phases, prefill up to the first verdict and decode from there
    on, and at the end what has come of it."""

    def __init__(self, session: Span, generation: Generation) -> None:
        """`session`: the span of the call."""
        self._session, self._generation = session, generation
        self._phase = session.child("prefill")
        self._last: Verdict | None = None

    def on_verdict(self, verdict: Verdict) -> None:
        """A round is over."""
        if self._last is None:
            self._phase.end()
            self._phase = self._session.child("decode")
        self._last = verdict

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._phase.__exit__(kind, error, traceback)
        if self._session.is_recorded:
            self._session.set_attributes(outcome_attributes(self._generation, self._last))


def opening_attributes(spec: SessionSpec, model: Model) -> Attributes:
    """What is known when a session begins. Its prompt is not among it."""
    return {
        "gen_ai.request.model": model.model_id,
        "gen_ai.request.max_tokens": spec.max_tokens,
        "gen_ai.request.temperature": spec.sampling.temperature,
        "gen_ai.usage.input_tokens": len(spec.prompt_token_ids),
        "outrider.session_id": spec.session_id,
        "outrider.method": spec.speculation.method.value,
        "outrider.num_resumed_tokens": len(spec.resume_token_ids),
    }


def outcome_attributes(generation: Generation, last: Verdict | None) -> Attributes:
    """What is known when it ends. `last`: the latest verdict; None = there was none. Of a session that was cut off, the
    rounds that nobody has heard of may be counted or not."""
    statistics, num_output_tokens = generation.statistics, len(generation.spec.resume_token_ids)
    reasons: list[str] = []
    if last is not None:
        num_output_tokens = last.base_len + len(last.token_ids) - len(generation.spec.prompt_token_ids)
        reasons = [] if last.finish_reason is None else [last.finish_reason.name.lower()]
    return {
        "gen_ai.usage.output_tokens": num_output_tokens,
        "gen_ai.response.finish_reasons": reasons,
        **{f"outrider.{name}": getattr(statistics, name) for name in COUNTS},
        "outrider.mean_acceptance_length": statistics.mean_acceptance_length,
        "outrider.degraded": statistics.degraded,
    }
