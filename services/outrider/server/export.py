"""Exports the metrics and traces of a service: serves metrics to Prometheus, sends traces to a collector."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable

import structlog

from outrider.security.watched_files import unusable_flags
from outrider.server.settings import ProcessSettings
from outrider.telemetry.metrics import Metrics, MetricsServer, Read, counter, exposition, gauge, gauges
from outrider.telemetry.stderr import num_lines_dropped
from outrider.telemetry.tasks import task_metrics
from outrider.telemetry.tracing import Tracer, use_tracer
from outrider.version import __version__


class ServiceMetrics:
    """Serves the metrics of a service from its bind to its end, including loading and draining."""

    def __init__(self, read: Read, listen: str, is_serving: Callable[[], bool]) -> None:
        """
        Args:
            read: Yields the service's own metrics. Called in another thread.
            listen: HOST:PORT; empty means that no metrics are served.
            is_serving: Returns True if health answers SERVING.

        Raises:
            SystemExit: The address cannot be bound; the message names the flag.
        """
        self._is_serving = is_serving
        self._read = read
        self._server: MetricsServer | None = None
        if listen:
            try:
                self._server = MetricsServer(listen, self._all)
            except OSError as error:
                raise SystemExit(f"error: --metrics-listen: cannot bind {listen}: {error}") from error

    @property
    def address(self) -> str:
        """Address at which the metrics are served; empty means that they are not."""
        return "" if self._server is None else self._server.address

    def text(self) -> bytes:
        """Returns the metrics in Prometheus's format, for a service that serves them itself."""
        return exposition(self._all)

    def close(self) -> None:
        """Stops serving metrics; takes up to half a second."""
        if self._server is not None:
            self._server.close()

    def _all(self) -> Metrics:
        yield gauge(
            "outrider_serving", "Whether new calls are taken: 0 while the service loads and drains.", self._is_serving()
        )
        yield gauges(
            "outrider_files_unusable",
            "Whether the files of a flag (certificates, keys, tokens, credentials) have changed into what cannot be "
            "used: what was read before is used instead.",
            "flag",
            unusable_flags(),
        )
        yield counter(
            "outrider_log_lines_dropped_total",
            "Lines for stderr that were dropped, as it was full, closed or not read.",
            num_lines_dropped(),
        )
        yield from task_metrics()
        yield from self._read()


log = structlog.get_logger(__name__)

FLUSH_TIMEOUT_S = 2.0
"""Longest wait at the end of the process, for the last spans to be sent."""
COMPLAINT_S = 60.0
"""Seconds between two log lines about a collector that is away."""


class TraceExport:
    """Sends the spans of this process to a collector."""

    def __init__(self, service: str, endpoint: str | None, ratio: float | None) -> None:
        """Begins to record and to send.

        Args:
            service: Name of the service in its spans.
            endpoint: URL of an OTLP/gRPC collector. None means that OpenTelemetry's own variables name it.
            ratio: Recorded share of the traces that begin in this process, 0 to 1. None means what OTEL_TRACES_SAMPLER
                says, or all.

        Raises:
            ImportError: The packages of the extra `otel` are missing.
        """
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        _log_warnings_here()  # first: the library warns of a sampler that it does not know
        ours = {"service.name": service, "service.version": __version__, "service.instance.id": str(uuid.uuid4())}
        # Resource.create prefers its arguments to OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME. These are therefore
        # read here, too, and come last.
        resource = Resource.create({**ours, **OTELResourceDetector().detect().attributes})
        # No atexit handler: it would wait for a collector that is away without the time limit of `stop`.
        self._provider = TracerProvider(
            sampler=None if ratio is None else ParentBasedTraceIdRatio(ratio), resource=resource, shutdown_on_exit=False
        )
        self._exporter = OTLPSpanExporter(
            endpoint, insecure=None if endpoint is None else endpoint.startswith("http://")
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        use_tracer(Tracer(self._provider.get_tracer("outrider", __version__)))

    def stop(self) -> None:
        """Sends the remaining spans, within FLUSH_TIMEOUT_S. No span is begun from now on."""
        use_tracer(None)
        # `shutdown` alone would wait for half a minute. A daemon thread, so that the process can exit while it still
        # waits.
        flushing = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        flushing.start()
        flushing.join(FLUSH_TIMEOUT_S)
        if flushing.is_alive():
            log.warning("traces.not_sent", reason=f"the collector did not take them within {FLUSH_TIMEOUT_S:g} s")
            self._exporter.shutdown(timeout_millis=0)


class _RateLimitedWarnings(logging.Handler):
    """Logs the warnings of OpenTelemetry as structured lines, at most one per `COMPLAINT_S`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._logged_at = -COMPLAINT_S
        self._num_skipped = 0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now - self._logged_at < COMPLAINT_S:
            self._num_skipped += 1
            return
        log.warning("traces.trouble", reason=record.getMessage(), num_unsaid=self._num_skipped)
        self._logged_at, self._num_skipped = now, 0


def _log_warnings_here() -> None:
    # OpenTelemetry logs a warning for each failed export. With propagation each would also reach the root logger's
    # handlers.
    logger = logging.getLogger("opentelemetry")
    logger.handlers, logger.propagate = [_RateLimitedWarnings()], False


def start_traces(service: str, settings: ProcessSettings) -> TraceExport | None:
    """Records traces from now on, if the settings name a collector, or OpenTelemetry's own variables do. Flags come
    first; what the library reads by itself (OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_*) holds in
    both cases.

    Raises:
        SystemExit: The packages for it are missing; the message names the extra.
    """
    found, is_ours = os.environ.get, bool(settings.otlp_endpoint)
    if not (is_ours or found("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or found("OTEL_EXPORTER_OTLP_ENDPOINT")):
        return None
    if reason := _refusal(is_ours):
        log.warning("traces.not_sent", reason=reason)
        return None
    is_share_ours = "trace_ratio" in settings.model_fields_set or (is_ours and not found("OTEL_TRACES_SAMPLER"))
    try:
        return TraceExport(service, settings.otlp_endpoint or None, settings.trace_ratio if is_share_ours else None)
    except ImportError as error:
        needs = f"needs pip install -e '.[otel]' ({error})"
        if not is_ours:  # the variable is often set for all programs of a machine: run without traces
            log.warning("traces.not_sent", reason=f"OTEL_EXPORTER_OTLP_ENDPOINT: {needs}")
            return None
        raise SystemExit(f"error: --otlp-endpoint: {needs}") from error


def _refusal(is_ours: bool) -> str:
    """Returns why OpenTelemetry's variables forbid to send traces, or ask for what is not there; empty if they do not.

    Args:
        is_ours: True if a flag names the collector, which takes OTLP over gRPC.
    """
    found = os.environ.get
    if found("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return "OTEL_SDK_DISABLED is true"
    propagators = found("OTEL_PROPAGATORS", "tracecontext").split(",")
    if "tracecontext" not in map(str.strip, propagators):
        return f"OTEL_PROPAGATORS must include tracecontext, got {','.join(propagators)!r}"
    if is_ours:
        return ""
    exporter = found("OTEL_TRACES_EXPORTER") or "otlp"
    if exporter not in ("otlp", "otlp_proto_grpc"):
        return f"OTEL_TRACES_EXPORTER must be otlp, got {exporter!r}"
    protocol = found("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or found("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    return "" if protocol == "grpc" else f"OTEL_EXPORTER_OTLP_PROTOCOL must be grpc, got {protocol!r}"
