"""The metrics of a service as it runs: where they are served, and what holds for all services."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable

import structlog

from outrider.security.watched_files import unusable_flags
from outrider.server.settings import ServiceSettings
from outrider.telemetry.metrics import Metrics, MetricsServer, Read, gauge, gauges
from outrider.telemetry.tracing import Tracer, use_tracer
from outrider.version import __version__


class ServiceMetrics:
    """Served from the beginning to the end of the process, also while the service loads and drains."""

    def __init__(self, read: Read, listen: str, is_serving: Callable[[], bool]) -> None:
        """`read` is what the service itself says, `is_serving` what health does; `listen` is HOST:PORT, empty =
        nowhere. Raises SystemExit, naming the flag."""
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
        """Where they are served; empty = nowhere."""
        return "" if self._server is None else self._server.address

    def close(self) -> None:
        """Ends it; takes up to half a second."""
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
        yield from self._read()


log = structlog.get_logger(__name__)

FLUSH_TIMEOUT_S = 2.0
"""At the end of the process, for the last spans."""
COMPLAINT_S = 60.0
"""Between two lines of the log about a collector that is away."""


class TraceExport:
    """The spans of this process on their way out."""

    def __init__(self, service: str, endpoint: str, ratio: float) -> None:
        """`endpoint`: URL of an OTLP/gRPC collector; `ratio`: share recorded of the traces that begin here. Raises
        ImportError without the packages of the extra `otel`."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        ours = {"service.name": service, "service.version": __version__, "service.instance.id": str(uuid.uuid4())}
        resource = Resource.create({**ours, **OTELResourceDetector().detect().attributes})
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(ratio), resource=resource, shutdown_on_exit=False
        )
        self._exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        _complain_here()
        use_tracer(Tracer(self._provider.get_tracer("outrider", __version__)))

    def stop(self) -> None:
        """Sends what is left, within FLUSH_TIMEOUT_S. No span is begun from here on."""
        use_tracer(None)
        # Of its own accord it would wait for half a minute.
        flushing = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        flushing.start()
        flushing.join(FLUSH_TIMEOUT_S)
        if flushing.is_alive():
            log.warning("traces.not_sent", reason=f"the collector did not take them within {FLUSH_TIMEOUT_S:g} s")
            self._exporter.shutdown(timeout_millis=0)


class _Complaints(logging.Handler):
    """What OpenTelemetry has to say about itself, as a line of ours, and not too often."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said_at = -COMPLAINT_S
        self._num_unsaid = 0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now - self._said_at < COMPLAINT_S:
            self._num_unsaid += 1
            return
        log.warning("traces.trouble", reason=record.getMessage(), num_unsaid=self._num_unsaid)
        self._said_at, self._num_unsaid = now, 0


def _complain_here() -> None:
    logger = logging.getLogger("opentelemetry")
    logger.handlers, logger.propagate = [_Complaints()], False


def start_traces(service: str, settings: ServiceSettings) -> TraceExport | None:
    """Records from now on, if the settings say so. Ends the process where the packages for it are missing."""
    if not settings.otlp_endpoint:
        return None
    try:
        return TraceExport(service, settings.otlp_endpoint, settings.trace_ratio)
    except ImportError as error:
        raise SystemExit(f"error: --otlp-endpoint: needs pip install outrider[otel] ({error})") from error
