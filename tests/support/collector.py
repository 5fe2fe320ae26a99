"""An in-memory trace collector for tests: real OTLP over gRPC."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2

WAIT_S = 20.0
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
"""Environment of services whose spans come without much delay, in milliseconds."""


@dataclass(frozen=True)
class Seen:
    """A span that was received."""

    service: str
    resource: dict[str, Any]
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    events: tuple[str, ...]
    is_error: bool
    raw: bytes
    """The whole span, as it was sent."""


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Accepts all spans."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self._changed = threading.Condition()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._changed:
            self.spans += _seen_in(request)
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait(self, condition: Callable[[list[Seen]], object]) -> list[Seen]:
        """Waits until the condition holds for all spans so far, and returns them."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.spans), WAIT_S), [span.name for span in self.spans]
            return list(self.spans)

    def trace(self, trace_id: str, *wanted: str | tuple[str, int], is_whole: bool = False) -> list[Seen]:
        """Waits until the trace has a span of each wanted name, or name and kind, as often as it is wanted; if
        `is_whole`, also the parents of all its spans. Returns its spans, in no order."""

        def is_there(seen: list[Seen]) -> bool:
            spans = [span for span in seen if span.trace_id == trace_id]
            names, kinds = Counter(span.name for span in spans), Counter((span.name, span.kind) for span in spans)
            # A span ends before its parent, and may be exported long before it.
            are_parents_there = {span.parent_id for span in spans if span.parent_id} <= {span.span_id for span in spans}
            return (are_parents_there or not is_whole) and all(
                (names[each] if isinstance(each, str) else kinds[each]) >= count
                for each, count in Counter(wanted).items()
            )

        return [span for span in self.wait(is_there) if span.trace_id == trace_id]


@contextmanager
def running_collector() -> Iterator[tuple[Collector, str]]:
    """A collector, and its URL."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def _seen_in(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterator[Seen]:
    for part in request.resource_spans:
        resource = {each.key: _value_of(each.value) for each in part.resource.attributes}
        for span in (span for scope in part.scope_spans for span in scope.spans):
            yield Seen(
                service=resource["service.name"],
                resource=resource,
                name=span.name,
                kind=span.kind,
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                attributes={each.key: _value_of(each.value) for each in span.attributes},
                events=tuple(event.name for event in span.events),
                is_error=span.status.code == span.status.STATUS_CODE_ERROR,
                raw=span.SerializeToString(),
            )


def _value_of(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value_of(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None
