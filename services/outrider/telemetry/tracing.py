"""Traces: what a generation did on all services, as one tree of OpenTelemetry spans.

Whether a trace is recorded is decided once, where it begins. Other services follow that decision, from gRPC metadata
(W3C `traceparent`), and on streams that sessions share from a field of the message. Spans exist for a call, for a phase
of it, and for commands to Redis, never for a round; a session sends its trace to the datastore with a limited number of
messages. A trace thus stays small, and without recording the cost is next to nothing. Spans hold names, counts and
states: never a prompt, a text, a token id or a secret.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import grpc

if TYPE_CHECKING:  # imported on demand: most processes do without
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
"""Longest `traceparent` that is read; those of version 00 have 55 characters."""
MAX_TRACED_MESSAGES = 16
"""Messages of each kind that carry a session's trace to the datastore."""
CANCELLED = "CANCELLED"
"""Status of a call whose caller has cancelled it: that is not an error."""
# The list of OpenTelemetry's semantic conventions for spans of gRPC servers.
SERVER_ERRORS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Statuses that mean that the server has failed; for all others the caller is responsible."""


class TraceBudget:
    """Hands out a session's `traceparent` for its first messages on a stream that sessions share, then none."""

    __slots__ = ("_num_left", "_traceparent")

    def __init__(self, traceparent: str = "") -> None:
        self._traceparent = traceparent
        self._num_left = MAX_TRACED_MESSAGES if traceparent else 0

    def next(self) -> str:
        """Returns the `traceparent` for the next message; empty means none."""
        if not self._num_left:
            return ""
        self._num_left -= 1
        return self._traceparent


class Span:
    """A piece of work. This base class records nothing: it is the span of a process that does not trace."""

    __slots__ = ()
    is_recorded = False
    """True if attributes are kept; if not, those that take time to compute need not be set."""

    @property
    def metadata(self) -> Metadata:
        """gRPC metadata of the calls that are made in this span."""
        return ()

    @property
    def log_fields(self) -> Mapping[str, str]:
        """Fields for the log line that names the session."""
        return {}

    def trace_budget(self) -> TraceBudget:
        """Returns the budget of messages that carry this span's trace on streams that sessions share."""
        return TraceBudget()

    def child(self, name: str, kind: Kind = "internal", attributes: Attributes | None = None) -> Span:
        """Begins a span that is a part of this one."""
        return NO_SPAN

    def calling(self, method: str, address: str) -> Span:
        """Begins the span of a call that is made in this one.

        Args:
            method: Full name, such as "outrider.v1.VerifierService/Generate".
            address: HOST:PORT, or the path of a socket.
        """
        # Itself: the metadata of an unrecorded span must still reach the called service.
        return self

    def set_attributes(self, attributes: Attributes) -> None:
        """Sets attributes of the span."""

    def add_event(self, event: str, attributes: Attributes) -> None:
        """Adds an event that happens now."""

    def end(self, status: str = "", *, is_error: bool = False) -> None:
        """Ends the span; idempotent. `status`: name of a gRPC status, or of an error; empty means success."""

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
"""The tracer of this process. None means that it does not trace."""


class _Unrecorded(Span):
    """A span that is not recorded, and whose metadata tell the called services so."""

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

    def trace_budget(self) -> TraceBudget:
        return TraceBudget(dict(self.metadata).get("traceparent", ""))

    def child(self, name: str, kind: Kind = "internal", attributes: Attributes | None = None) -> Span:
        return self._tracer.begin(name, kind, attributes, self._tracer.context_of(self._span))

    def calling(self, method: str, address: str) -> Span:
        attributes = _call_attributes(method) | peer_attributes(address)
        return self._tracer.begin(method, "client", attributes, self._tracer.context_of(self._span), is_call=True)

    def set_attributes(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def add_event(self, event: str, attributes: Attributes) -> None:
        self._span.add_event(event, attributes)

    def end(self, status: str = "", *, is_error: bool = False) -> None:
        if self._is_over:
            return  # OpenTelemetry would log a warning at a second end
        self._is_over = True
        if self._is_call:
            self._span.set_attribute("rpc.response.status_code", status or "OK")
        if is_error:
            self._span.set_attribute("error.type", status)
            self._span.set_status(self._tracer.error)
        self._span.end()


class Tracer:
    """Begins spans of a process that traces, through the API of OpenTelemetry."""

    def __init__(self, tracer: trace.Tracer) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer, self._api = tracer, trace
        self._propagator = TraceContextTextMapPropagator()
        # Passed in place of None, which OpenTelemetry takes as the application's current context.
        self._empty_context = context.Context()
        self.error = trace.StatusCode.ERROR

    def begin(
        self, name: str, kind: Kind, attributes: Attributes | None, parent: Context | None, *, is_call: bool = False
    ) -> Span:
        """Begins a span. `parent`: None means the application's current context."""
        span = self._tracer.start_span(name, parent, self._api.SpanKind[kind.upper()], attributes)
        if span.is_recording():
            return _Recorded(self, span, is_call=is_call)
        # The metadata are passed on nevertheless: without them the next service would decide itself, and begin a trace.
        return _Unrecorded(self.metadata_of(span))

    def context_of(self, span: trace.Span) -> Context:
        """Returns the OpenTelemetry context of the work in a span."""
        return self._api.set_span_in_context(span, self._empty_context)

    def context_from_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> Context:
        """Returns the OpenTelemetry context of a caller. A malformed `traceparent` is ignored (W3C Trace Context)."""
        carrier = {key: value for key, value in metadata if key in ("traceparent", "tracestate")}
        # A later version may be longer than 55 characters, but a caller may send kilobytes.
        if len(carrier.get("traceparent", "")) > MAX_TRACEPARENT_LEN:
            return self._empty_context
        return self._propagator.extract(carrier, self._empty_context)

    @contextmanager
    def applied(self, span: Span) -> Iterator[None]:
        """Makes a span OpenTelemetry's current span while the body runs."""
        from opentelemetry import context

        token = context.attach(self.context_from_metadata(span.metadata))
        try:
            yield
        finally:
            context.detach(token)

    def is_sampled(self, parent: Context) -> bool:
        """Returns True if a context is in a recorded trace."""
        return self._api.get_current_span(parent).get_span_context().trace_flags.sampled

    def metadata_of(self, span: trace.Span) -> Metadata:
        """Returns the metadata that name a span to other services; empty for one that is in no trace."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self.context_of(span))
        return tuple(carrier.items())


class _Serving:
    """Makes a span the `current_span` while a call is served, and ends it with the status of the call."""

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
        # A token is valid only in the context in which it was made: gRPC serves a call from begin to end in one task.
        _current.reset(self._token)
        if not self._span.is_recorded:
            return
        status = "" if error is None else status_of(error)
        if error is None and self._context is not None:
            code = self._context.code()  # an error of the body has been turned into a status by now
            status = code.name if isinstance(code, grpc.StatusCode) else "OK"
        self._span.end(status, is_error=status in SERVER_ERRORS)


def current_span() -> Span:
    """Returns the span of the call that is being served."""
    return _current.get()


def traced_call(method: str, context: ServerContext) -> _Serving | Span:
    """Traces a call while the body runs: its span is a part of the caller's trace, or the first of a new one. Must
    enclose the code that turns errors into a status."""
    if _tracer is None:
        return NO_SPAN
    parent = _tracer.context_from_metadata(tuple(context.invocation_metadata() or ()))
    return _Serving(_tracer.begin(method, "server", _call_attributes(method), parent, is_call=True), context)


@contextmanager
def traced_request(name: str, traceparent: str) -> Iterator[Span]:
    """Traces a request that is not a gRPC call while the body runs: its span is a part of the caller's trace, or the
    first of a new one. Calls that the body makes with the SDK are parts of it."""
    if _tracer is None:
        yield NO_SPAN
        return
    parent = _tracer.context_from_metadata((("traceparent", traceparent),))
    with _tracer.begin(name, "server", None, parent) as span, _tracer.applied(span):
        yield span


def traced_message(method: str, traceparent: str) -> _Serving | Span:
    """Traces the work on one message of a stream that many share, if the message is part of a trace that is recorded.
    It never begins a trace."""
    span = message_span(method, traceparent)
    return _Serving(span, None) if span.is_recorded else span


def message_span(method: str, traceparent: str) -> Span:
    """Begins the span of work that a message of a shared stream starts, as `traced_message` does, without making it the
    current one: it may be ended in another task."""
    if not traceparent or _tracer is None:
        return NO_SPAN
    parent = _tracer.context_from_metadata((("traceparent", traceparent),))
    if not _tracer.is_sampled(parent):
        return NO_SPAN
    return _tracer.begin(method, "server", _call_attributes(method), parent)


def use_tracer(tracer: Tracer | None) -> None:
    """Sets the tracer of this process from now on. None means that it does not trace."""
    global _tracer
    _tracer = tracer


def application_tracer() -> Tracer | None:
    """Returns a tracer for the application in this process. None means that it does not use OpenTelemetry."""
    # Looked up, not imported: an application that traces has imported it.
    api = sys.modules.get("opentelemetry.trace")
    return None if api is None else Tracer(api.get_tracer("outrider"))


def operation_attributes(is_chat: bool) -> dict[str, str]:
    """Returns the attributes that say what a generation is, by the semantic conventions for generative AI."""
    return {"gen_ai.operation.name": "chat" if is_chat else "text_completion", "gen_ai.provider.name": "outrider"}


def peer_attributes(address: str) -> dict[str, str | int]:
    """Returns the attributes that name a peer. `address`: HOST:PORT, or the path of a socket."""
    host, _, port = address.rpartition(":")
    return (
        {"server.address": host.strip("[]"), "server.port": int(port)}
        if port.isdigit()
        else {"server.address": address}
    )


def status_of(error: BaseException) -> str:
    """Returns the name of the status or error that has ended a piece of work."""
    # `code` is a method of gRPC's errors and an attribute of our own; SystemExit has one too, which is not a status.
    code = getattr(error, "code", None)
    code = code() if callable(code) else code
    if isinstance(code, grpc.StatusCode):
        return str(code.name)
    return CANCELLED if isinstance(error, asyncio.CancelledError | GeneratorExit) else type(error).__name__


def _call_attributes(method: str) -> dict[str, str | int]:
    return {"rpc.system.name": "grpc", "rpc.method": method}
