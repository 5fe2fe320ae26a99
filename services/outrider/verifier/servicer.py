"""The verifier's gRPC servicer: converts requests, runs a generation for each, and converts what it decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from outrider.core.methods import METHODS
from outrider.core.session import SessionSpec
from outrider.core.speculation import Steering
from outrider.models.kv_cache import KVPool
from outrider.models.loading import LoadedModel
from outrider.models.structure import Grammars
from outrider.models.text import TextCodec
from outrider.peers.channel import PeerState
from outrider.peers.datastore import DatastorePeer
from outrider.peers.speculator import MAX_NODES_PER_S, DraftLimit, Speculators
from outrider.security.callers import current_caller, current_tenant, name_of_caller
from outrider.security.quotas import Quotas, TenantQuota
from outrider.server import streams
from outrider.server.choices import run_choices
from outrider.server.lanes import LARGE_BYTES, Lane
from outrider.telemetry.generation_metrics import GenerationCall, GenerationCalls
from outrider.telemetry.kv_pool_metrics import read_pool
from outrider.telemetry.metrics import Metrics
from outrider.telemetry.tracing import COLLABORATE, GENERATE, current_span, operation_attributes, traced_call
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from outrider.verifier.admission import (
    Limits,
    check_num_tokens,
    check_structure,
    missing_peer,
    prompt_token_ids,
    session_specs,
)
from outrider.verifier.collaborate import CallerDrafts, opening_of
from outrider.verifier.engine import Engine
from outrider.verifier.generation import Generation
from outrider.verifier.listener import NoRoom, Reading
from outrider.verifier.metrics import SessionCounts, read_load, read_rounds, read_sessions
from outrider.verifier.observer import SessionObserver
from outrider.verifier.responses import Event, Responses, in_field, is_of_text, of_news
from outrider.version import __version__
from outrider.wire.convert import token_ids_from_proto
from outrider.wire.errors import InvalidArgument, NotServing, ResourceExhausted, rpc_errors
from outrider.wire.handshake import model_info
from outrider.wire.speculation import METHODS_TO_PROTO
from outrider.wire.steering import steering_to_proto
from outrider.wire.structure import structure_from_proto

COMPILE_TIMEOUT_S = 5.0
"""Longest time to compile a grammar, in seconds; the library's own limits mostly end it much earlier. Excludes the wait
for a thread."""
NUM_THREADS = 2
"""Threads of each lane: they share the cores with the forwards, which go first."""
HALF_CLOSE_S = 1.0
"""Time that a caller of Collaborate has to half-close after Finished."""

_Result = TypeVar("_Result")
Context = grpc.aio.ServicerContext[Any, Any]
Send = Callable[[Event], Awaitable[None]]
"""Sends an event of one text to the client."""


@dataclass(frozen=True)
class Serving:
    """Holds everything that exists once the model is loaded."""

    model: LoadedModel
    codec: TextCodec
    grammars: Grammars
    engine: Engine
    limits: Limits
    speculators: Speculators | None
    datastore: DatastorePeer | None
    forward_times_ms: dict[int, float]

    @property
    def peers(self) -> list[PeerState]:
        """All peers that this server dials."""
        states = [] if self.speculators is None else self.speculators.states
        return states if self.datastore is None else [*states, self.datastore.state]


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Serves generations. Refuses everything until `ready` was called."""

    def __init__(
        self,
        max_num_sessions: int,
        stall_timeout_s: float,
        quotas: Quotas | None = None,
        max_draft_nodes_per_s: float = MAX_NODES_PER_S,
        max_num_queued: int = 0,
    ) -> None:
        """
        Args:
            max_num_sessions: Most sessions at a time.
            stall_timeout_s: Time after which a client that reads nothing, or sends no first message, is cut off.
            quotas: Limits of callers and tenants. None means that there are none.
            max_draft_nodes_per_s: Most nodes a second of a caller's drafts.
            max_num_queued: Most sessions that wait for room besides those.
        """
        self._max_num_sessions, self._max_num_queued = max_num_sessions, max_num_queued
        self._stall_timeout_s = stall_timeout_s
        self._quotas = quotas or Quotas()
        self._max_draft_nodes_per_s = max_draft_nodes_per_s
        self._texts, self._grammars = Lane("tokenizing", NUM_THREADS), Lane("compiling", NUM_THREADS)
        self._serving: Serving | None = None
        self._is_draining = False
        self.num_sessions = 0
        self.calls = GenerationCalls()
        self.counts = SessionCounts()

    # Its life.

    def ready(self, serving: Serving) -> None:
        """Begins to serve: the model is loaded."""
        self._serving = serving

    def drain(self) -> None:
        """Refuses new sessions from here on."""
        self._is_draining = True

    def _ready(self) -> Serving:
        if self._is_draining:
            raise NotServing("the verifier is draining")
        if self._serving is None:
            raise NotServing("the target model is loading")
        return self._serving

    def metrics(self) -> Metrics:
        """Yields what was counted since the start. May be called in any thread."""
        serving = self._serving  # read once: the loop may set it meanwhile
        yield from read_sessions(self.calls, self.counts, [] if serving is None else serving.peers)
        if serving is not None:
            if serving.speculators is not None:
                yield from serving.speculators.metrics()
            yield from read_rounds(serving.engine.counts, serving.limits.speculation.max_num_speculative_tokens)
            pool = serving.engine.residency.state()
            yield from read_pool(pool)
            yield from read_load(self.calls, pool, serving.model.model_id)

    # Generations.

    async def Generate(self, request: verifier_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Runs one generation; the speculator and the datastore of this server draft."""

        def send(event: Event, index: int) -> Awaitable[None]:
            response = verifier_pb2.GenerateResponse(index=index, **in_field(event))
            return streams.write(context, response, self._stall_timeout_s, "client")

        # Trace and counts enclose `rpc_errors`: they read the status that it sets.
        with (
            traced_call(GENERATE, context),
            self.calls.call(context) as call,
            rpc_errors(context),
            self._quota(context) as quota,
        ):
            serving = self._ready()
            specs = await self._session_specs(request, serving, context, brings_drafts=False)
            num_running = sum(spec is not None for spec in specs)
            with ExitStack() as others, self._places(num_running):
                # Each text is a session; the first is counted already.
                for _ in range(num_running - 1):
                    others.enter_context(self._quota(context))
                await run_choices(specs, partial(self._generate, serving, call, quota), send, is_of_text)

    async def _generate(
        self,
        serving: Serving,
        call: GenerationCall,
        quota: TenantQuota,
        spec: SessionSpec,
        elder: SessionSpec | None,
        send: Send,
    ) -> None:
        """Runs one generation for a caller that does not draft. `elder` is the first text of the request, if it has
        several."""
        with self._generation(spec, serving, serving.speculators, elder) as generation:
            observer = SessionObserver(generation, serving.model, call, quota, self.counts)
            await _stream(generation, serving, observer, send, partial(self._load, serving))

    async def Collaborate(  # type: ignore[override]
        self, requests: AsyncIterator[verifier_pb2.CollaborateRequest], context: Context
    ) -> None:
        """Runs one generation; the caller drafts."""
        with traced_call(COLLABORATE, context), self.calls.call(context) as call, rpc_errors(context):
            # Before the quota: a caller that connects and sends nothing takes no session's place.
            requests = streams.opened(requests, self._stall_timeout_s)
            opening = await opening_of(requests, self._ready().model)
            with self._quota(context) as quota:
                serving = self._ready()
                specs = await self._session_specs(opening.request, serving, context, brings_drafts=True)
                (spec,) = (spec for spec in specs if spec is not None)
                with self._places(1), self._generation(spec, serving, None, brings_drafts=True) as generation:
                    observer = SessionObserver(generation, serving.model, call, quota, self.counts)
                    reader = await self._collaborate(generation, serving, observer, opening, requests, context)
            # A draft that is being written when the call ends would hide from its caller how it has ended.
            await asyncio.wait([reader], timeout=HALF_CLOSE_S)
            reader.cancel()  # a caller may keep its side open indefinitely

    async def _collaborate(
        self,
        generation: Generation,
        serving: Serving,
        observer: SessionObserver,
        opening: verifier_pb2.CollaborateOpen,
        requests: AsyncIterator[verifier_pb2.CollaborateRequest],
        context: Context,
    ) -> asyncio.Task[None]:
        """Runs the generation to its end. Returns the task that reads what the caller still sends."""
        limit = DraftLimit(self._max_draft_nodes_per_s, generation.spec.session_id)
        drafts = CallerDrafts(generation, limit, (generation.traffic, self.counts.caller_traffic))
        drafts.count_received(opening)

        def send(event: Event) -> Awaitable[None]:
            response = verifier_pb2.CollaborateResponse(**in_field(event))
            drafts.count_sent(response)
            return streams.write(context, response, self._stall_timeout_s, "client")

        reader = asyncio.create_task(drafts.read(requests))
        try:
            shows_prompt = opening.wants_prompt_token_ids
            load = partial(self._load, serving)
            await _stream(generation, serving, observer, send, load, drafts, shows_prompt=shows_prompt)
        except BaseException:
            reader.cancel()
            raise
        return reader

    def _quota(self, context: Context) -> AbstractContextManager[TenantQuota]:
        """Returns a context around a request of the caller, which yields the quota that its tokens are charged to. An
        invalid request counts; one that is sent elsewhere does not."""
        self._ready()
        return self._quotas.session(name_of_caller(context), current_caller())

    @contextmanager
    def _places(self, count: int) -> Iterator[None]:
        """Holds the places of this many sessions while the body runs. Raises ResourceExhausted if too few are free."""
        # Nothing is awaited between this check and the count, so no other call comes between them.
        if self.num_sessions + count > self._max_num_sessions + self._max_num_queued:
            queue = f", and {self._max_num_queued} wait" if self._max_num_queued else ""
            raise ResourceExhausted(f"the verifier has all {self._max_num_sessions} sessions in use{queue}")
        self.num_sessions += count
        try:
            yield
        finally:
            self.num_sessions -= count

    @contextmanager
    def _generation(
        self,
        spec: SessionSpec,
        serving: Serving,
        speculators: Speculators | None,
        elder: SessionSpec | None = None,
        *,
        brings_drafts: bool = False,
    ) -> Iterator[Generation]:
        """Runs a generation while the body does. `elder` is the first of several texts, which has read the prompt."""
        tenant = current_tenant()
        salt, elder_id = serving.limits.prefix_scope.salt(tenant), "" if elder is None else elder.session_id
        # Texts of one request share prefixes even if no other generation may.
        salt = salt or (f"request {elder_id}" if elder_id else None)
        generation = Generation(
            spec,
            serving.engine,
            speculators,
            serving.datastore,
            tenant,
            brings_drafts=brings_drafts,
            salt=salt,
            elder_id=elder_id,
        )
        with closing(generation):
            yield generation

    # Everything else.

    async def Tokenize(self, request: verifier_pb2.TokenizeRequest, context: Context) -> verifier_pb2.TokenizeResponse:
        """Converts text to token ids."""
        response = verifier_pb2.TokenizeResponse()
        with rpc_errors(context):
            serving = self._ready()
            self._quotas.count_request(current_caller())
            check_num_tokens("prompt", len(request.prompt.token_ids.token_ids), serving.model.max_context_len)
            tokenized = partial(prompt_token_ids, request.prompt, serving.model, serving.codec)
            response.token_ids.extend(await self._worked_through(request, tokenized, context))
        return response

    async def Detokenize(
        self, request: verifier_pb2.DetokenizeRequest, context: Context
    ) -> verifier_pb2.DetokenizeResponse:
        """Converts token ids to text."""
        response = verifier_pb2.DetokenizeResponse()
        with rpc_errors(context):
            serving = self._ready()
            self._quotas.count_request(current_caller())
            model = serving.model
            # As many as a text has, or as the vocabulary has, for a caller that looks tokens up.
            check_num_tokens("token_ids", len(request.token_ids), max(model.max_context_len, model.vocab_size))
            token_ids = token_ids_from_proto(request.token_ids, model.vocab_size, "token_ids")
            response.text = await self._worked_through(request, partial(serving.codec.decode, token_ids), context)
            if request.wants_token_bytes:
                # Always in a thread: the first call reads the whole vocabulary.
                spelled = partial(serving.grammars.token_bytes, token_ids)
                response.token_bytes.extend(await self._grammars.run(spelled, name_of_caller(context)))
        return response

    async def _session_specs(
        self, request: verifier_pb2.GenerateRequest, serving: Serving, context: Context, *, brings_drafts: bool
    ) -> list[SessionSpec | None]:
        """Resolves a request; in a thread if its size or its structure would make others on the event loop wait."""
        current_span().set_attributes(operation_attributes(request.prompt.WhichOneof("input") == "chat"))
        model, codec, limits = serving.model, serving.codec, serving.limits
        resolved = partial(session_specs, request, model, codec, limits, serving.grammars, brings_drafts=brings_drafts)
        if not request.HasField("structured_outputs"):
            return await self._worked_through(request, resolved, context)
        caller, structure = name_of_caller(context), structure_from_proto(request.structured_outputs)
        # Without a timeout: the first call reads the whole vocabulary, and others wait for it.
        await self._grammars.run(partial(serving.grammars.prepare, structure), caller)
        try:
            # Timed by itself: the time to tokenize the prompt does not count for the structure.
            compiled = partial(check_structure, structure, serving.grammars)
            await self._grammars.run(compiled, caller, timeout_s=COMPILE_TIMEOUT_S)
        except TimeoutError:
            problem = f"must compile within {COMPILE_TIMEOUT_S:g} s"
            raise InvalidArgument("structured_outputs", problem) from None
        if request.ByteSize() >= LARGE_BYTES:
            return await self._worked_through(request, resolved, context)
        return await self._grammars.run(resolved, caller)

    async def _worked_through(self, request: Message, work: Callable[[], _Result], context: Context) -> _Result:
        """Calls `work`, in a thread if the request is large, and returns or raises what it does. Raises
        ResourceExhausted if too many wait for a thread.

        Args:
            request: The request that `work` processes, like a prompt to be tokenized.
            work: Function whose time grows with the request.
            context: Context of the call.
        """
        num_bytes = request.ByteSize()
        return work() if num_bytes < LARGE_BYTES else await self._texts.run(work, name_of_caller(context), num_bytes)

    async def GetInfo(self, request: verifier_pb2.GetInfoRequest, context: Context) -> verifier_pb2.GetInfoResponse:
        """Describes this server."""
        with rpc_errors(context):
            return self._info(self._ready())
        # Reached after an error only: gRPC sends no message with the status that `rpc_errors` has set.
        return verifier_pb2.GetInfoResponse()

    def _info(self, serving: Serving) -> verifier_pb2.GetInfoResponse:
        limits = serving.limits
        methods = [method for method in METHODS.values() if missing_peer(method, limits) is None]
        speculators = [] if serving.speculators is None else serving.speculators.infos()
        return verifier_pb2.GetInfoResponse(
            model=model_info(serving.model),
            methods=[METHODS_TO_PROTO[method] for method in methods],
            default_method=METHODS_TO_PROTO[limits.defaults.method],
            max_num_speculative_tokens=limits.speculation.max_num_speculative_tokens,
            max_num_sessions=self._max_num_sessions,
            num_sessions=self.num_sessions,
            speculator=next((each for each in speculators if each.connected), next(iter(speculators), None)),
            datastore=serving.datastore.state.info() if serving.datastore else None,
            version=__version__,
            forward_times=[
                verifier_pb2.ForwardTime(num_rows=rows, forward_ms=ms)
                for rows, ms in sorted(serving.forward_times_ms.items())
            ],
            max_num_rows=limits.speculation.max_num_rows,
            exact_off_reason=serving.model.exactness.reason,
            kv_pool=_pool_info(serving.model.runner.pool),
            num_queued=serving.engine.num_waiting,
            speculators=speculators,
            chat_template=serving.codec.chat_template,
            stored_as=serving.model.stored_as,
        )

    def _load(self, serving: Serving) -> verifier_pb2.VerifierLoad:
        return verifier_pb2.VerifierLoad(
            num_sessions=self.num_sessions,
            max_num_sessions=self._max_num_sessions,
            num_queued=serving.engine.num_waiting,
        )


async def _stream(
    generation: Generation,
    serving: Serving,
    observer: SessionObserver,
    send: Send,
    load: Callable[[], verifier_pb2.VerifierLoad],
    drafts: CallerDrafts | None = None,
    *,
    shows_prompt: bool = False,
) -> None:
    """Sends Started, a chunk for each round, and Finished; between them news for a caller that drafts."""
    with observer:
        async for news in generation.waits():
            await send(of_news(news))
        responses = Responses(generation, serving.model, serving.codec)
        started = partial(responses.started, load(), shows_prompt=shows_prompt)
        # In a thread: decoding a long prompt takes time, more so with the ends of its tokens.
        await send(await asyncio.to_thread(started) if generation.spec.report.echo else started())
        async for event in generation.events():
            if isinstance(event, Steering):
                await send(steering_to_proto(event))
                continue
            if isinstance(event, NoRoom | Reading):
                await send(of_news(event))
                continue
            observer.on_verdict(event)
            acknowledged_node_id = 0 if drafts is None else drafts.last_node_id
            for message in responses.of_verdict(event, acknowledged_node_id):
                await send(message)
                if isinstance(message, verifier_pb2.Finished):
                    observer.on_finished(message.reason)


def _pool_info(pool: KVPool) -> verifier_pb2.KvPoolInfo:
    return verifier_pb2.KvPoolInfo(
        num_tokens=pool.num_slots,
        num_held_tokens=pool.blocks.num_held * pool.block_size,
        num_cached_tokens=pool.blocks.num_cached * pool.block_size,
        block_size=pool.block_size,
    )
