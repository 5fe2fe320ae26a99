"""The edge of the verifier: proto in, engine calls, proto out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import structlog

from outrider.core.params import InvalidParameter, Method
from outrider.core.session import SessionSpec, Verdict
from outrider.core.tree import DraftCost
from outrider.models.loading import LoadedModel
from outrider.models.text import TextCodec, TextStream
from outrider.rpc.convert import (
    draft_from_proto,
    finish_reason_to_proto,
    source_to_proto,
    summary_to_proto,
    token_ids_from_proto,
)
from outrider.rpc.convert_speculation import METHODS_TO_PROTO
from outrider.rpc.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    RpcError,
    Unavailable,
    invalid_argument,
    rpc_errors,
)
from outrider.rpc.handshake import check_handshake, model_info
from outrider.rpc.large_requests import beside_the_loop
from outrider.rpc.peers import PeerState, SpeculatorPeer
from outrider.rpc.retrieval import DatastorePeer
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from outrider.verifier.admission import Limits, missing_peer, prompt_token_ids, session_spec
from outrider.verifier.engine import Engine
from outrider.verifier.generation import Generation
from outrider.version import __version__

log = structlog.get_logger(__name__)

DRAFT_WEIGHT = 16
"""What taking in a draft costs beside its nodes, in nodes."""
MAX_WAITING_WEIGHT = 4096
"""Drafts that a caller may be ahead of the engine, in nodes; then it is not read from until they are taken in."""

Event = verifier_pb2.Started | verifier_pb2.Chunk | verifier_pb2.Finished
Context = grpc.aio.ServicerContext[Any, Any]
# The stubs know only generators; a method that writes to its context can put a deadline on each write.


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

    def __init__(self, max_num_sessions: int, stall_timeout_s: float) -> None:
        self._max_num_sessions = max_num_sessions
        self._stall_timeout_s = stall_timeout_s
        self._serving: Serving | None = None
        self._is_draining = False
        self.num_sessions = 0

    def ready(self, serving: Serving) -> None:
        """The model is loaded."""
        self._serving = serving

    def drain(self) -> None:
        """Refuses new sessions from here on."""
        self._is_draining = True

    def _ready(self) -> Serving:
        if self._is_draining:
            raise Unavailable("the verifier is draining")
        if self._serving is None:
            raise Unavailable("the target model is loading")
        return self._serving

    async def Generate(self, request: verifier_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """One generation; the speculator and the datastore of this server draft."""
        with rpc_errors(context):
            serving = self._ready()
            spec = await _session_spec(request, serving, brings_drafts=False)
            generation = self._admit(spec, serving, serving.speculator)
            try:
                await self._stream(generation, serving, lambda event: context.write(_response(event)))
            finally:
                self._dismiss(generation)

    async def Collaborate(  # type: ignore[override]
        self, requests: AsyncIterator[verifier_pb2.CollaborateRequest], context: Context
    ) -> None:
        """One generation; the caller drafts."""
        with rpc_errors(context):
            serving = self._ready()
            first = await anext(aiter(requests), None)
            if first is None or first.WhichOneof("event") != "open":
                raise InvalidArgument("event", "must be open in the first message")
            check_handshake(first.open.handshake, serving.model)
            spec = await _session_spec(first.open.request, serving, brings_drafts=True)
            generation = self._admit(spec, serving, None)
            generation.on_attached()
            reader = asyncio.create_task(_read_drafts(requests, generation))
            try:
                await self._stream(
                    generation, serving, lambda event: context.write(_response(event, verifier_pb2.CollaborateResponse))
                )
            finally:
                reader.cancel()
                self._dismiss(generation)

    def _admit(self, spec: SessionSpec, serving: Serving, speculator: SpeculatorPeer | None) -> Generation:
        if self.num_sessions >= self._max_num_sessions:
            raise ResourceExhausted(f"the verifier has all {self._max_num_sessions} sessions in use")
        self.num_sessions += 1
        log.info(
            "session.started",
            session_id=spec.session_id,
            method=spec.speculation.method.value,
            num_prompt_tokens=len(spec.prompt_token_ids),
            max_tokens=spec.max_tokens,
        )
        return Generation(spec, serving.engine, speculator, serving.datastore)

    def _dismiss(self, generation: Generation) -> None:
        self.num_sessions -= 1
        generation.close()
        log.info("session.ended", session_id=generation.spec.session_id, num_rounds=generation.statistics.num_rounds)

    async def _stream(
        self, generation: Generation, serving: Serving, write: Callable[[Event], Awaitable[None]]
    ) -> None:
        """Started, a chunk for each round, Finished."""
        spec = generation.spec
        await self._write(
            write,
            verifier_pb2.Started(
                session_id=spec.session_id, seed=spec.sampling.seed, num_prompt_tokens=len(spec.prompt_token_ids)
            ),
        )
        text = serving.codec.stream()
        text.step(spec.resume_token_ids)
        async for verdict in generation.verdicts():
            chunk = _chunk(verdict, text)
            if chunk is not None:
                await self._write(write, chunk)
            if verdict.finish_reason is not None:
                await self._write(write, _finished(generation, verdict))

    async def _write(self, write: Callable[[Event], Awaitable[None]], event: Event) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await write(event)
        except TimeoutError:
            raise DeadlineExceeded(f"the client has read nothing for {self._stall_timeout_s:g} s") from None

    async def Tokenize(self, request: verifier_pb2.TokenizeRequest, context: Context) -> verifier_pb2.TokenizeResponse:
        """Text to token ids."""
        response = verifier_pb2.TokenizeResponse()
        with rpc_errors(context):
            serving = self._ready()
            response.token_ids.extend(
                await beside_the_loop(request, partial(prompt_token_ids, request.prompt, serving.model, serving.codec))
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
            response.text = await beside_the_loop(request, partial(serving.codec.decode, token_ids))
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
    return await beside_the_loop(request, resolved)


async def _read_drafts(requests: AsyncIterator[verifier_pb2.CollaborateRequest], generation: Generation) -> None:
    """The caller's drafts, until it half-closes or says something wrong. Not faster than the engine takes them in."""
    weight = 0
    try:
        async for request in requests:
            if request.WhichOneof("event") != "draft":
                raise InvalidArgument("event", "must be draft after the first message")
            draft = draft_from_proto(request.draft)
            generation.on_draft(draft, DraftCost())
            weight += DRAFT_WEIGHT + len(draft.token_ids)
            if weight > MAX_WAITING_WEIGHT:
                await generation.drafts_taken_in()
                weight = 0
    except RpcError as error:
        generation.fail(error)
    except InvalidParameter as error:
        generation.fail(invalid_argument(error))
    else:
        generation.on_detached()


def _response(
    event: Event,
    kind: type[verifier_pb2.GenerateResponse | verifier_pb2.CollaborateResponse] = verifier_pb2.GenerateResponse,
) -> verifier_pb2.GenerateResponse | verifier_pb2.CollaborateResponse:
    if isinstance(event, verifier_pb2.Chunk):
        return kind(chunk=event)
    if isinstance(event, verifier_pb2.Started):
        return kind(started=event)
    return kind(finished=event)


def _chunk(verdict: Verdict, text: TextStream) -> verifier_pb2.Chunk | None:
    """A verdict's tokens, and at the end of the generation the text that was still undecided; None if there is
    neither."""
    piece = text.step(verdict.token_ids)
    if verdict.finish_reason is not None:
        piece += text.finish()
    if not verdict.token_ids and not piece:
        return None
    return verifier_pb2.Chunk(
        token_ids=verdict.token_ids,
        sources=[source_to_proto(source) for source in verdict.sources],
        text=piece,
        num_drafted=verdict.num_drafted,
    )


def _finished(generation: Generation, verdict: Verdict) -> verifier_pb2.Finished:
    spec = generation.spec
    assert verdict.finish_reason is not None
    return verifier_pb2.Finished(
        reason=finish_reason_to_proto(verdict.finish_reason),
        stop_token_id=verdict.stop_token_id,
        num_prompt_tokens=len(spec.prompt_token_ids),
        num_output_tokens=verdict.base_len + len(verdict.token_ids) - len(spec.prompt_token_ids),
        summary=summary_to_proto(spec.speculation.method, generation.statistics, spec.requested_method),
    )


def _peer_info(state: PeerState) -> verifier_pb2.PeerInfo:
    return verifier_pb2.PeerInfo(
        address=state.address,
        connected=state.is_connected,
        last_error=state.last_error,
        num_shed_tokens=state.num_shed_tokens,
    )
