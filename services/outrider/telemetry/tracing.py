"""Traces: what a generation did on all services, as one tree of OpenTelemetry spans.

Whether a trace is recorded is decided once, where it begins, and followed from there on: by what gRPC metadata say
(W3C `traceparent`), and on streams that sessions share by a field of the message. A span of ours exists for a call, for
a phase of it, and for what Redis is asked; never for a round, and a session mentions its trace to the datastore a
limited number of times. So a trace stays small, and what is not recorded costs next to nothing. What a span says are
names, counts and states: never a prompt, a text, a token id or a secret.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import grpc

if TYPE_CHECKING:  # imported when it is asked for: most processes do without
    from opentelemetry import trace
    from opentelemetry.context import Context

Attributes: TypeAlias = Mapping[str, str | bool | int | float | Sequence[str]]
Metadata: TypeAlias = tuple[tuple[str, str], ...]
Kind: TypeAlias = Literal["internal", "client", "server"]
ServerContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

GENERATE, COLLABORATE = "outrider.v1.VerifierService/Generate", "outrider.v1.VerifierService/Collaborate"
SPECULATE = "outrider.v1.SpeculatorService/Speculate"
LOOKUP, RECORD = "outrider.v1.DatastoreService/Lookup", "outrider.v1.DatastoreService/Record"

MAX_TRACEPARENT_LEN = 128
"""Today's have 55 characters. What is longer is none."""
MAX_MENTIONS = 16
"""Messages of each kind in which a session tells the datastore of its trace."""
CANCELLED = "CANCELLED"
"""Whoever loses interest has not failed."""
SERVER_ERRORS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Statuses that mean that the server has failed; with all others it was the caller."""


class TraceBudget:
    """What a session says of its trace in messages that others send, too: `traceparent` in the first ones."""

    __slots__ = ("_num_left", "_traceparent")

    def __init__(self, traceparent: str = "") -> None:
        self._traceparent = traceparent
        self._num_left = MAX_MENTIONS if traceparent else 0

    def next(self) -> str:
        """For the next message; empty = nothing."""
        if not self._num_left:
            return ""
        self._num_left -= 1
        return self._traceparent


class Span:
    """A piece of work. As it is here: one that nobody records, in a process that does not trace."""

    __slots__ = ()
    is_recorded = False
    """What takes time to find out need not be said to a span that is not."""

    @property
    def metadata(self) -> Metadata:
        """Goes with the calls that are made in it."""
        return ()

    @property
    def log_fields(self) -> Mapping[str, str]:
        """For the line of the log that names the session."""
        return {}

    def mentions(self) -> TraceBudget:
        """Goes into the messages that are sent for it on streams of others."""
        return TraceBudget()

    def child(self, name: str, kind: Kind = "internal", attributes: Attributes | None = None) -> Span:
        """A part of it, which begins now."""
        return NO_SPAN

    def calling(self, method: str, address: str) -> Span:
        """A call that is made in it, which begins now. `method`: in full, as "outrider.v1.VerifierService/Generate"."""
        return self

    def set_attributes(self, attributes: Attributes) -> None:
        """What is known of it."""

    def add_event(self, event: str, attributes: Attributes) -> None:
        """Something has happened in it."""

    def end(self, status: str = "", *, is_error: bool = False) -> None:
        """It ends now. `status`: name of a gRPC status, or of an error; empty = it is none. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        status = "" if error is None else status_of(error)
        self.end(status, is_error=status not in ("", CANCELLED))


NO_SPAN = Span()
_current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)
_tracer: Tracer | None = None
"""Of this process; None = it does not trace."""


class _Unrecorded(Span):
    """Not recorded, and whoever is called shall not record it either."""

    __slots__ = ("metadata",)

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata  # type: ignore[misc]  # a value here, a property there


class _Recorded(Span):
    __slots__ = ("_is_call", "_is_over", "_span", "_tracer")
    is_recorded = True

    def __init__(self, tracer: Tracer, span: trace.Span, *, is_call: bool) -> None:
        self._tracer, self._span, self._is_call, self._is_over = tracer, span, is_call, False

    @property
    def metadata(self) -> Metadata:
        return self._tracer.metadata_of(self._span)

    @property
    def log_fields(self) -> Mapping[str, str]:
        return {"trace_id": f"{self._span.get_span_context().trace_id:032x}"}

    def mentions(self) -> TraceBudget:
        return TraceBudget(dict(self.metadata).get("traceparent", ""))

    def child(self, name: str, kind: Kind = "internal", attributes: Attributes | None = None) -> Span:
        return self._tracer.begin(name, kind, attributes, self._tracer.within(self._span))

    def calling(self, method: str, address: str) -> Span:
        place = _call_attributes(method) | peer_attributes(address)
        return self._tracer.begin(method, "client", place, self._tracer.within(self._span), is_call=True)

    def set_attributes(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def add_event(self, event: str, attributes: Attributes) -> None:
        self._span.add_event(event, attributes)

    def end(self, status: str = "", *, is_error: bool = False) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._is_call:
            self._span.set_attribute("rpc.response.status_code", status or "OK")
        if is_error:
            self._span.set_attribute("error.type", status)
            self._span.set_status(self._tracer.error)
        self._span.end()


class Tracer:
    """Begins spans. Made for a process that traces."""

    def __init__(self, tracer: trace.Tracer) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer, self._api = tracer, trace
        self._propagator = TraceContextTextMapPropagator()
        self._nowhere = context.Context()
        self.error = trace.StatusCode.ERROR

    def begin(
        self, name: str, kind: Kind, attributes: Attributes | None, parent: Context | None, *, is_call: bool = False
    ) -> Span:
        """A span that begins now. `parent`: None = whatever the application is doing."""
        span = self._tracer.start_span(name, parent, self._api.SpanKind[kind.upper()], attributes)
        if span.is_recording():
            return _Recorded(self, span, is_call=is_call)
        return _Unrecorded(self.metadata_of(span))

    def within(self, span: trace.Span) -> Context:
        """The place of what happens in a span."""
        return self._api.set_span_in_context(span, self._nowhere)

    def place_of(self, metadata: Sequence[tuple[str, str | bytes]]) -> Context:
        """Where a caller says that it is. A malformed `traceparent` says nothing: so W3C has it."""
        said = {key: value for key, value in metadata if key in ("traceparent", "tracestate")}
        if len(said.get("traceparent", "")) > MAX_TRACEPARENT_LEN:
            return self._nowhere
        return self._propagator.extract(said, self._nowhere)

    def is_sampled(self, place: Context) -> bool:
        """Whether a place is in a trace that is recorded."""
        return self._api.get_current_span(place).get_span_context().trace_flags.sampled

    def metadata_of(self, span: trace.Span) -> Metadata:
        """How others are told of a span; empty for one that is nowhere."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self.within(span))
        return tuple(carrier.items())


class _Serving:
    """Around a call that is served: `current_span` in the meantime."""

    __slots__ = ("_context", "_span", "_token")

    def __init__(self, span: Span, context: ServerContext | None) -> None:
        self._span, self._context = span, context
        self._token: Token[Span] | None = None

    def __enter__(self) -> Span:
        self._token = _current.set(self._span)
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._token is not None
        _current.reset(self._token)
        if not self._span.is_recorded:
            return
        status = "" if error is None else status_of(error)
        if error is None and self._context is not None:
            code = self._context.code()  # what the body raised has become one by now
            status = code.name if isinstance(code, grpc.StatusCode) else "OK"
        self._span.end(status, is_error=status in SERVER_ERRORS)


def current_span() -> Span:
    """The call that is being served."""
    return _current.get()


def traced_call(method: str, context: ServerContext) -> _Serving | Span:
    """Around a call: its span, where the caller says that it is, or the first of a trace. Outside of what turns errors
    into a status."""
    if _tracer is None:
        return NO_SPAN
    place = _tracer.place_of(tuple(context.invocation_metadata() or ()))
    return _Serving(_tracer.begin(method, "server", _call_attributes(method), place, is_call=True), context)


def traced_message(method: str, traceparent: str) -> _Serving | Span:
    """Around the work on one message of a stream that many share: its span, if the message is part of a trace that is
    recorded. It never begins a trace."""
    if not traceparent or _tracer is None:
        return NO_SPAN
    place = _tracer.place_of((("traceparent", traceparent),))
    if not _tracer.is_sampled(place):
        return NO_SPAN
    return _Serving(_tracer.begin(method, "server", _call_attributes(method), place), None)


def use_tracer(tracer: Tracer | None) -> None:
    """What this process traces with from now on; None = it does not."""
    global _tracer
    _tracer = tracer


def application_tracer() -> Tracer | None:
    """Traces as the application does in whose process this is; None = it does not use OpenTelemetry."""
    api = sys.modules.get("opentelemetry.trace")
    return None if api is None else Tracer(api.get_tracer("outrider"))


def peer_attributes(address: str) -> dict[str, str | int]:
    """Who is called. `address`: HOST:PORT, or the path of a socket."""
    host, _, port = address.rpartition(":")
    return (
        {"server.address": host.strip("[]"), "server.port": int(port)}
        if port.isdigit()
        else {"server.address": address}
    )


def status_of(error: BaseException) -> str:
    """The name of what has ended a piece of work."""
    code = getattr(error, "code", None)
    code = code() if callable(code) else code
    if isinstance(code, grpc.StatusCode):
        return str(code.name)
    return CANCELLED if isinstance(error, asyncio.CancelledError | GeneratorExit) else type(error).__name__


def _call_attributes(method: str) -> dict[str, str | int]:
    return {"rpc.system.name": "grpc", "rpc.method": method}
