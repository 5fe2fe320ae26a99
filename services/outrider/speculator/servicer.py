"""The RPCs of the speculator: proto in, engine calls, proto out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import structlog

from outrider.core.params import InvalidParameter, Method, SpeculationParams, check
from outrider.core.structure import Matcher
from outrider.core.tree import Draft, TokenId
from outrider.models.loading import LoadedModel
from outrider.models.structure import BadStructure, Grammars
from outrider.security.callers import name_of_caller
from outrider.security.quotas import LimitReached, Quotas
from outrider.server import streams
from outrider.speculator.drafter import check_fits
from outrider.speculator.engine import Engine
from outrider.speculator.load import LoadReports
from outrider.speculator.metrics import read_drafts
from outrider.speculator.session import DraftSessionSpec
from outrider.speculator.tracing import drafting_attributes
from outrider.telemetry.metrics import Metrics, counters
from outrider.telemetry.tracing import SPECULATE, current_span, traced_call
from outrider.v1 import speculator_pb2, speculator_pb2_grpc, types_pb2
from outrider.version import __version__
from outrider.wire.convert import draft_to_proto, token_ids_from_proto
from outrider.wire.errors import (
    InvalidArgument,
    NotServing,
    OutOfRange,
    ResourceExhausted,
    RpcError,
    Unavailable,
    invalid_argument,
    rpc_errors,
)
from outrider.wire.handshake import check_handshake, model_info
from outrider.wire.sampling import sampling_from_proto
from outrider.wire.speculation import METHODS_TO_PROTO, SpeculationLimits, speculation_from_proto
from outrider.wire.steering import DRAFTED, check_drafted, steering_from_proto
from outrider.wire.structure import structure_from_proto

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
DEFAULTS = SpeculationParams(Method.PEARL, num_speculative_tokens=8, lookahead=32)
"""Parameters for a caller that leaves fields unset. The verifier sets all of them."""
LIMITS = SpeculationLimits()
DRAINING = "the speculator is draining"
MAX_NAME_LEN = 256
"""Longest session_id. It stands in every log line about a session."""
LIMIT_SETTINGS = ("max_num_sessions", "max_sessions_per_caller", "max_read_tokens_per_minute")
"""Settings that a session may be refused by."""
HIGH_WATER = 64
"""Drafts that may wait for a caller. While more do, nothing is read from it: without commits, no new drafts grow."""


class _Stream:
    """Holds one Speculate call: drafts on their way out, and committed tokens to check what comes in."""

    def __init__(self, session_id: str, committed: tuple[TokenId, ...], max_context_len: int) -> None:
        self.session_id = session_id
        self.committed = list(committed)
        self._max_context_len = max_context_len
        self._loop = asyncio.get_running_loop()
        self._drafts: asyncio.Queue[Draft | RpcError | None] = asyncio.Queue()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self.num_drafts = self.num_nodes = 0
        """Drafts, and the nodes in them, that the caller was sent."""

    def send(self, draft: Draft) -> None:
        """See `DraftListener`."""
        # Called on the engine's thread, and an asyncio.Queue may be used on its loop only.
        self._loop.call_soon_threadsafe(self._put, draft)

    def _put(self, draft: Draft) -> None:
        self._drafts.put_nowait(draft)
        if self._drafts.qsize() >= HIGH_WATER:
            self._has_room.clear()

    async def room(self) -> None:
        """Returns when few enough drafts wait for the caller to read them."""
        await self._has_room.wait()

    def fail(self) -> None:
        """See `DraftListener`."""
        self._loop.call_soon_threadsafe(self._drafts.put_nowait, Unavailable("the speculator lost this session"))

    def end(self, error: RpcError | None = None) -> None:
        """Ends the stream, with an error if there is one. Called on the loop."""
        self._drafts.put_nowait(error)

    async def responses(self) -> AsyncIterator[speculator_pb2.SpeculateResponse]:
        """Yields drafts until the stream ends. Raises the error that ends it, if there is one."""
        while True:
            draft = await self._drafts.get()
            # Half, so that reading does not stop and go with every single draft.
            if self._drafts.qsize() < HIGH_WATER // 2:
                self._has_room.set()
            if draft is None:
                return
            if isinstance(draft, RpcError):
                raise draft
            self.num_drafts += 1
            self.num_nodes += len(draft.token_ids)
            yield speculator_pb2.SpeculateResponse(
                draft=speculator_pb2.SpeculatorDraft(
                    draft=draft_to_proto(draft), forward_us=draft.forward_us, retrieval_us=draft.retrieval_us
                )
            )

    def fresh_tokens(self, base_len: int, token_ids: tuple[TokenId, ...]) -> tuple[TokenId, ...]:
        """Takes a commit in and returns the tokens of it that are new. Repeated commits are harmless.

        Raises:
            OutOfRange: the commit leaves a gap, or goes beyond the context.
            InvalidArgument: it is empty, or contradicts what is committed.
        """
        if not token_ids:
            raise InvalidArgument("commit.token_ids", "must hold at least one token")
        if base_len > len(self.committed):
            raise OutOfRange(
                f"commit.base_len must be at most {len(self.committed)}, the tokens committed so far, got {base_len}"
            )
        # An int32 on the wire: a negative one would count from the end in the slices below.
        check(base_len > 0, "commit.base_len", ">= 1", base_len)
        if base_len + len(token_ids) > self._max_context_len:
            raise OutOfRange(
                f"commit.token_ids must end within the draft model's context of {self._max_context_len} tokens, got "
                f"{len(token_ids)} from position {base_len} on"
            )
        known = tuple(self.committed[base_len : base_len + len(token_ids)])
        if token_ids[: len(known)] != known:
            raise InvalidArgument("commit.token_ids", f"must repeat what is committed from position {base_len} on")
        fresh = token_ids[len(known) :]
        self.committed.extend(fresh)
        return fresh


class SpeculatorServicer(speculator_pb2_grpc.SpeculatorServiceServicer):
    """Serves drafts. Refuses everything until `ready` was called."""

    def __init__(self, max_num_sessions: int, quotas: Quotas | None = None, stall_timeout_s: float = 60.0) -> None:
        """
        Args:
            max_num_sessions: Most sessions at a time.
            quotas: Limits of single callers; None means that there are none.
            stall_timeout_s: A caller that reads nothing for so many seconds is cut off.
        """
        self._max_num_sessions = max_num_sessions
        self._quotas = Quotas() if quotas is None else quotas
        self._stall_timeout_s = stall_timeout_s
        self._model: LoadedModel | None = None
        self._engine: Engine | None = None
        self._grammars: Grammars | None = None
        self._is_draining = False
        self.num_sessions = 0
        self._streams: set[_Stream] = set()
        self._num_opened = 0
        self._reports = LoadReports(max_num_sessions)
        # All keys from the start: another thread may iterate while this one counts.
        self._num_refusals = dict.fromkeys(LIMIT_SETTINGS, 0)

    def ready(self, model: LoadedModel, engine: Engine) -> None:
        """Serves with this model from here on."""
        self._model, self._engine = model, engine

    def drain(self) -> None:
        """Refuses new sessions, and ends those that there are: a generation may last for long, and another replica can
        go on drafting for it at once."""
        self._is_draining = True
        # Ending only queues the error: no stream leaves the set before its own task runs.
        for stream in self._streams:
            stream.end(NotServing(DRAINING))

    def metrics(self) -> Metrics:
        """Yields what was counted since the start; nothing while the model loads. May be called in any thread."""
        if self._engine is not None:
            yield from read_drafts(self._engine.counts, self._engine.num_sessions, self._engine.residency.state())
            yield counters(
                "outrider_draft_refusals_total",
                "Sessions that were refused, by the setting whose limit was reached.",
                "reason",
                self._num_refusals,
            )

    def _loaded(self) -> tuple[LoadedModel, Engine]:
        if self._model is None or self._engine is None or self._is_draining:
            raise NotServing(DRAINING if self._is_draining else "the draft model is loading")
        return self._model, self._engine

    async def Speculate(  # type: ignore[override]
        self, requests: AsyncIterator[speculator_pb2.SpeculateRequest], context: Context
    ) -> None:
        """Drafts for one generation: commits and steering in, drafts out."""
        with traced_call(SPECULATE, context), rpc_errors(context):
            model, engine = self._loaded()
            # grpc.aio makes one iterator of a call's requests: `_read` goes on behind the message that is taken here.
            first = await anext(aiter(requests), None)
            spec = self._spec(first, model, engine.forward_us)
            try:
                with self._quotas.session(name_of_caller(context), num_read_tokens=len(spec.committed_token_ids)):
                    if first is not None and first.open.HasField("structured_outputs"):
                        spec = replace(spec, matcher=await self._matcher(first.open.structured_outputs, model))
                    await self._draft(spec, requests, context, model, engine)
            except LimitReached as error:
                self._num_refusals[error.setting] += 1
                raise

    async def _draft(
        self,
        spec: DraftSessionSpec,
        requests: AsyncIterator[speculator_pb2.SpeculateRequest],
        context: Context,
        model: LoadedModel,
        engine: Engine,
    ) -> None:
        self._loaded()  # it may have begun to drain since
        # Nothing is awaited from here until the session is counted, so no two calls can take the last place.
        if self.num_sessions >= self._max_num_sessions:
            self._num_refusals["max_num_sessions"] += 1
            raise ResourceExhausted(f"the speculator has all {self._max_num_sessions} sessions in use")
        stream = _Stream(spec.session_id, spec.committed_token_ids, model.max_context_len)
        self.num_sessions += 1
        self._streams.add(stream)
        # Before the caller is told, to lose no time: drafts wait in the stream's queue until `opened` is written.
        engine.open(spec, stream)
        span = current_span()
        method = spec.speculation.method.value
        log.info("session.started", session_id=spec.session_id, method=method, **span.log_fields)
        caller = name_of_caller(context)
        reader = asyncio.create_task(self._read(requests, stream, model, engine, spec.speculation, caller))
        connection, load = context.peer(), self._load(engine)
        self._reports.open(connection, load)
        try:
            opened = speculator_pb2.SpeculateOpened(model=model_info(model), forward_us=engine.forward_us, load=load)
            response = speculator_pb2.SpeculateResponse(opened=opened)
            await streams.write(context, response, self._stall_timeout_s, "caller")
            async for response in stream.responses():
                if (news := self._reports.news(connection, self._load(engine))) is not None:
                    response.draft.load.CopyFrom(news)
                await streams.write(context, response, self._stall_timeout_s, "caller")
        finally:
            reader.cancel()
            self._reports.close(connection)
            self._streams.discard(stream)
            engine.close(spec.session_id)
            self.num_sessions -= 1
            log.info("session.ended", session_id=spec.session_id, num_committed_tokens=len(stream.committed))
            if span.is_recorded:
                span.set_attributes(
                    drafting_attributes(
                        model.model_id,
                        spec.session_id,
                        method,
                        num_committed=len(stream.committed),
                        num_drafts=stream.num_drafts,
                        num_nodes=stream.num_nodes,
                    )
                )

    def _load(self, engine: Engine) -> speculator_pb2.SpeculatorLoad:
        return self._reports.current(self.num_sessions, engine.counts.busy_s)

    async def _read(
        self,
        requests: AsyncIterator[speculator_pb2.SpeculateRequest],
        stream: _Stream,
        model: LoadedModel,
        engine: Engine,
        opened: SpeculationParams,
        caller: str,
    ) -> None:
        """Reads commits and steering, until the caller half-closes or sends something wrong."""
        try:
            async for request in requests:
                match request.WhichOneof("event"):
                    case "commit":
                        token_ids = token_ids_from_proto(request.commit.token_ids, model.vocab_size, "commit.token_ids")
                        fresh = stream.fresh_tokens(request.commit.base_len, token_ids)
                        if fresh:
                            self._quotas.charge_reading(caller, len(fresh))
                            engine.commit(stream.session_id, fresh, request.commit.acknowledged_node_id)
                    case "steering":
                        engine.steer(stream.session_id, steering_from_proto(request.steering, opened, LIMITS))
                    case _:
                        raise InvalidArgument("event", "must be commit or steering after the first message")
                await stream.room()
        except RpcError as error:
            # Not raised: nobody awaits this task. `_draft` finds the error in the stream and ends the call with it.
            stream.end(error)
        except InvalidParameter as error:
            stream.end(invalid_argument(error))
        else:
            stream.end()

    async def _matcher(self, message: types_pb2.StructuredOutputs, model: LoadedModel) -> Matcher:
        """Compiles the grammar of a session's output, in a thread."""
        if self._grammars is None:
            self._grammars = Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)
        structure = structure_from_proto(message)
        try:
            return await asyncio.to_thread(self._grammars.matcher, structure)
        except BadStructure as error:
            raise InvalidArgument(f"open.structured_outputs.{structure.kind.value}", str(error)) from error

    def _spec(
        self, request: speculator_pb2.SpeculateRequest | None, model: LoadedModel, forward_us: int
    ) -> DraftSessionSpec:
        if request is None or request.WhichOneof("event") != "open":
            raise InvalidArgument("event", "must be open in the first message")
        opening = request.open
        check_handshake(opening.handshake, model)
        committed = token_ids_from_proto(opening.committed_token_ids, model.vocab_size, "open.committed_token_ids")
        if not committed:
            raise InvalidArgument("open.committed_token_ids", "must hold at least one token")
        check_fits(len(committed), model, "open.committed_token_ids")
        num_prompt_tokens = opening.num_prompt_tokens
        check(
            1 <= num_prompt_tokens <= len(committed),
            "open.num_prompt_tokens",
            f"in [1, {len(committed)}]",
            num_prompt_tokens,
        )
        length = len(opening.session_id)
        check(length <= MAX_NAME_LEN, "open.session_id", f"at most {MAX_NAME_LEN} characters long", length)
        length = len(opening.prefix_salt)
        check(length <= MAX_NAME_LEN, "open.prefix_salt", f"at most {MAX_NAME_LEN} characters long", length)
        if not opening.sampling.HasField("seed"):
            raise InvalidArgument("open.sampling.seed", "must be set: drafts share the target's noise")
        speculation = speculation_from_proto(opening.speculation, DEFAULTS, LIMITS)
        check_drafted(speculation.method)
        self._num_opened += 1
        return DraftSessionSpec(
            # The caller's name for its logs, made unique here: a stream that is opened again is another session.
            session_id=f"{opening.session_id}/{self._num_opened}",
            committed_token_ids=committed,
            num_prompt_tokens=num_prompt_tokens,
            sampling=sampling_from_proto(opening.sampling, default_seed=0, vocab_size=model.vocab_size),
            speculation=speculation,
            vocab_size=model.vocab_size,
            prefix_salt=opening.prefix_salt,
            begins_paused=0 < opening.max_forward_us < forward_us,
        )

    async def GetInfo(
        self,
        request: speculator_pb2.SpeculatorServiceGetInfoRequest,
        context: Context,
    ) -> speculator_pb2.SpeculatorServiceGetInfoResponse:
        """Describes this server."""
        with rpc_errors(context):
            model, engine = self._loaded()
            return speculator_pb2.SpeculatorServiceGetInfoResponse(
                model=model_info(model),
                methods=[METHODS_TO_PROTO[method] for method in DRAFTED],
                max_num_sessions=self._max_num_sessions,
                num_sessions=self.num_sessions,
                version=__version__,
                busy_percent=self._load(engine).busy_percent,
            )
        # After an error: `rpc_errors` has set the status, and gRPC discards the message.
        return speculator_pb2.SpeculatorServiceGetInfoResponse()
