"""The RPCs of the speculator: proto in, engine calls, proto out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import grpc
import structlog

from outrider.core.params import check
from outrider.core.tree import Draft
from outrider.models.loading import LoadedModel
from outrider.security.callers import name_of_caller
from outrider.security.quotas import LimitReached, Quotas
from outrider.server import streams
from outrider.speculator.caller_session import ALL, CallerSession, DraftingCall, Item
from outrider.speculator.engine import Engine
from outrider.speculator.load import LoadReports
from outrider.speculator.metrics import read_drafts
from outrider.speculator.openings import LIMITS, Openings
from outrider.speculator.tracing import drafting_attributes
from outrider.telemetry.metrics import Metrics, counters
from outrider.telemetry.tracing import SERVER_ERRORS, SPECULATE, message_span, status_of
from outrider.v1 import speculator_pb2, speculator_pb2_grpc
from outrider.version import __version__
from outrider.wire.convert import draft_to_proto, token_ids_from_proto
from outrider.wire.errors import InvalidArgument, NotServing, ResourceExhausted, RpcError, ended_to_proto, rpc_errors
from outrider.wire.handshake import model_info
from outrider.wire.speculation import METHODS_TO_PROTO
from outrider.wire.steering import DRAFTED, steering_from_proto

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
DRAINING = "the speculator is draining"
LIMIT_SETTINGS = ("max_num_sessions", "max_sessions_per_caller", "max_read_tokens_per_minute")
"""Settings that a session may be refused by."""


class _Serving(NamedTuple):
    model: LoadedModel
    engine: Engine
    openings: Openings


class SpeculatorServicer(speculator_pb2_grpc.SpeculatorServiceServicer):
    """Serves drafts. Refuses everything until `ready` was called."""

    def __init__(self, max_num_sessions: int, quotas: Quotas | None = None, stall_timeout_s: float = 60.0) -> None:
        """
        Args:
            max_num_sessions: Most sessions at a time.
            quotas: Limits of single callers; None means that there are none.
            stall_timeout_s: A caller that reads nothing for so many seconds, or sends nothing at first, is cut off.
        """
        self._max_num_sessions = max_num_sessions
        self._quotas = Quotas() if quotas is None else quotas
        self._stall_timeout_s = stall_timeout_s
        self._serving: _Serving | None = None
        self._is_draining = False
        self.num_sessions = 0
        self._calls: set[DraftingCall] = set()
        self._reports = LoadReports(max_num_sessions)
        # All keys from the start: another thread may iterate while this one counts.
        self._num_refusals = dict.fromkeys(LIMIT_SETTINGS, 0)

    def ready(self, model: LoadedModel, engine: Engine) -> None:
        """Serves with this model from here on."""
        self._serving = _Serving(model, engine, Openings(model))

    def drain(self) -> None:
        """Refuses new sessions, and ends those that there are: a generation may last for long, and another replica can
        go on drafting for it at once."""
        self._is_draining = True
        # This only queues the error: no call leaves the set before its own task runs.
        for call in self._calls:
            call.outbox.put(ALL, NotServing(DRAINING))

    def metrics(self) -> Metrics:
        """Yields what was counted since the start; nothing while the model loads. May be called in any thread."""
        if self._serving is not None:
            engine = self._serving.engine
            yield from read_drafts(engine.counts, engine.num_sessions, engine.residency.state())
            yield counters(
                "outrider_draft_refusals_total",
                "Sessions that were refused, by the setting whose limit was reached.",
                "reason",
                self._num_refusals,
            )

    def _loaded(self) -> _Serving:
        if self._serving is None or self._is_draining:
            raise NotServing(DRAINING if self._is_draining else "the draft model is loading")
        return self._serving

    async def Speculate(  # type: ignore[override]
        self, requests: AsyncIterator[speculator_pb2.SpeculateRequest], context: Context
    ) -> None:
        """Drafts for the generations of one caller, with one message for all sessions that have something to say."""
        with rpc_errors(context), self._call(context) as call:

            async def read() -> None:
                async for message in streams.opened(requests, self._stall_timeout_s):
                    for request in message.sessions:
                        await self._take(call, request)
                    await call.outbox.room()

            async with call.reading(read()):
                while True:
                    message = speculator_pb2.SpeculateResponse()
                    for number, item in await call.outbox.take():
                        if number != ALL:
                            self._say(call, number, item, message)
                        elif isinstance(item, Exception):
                            raise item
                        else:
                            return
                    if message.sessions:
                        self._add_news(call, message.sessions[0])
                        await streams.write(context, message, self._stall_timeout_s, "caller")

    # A call and its sessions.

    @contextmanager
    def _call(self, context: Context) -> Iterator[DraftingCall]:
        """Holds a call, and ends its sessions with it."""
        self._loaded()
        call = DraftingCall(name_of_caller(context), context.peer())
        self._calls.add(call)
        try:
            yield call
        finally:
            self._calls.discard(call)
            for number in list(call.sessions):
                self._close(call, number)

    async def _open(self, call: DraftingCall, number: int, opening: speculator_pb2.SpeculateOpen) -> None:
        """Begins a session, and tells its caller of it or of its refusal. Then takes the requests that were held."""
        with call.ending(number):
            await self._begin(call, number, opening)
        for held in call.held.pop(number, ()):
            await self._take(call, held)

    async def _begin(self, call: DraftingCall, number: int, opening: speculator_pb2.SpeculateOpen) -> None:
        """Begins a session. Raises RpcError or InvalidParameter if it cannot be."""
        _, engine, openings = self._loaded()
        with ExitStack() as exits:
            recorded = exits.enter_context(message_span(SPECULATE, opening.traceparent))
            spec = openings.spec(opening, engine.forward_us)
            try:
                exits.enter_context(self._quotas.session(call.caller, num_read_tokens=len(spec.committed_token_ids)))
            except LimitReached as error:
                self._num_refusals[error.setting] += 1
                raise
            if opening.HasField("structured_outputs"):
                spec = replace(spec, matcher=await openings.matcher(opening.structured_outputs))
            model, engine, _ = self._loaded()  # it may have begun to drain since
            # Nothing is awaited from here until the session is counted, so no two can take the last place.
            if self.num_sessions >= self._max_num_sessions:
                self._num_refusals["max_num_sessions"] += 1
                raise ResourceExhausted(f"the speculator has all {self._max_num_sessions} sessions in use")
            self.num_sessions += 1
            session = CallerSession(
                number,
                spec.session_id,
                list(spec.committed_token_ids),
                model.max_context_len,
                spec.speculation,
                call.outbox,
                recorded,
                exits.pop_all(),
            )
        call.add(session)
        # Before the caller is told, to lose no time. Drafts come through the event loop, so none overtakes `opened`.
        engine.open(spec, session)
        method = spec.speculation.method.name
        log.info("session.started", session_id=spec.session_id, method=method, **recorded.log_fields)
        load = self._load(engine)
        self._reports.open(call.connection, load)
        opened = speculator_pb2.SpeculateOpened(model=model_info(model), forward_us=engine.forward_us, load=load)
        call.outbox.put(number, opened)

    def _close(self, call: DraftingCall, number: int) -> None:
        """Ends a session that has begun."""
        assert self._serving is not None
        session = call.remove(number)
        self._reports.close(call.connection)
        self._serving.engine.close(session.session_id)
        self.num_sessions -= 1
        log.info("session.ended", session_id=session.session_id, num_committed_tokens=len(session.committed))
        if session.span.is_recorded:
            session.span.set_attributes(
                drafting_attributes(
                    self._serving.model.model_id,
                    session.session_id,
                    session.opened.method.name,
                    num_committed=len(session.committed),
                    num_drafts=session.num_drafts,
                    num_nodes=session.num_nodes,
                )
            )
        session.exits.close()

    def _load(self, engine: Engine) -> speculator_pb2.SpeculatorLoad:
        return self._reports.current(self.num_sessions, engine.counts.busy_s)

    # What comes in.

    async def _take(self, call: DraftingCall, request: speculator_pb2.SessionRequest) -> None:
        number, event = request.number, request.WhichOneof("event")
        if number in call.held:
            call.held[number].append(request)
        elif event == "open":
            check(number != ALL, "sessions.number", ">= 1", number)
            check(number not in call.sessions, "sessions.number", "that of no open session of this stream", number)
            if request.open.HasField("structured_outputs"):
                call.open_beside(number, self._open(call, number, request.open))
            else:
                await self._open(call, number, request.open)
        elif number in call.sessions:
            if event == "close":
                self._close(call, number)
            else:
                with call.ending(number):
                    self._tell_engine(call, request)

    def _tell_engine(self, call: DraftingCall, request: speculator_pb2.SessionRequest) -> None:
        """Takes in a commit or a steering. Raises RpcError or InvalidParameter for an invalid one."""
        assert self._serving is not None
        session, model, engine = call.sessions[request.number], self._serving.model, self._serving.engine
        match request.WhichOneof("event"):
            case "commit":
                token_ids = token_ids_from_proto(request.commit.token_ids, model.vocab_size, "commit.token_ids")
                fresh = session.fresh_tokens(request.commit.base_len, token_ids)
                if fresh:
                    self._quotas.charge_reading(call.caller, len(fresh))
                    engine.commit(session.session_id, fresh, request.commit.acknowledged_node_id)
            case "steering":
                engine.steer(session.session_id, steering_from_proto(request.steering, session.opened, LIMITS))
            case _:
                raise InvalidArgument("sessions.event", "must be commit, steering or close while the session goes on")

    # What goes out.

    def _say(self, call: DraftingCall, number: int, item: Item, message: speculator_pb2.SpeculateResponse) -> None:
        """Adds what a session has to tell to a message: its opening, a draft or its end."""
        session = call.sessions.get(number)
        if isinstance(item, RpcError):
            message.sessions.add(number=number, ended=ended_to_proto(item))
            if session is not None:
                status = status_of(item)
                session.span.end(status, is_error=status in SERVER_ERRORS)
                self._close(call, number)
        elif session is None:
            return  # its caller has closed it since
        elif isinstance(item, Draft):
            session.num_drafts += 1
            session.num_nodes += len(item.token_ids)
            drafted = message.sessions.add(number=number).draft
            drafted.draft.CopyFrom(draft_to_proto(item))
            drafted.forward_us, drafted.retrieval_us = item.forward_us, item.retrieval_us
        elif isinstance(item, speculator_pb2.SpeculateOpened):
            message.sessions.add(number=number, opened=item)

    def _add_news(self, call: DraftingCall, response: speculator_pb2.SessionResponse) -> None:
        """Adds the server's load to a draft, if that is news to the caller."""
        if self._serving is not None and call.sessions and response.WhichOneof("event") == "draft":
            news = self._reports.news(call.connection, self._load(self._serving.engine))
            if news is not None:
                response.draft.load.CopyFrom(news)

    async def GetInfo(
        self,
        request: speculator_pb2.SpeculatorServiceGetInfoRequest,
        context: Context,
    ) -> speculator_pb2.SpeculatorServiceGetInfoResponse:
        """Describes this server."""
        with rpc_errors(context):
            model, engine, _ = self._loaded()
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
