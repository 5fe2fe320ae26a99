"""A service's numbers for Prometheus, over HTTP.

The services keep their own counts, which are read when Prometheus asks. Nothing is counted twice, and counting costs an
addition.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from outrider.core.statistics import Histogram
from outrider.version import __version__

LabelValues = tuple[str, ...]
ONE: LabelValues = ()
"""The label values of a metric without labels."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Holds a number, or one for each combination of the labels' values."""

    name: str
    """Full name, with the unit, and with `_total` for a counter."""
    description: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...] = ()
    """Names of the labels. Empty means one number without labels."""
    values: Mapping[LabelValues, float] = field(default_factory=dict)
    """Numbers by the values of the labels, in their order."""


@dataclass(frozen=True, slots=True)
class HistogramMetric:
    """Holds observations by size."""

    name: str
    description: str
    observed: Histogram


Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Metrics = Iterable[Metric | HistogramMetric]
Read = Callable[[], Metrics]


def counter(name: str, description: str, value: float) -> Metric:
    """Returns a metric of one number that only grows."""
    return Metric(name, description, "counter", values={ONE: value})


def counters(name: str, description: str, label: str, values: Mapping[str, float]) -> Metric:
    """Returns a metric of one number that only grows for each value of a label."""
    return Metric(name, description, "counter", (label,), {(value,): number for value, number in values.items()})


def gauge(name: str, description: str, value: float) -> Metric:
    """Returns a metric of one current number."""
    return Metric(name, description, "gauge", values={ONE: value})


def gauges(name: str, description: str, label: str, values: Mapping[str, float]) -> Metric:
    """Returns a metric of one current number for each value of a label."""
    return Metric(name, description, "gauge", (label,), {(value,): number for value, number in values.items()})


def build_info(component: str, **about: str) -> Metric:
    """Returns the metric that describes the process. `about` are further labels, such as the model."""
    # Not "service": with it Prometheus names the Kubernetes service of a target.
    labels, values = ("component", "version", *about), (component, __version__, *about.values())
    return Metric("outrider_build_info", "What runs here, in the labels; always 1.", "gauge", labels, {values: 1.0})


class MetricsServer:
    """Serves the metrics that `read` returns, and those of the process. `read` is called in another thread."""

    def __init__(self, listen: str, read: Read) -> None:
        """Listens on HOST:PORT; port 0 means any free port. Raises OSError."""
        registry = _registry(read)
        host, _, port = listen.rpartition(":")
        self._server: WSGIServer
        self._thread: threading.Thread
        # The brackets of an IPv6 address belong to HOST:PORT; a socket takes the address without them.
        self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stops serving; takes up to half a second."""
        # Returns after the poll interval of serve_forever, 0.5 s, and leaves the listening socket open.
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def exposition(read: Read) -> bytes:
    """Returns the metrics that `read` returns, and those of the process, in Prometheus's format."""
    return generate_latest(_registry(read))


_guests: list[Collector] = []
"""What `register` has added: at most one."""


def register(read: Read) -> None:
    """Adds the metrics that `read` returns to those of the process that this code is a guest of: to the registry of
    prometheus_client, which is global. They replace those that were added before."""
    while _guests:
        REGISTRY.unregister(_guests.pop())
    _guests.append(_Collector(read))
    REGISTRY.register(_guests[-1])


def _registry(read: Read) -> CollectorRegistry:
    # Not the registry of prometheus_client, which is global: a process may run several services.
    registry = CollectorRegistry()
    registry.register(_Collector(read))
    # Only the global registry has these two by default.
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


class _Collector(Collector):
    def __init__(self, read: Read) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        for metric in self._read():
            yield _family(metric)


def _family(metric: Metric | HistogramMetric) -> Family:
    if isinstance(metric, HistogramMetric):
        # Buckets of Prometheus are cumulative, ours are not. Their last one is the number of observations, so the
        # counts are copied once: the event loop may add to them meanwhile.
        observed, buckets, so_far = metric.observed, [], 0
        for bound, count in zip((*map(str, observed.bounds), "+Inf"), list(observed.counts), strict=True):
            so_far += count
            buckets.append((bound, float(so_far)))
        return HistogramMetricFamily(metric.name, metric.description, buckets=buckets, sum_value=observed.total)
    # CounterMetricFamily takes `_total` off the name, and puts it back on the sample.
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily
    family = kind(metric.name, metric.description, labels=metric.labels)
    for values, number in metric.values.items():
        family.add_metric(values, number)
    return family
