"""A service's numbers for Prometheus, over HTTP.

The services count for themselves; what they have counted is read when Prometheus asks. So nothing is counted twice, and
counting costs an addition.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from outrider.core.statistics import Histogram
from outrider.version import __version__

LabelValues = tuple[str, ...]
ONE: LabelValues = ()
"""The label values of a metric without labels."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A number, or one for each combination of the labels' values."""

    name: str
    """With `_total` for a counter, and with its unit."""
    description: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...] = ()
    """Names of the labels; none = one number."""
    values: Mapping[LabelValues, float] = field(default_factory=dict)
    """By the values of the labels, in their order."""


@dataclass(frozen=True, slots=True)
class HistogramMetric:
    """How many observations there were of each size."""

    name: str
    description: str
    observed: Histogram


Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Metrics = Iterable[Metric | HistogramMetric]
Read = Callable[[], Metrics]


def counter(name: str, description: str, value: float) -> Metric:
    """A number that only grows."""
    return Metric(name, description, "counter", values={ONE: value})


def counters(name: str, description: str, label: str, values: Mapping[str, float]) -> Metric:
    """One such number for each value of a label."""
    return Metric(name, description, "counter", (label,), {(value,): number for value, number in values.items()})


def gauge(name: str, description: str, value: float) -> Metric:
    """A number as it is now."""
    return Metric(name, description, "gauge", values={ONE: value})


def gauges(name: str, description: str, label: str, values: Mapping[str, float]) -> Metric:
    """One such number for each value of a label."""
    return Metric(name, description, "gauge", (label,), {(value,): number for value, number in values.items()})


def build_info(component: str, **about: str) -> Metric:
    """What runs here. `about` are further labels, as the model."""
    # Not "service": Prometheus says by that of which Kubernetes service a target is.
    labels, values = ("component", "version", *about), (component, __version__, *about.values())
    return Metric("outrider_build_info", "What runs here, in the labels; always 1.", "gauge", labels, {values: 1.0})


class MetricsServer:
    """Serves what `read` returns, and what is known of the process. `read` is called in another thread."""

    def __init__(self, listen: str, read: Read) -> None:
        """Listens on HOST:PORT; port 0 = any free port. Raises OSError."""
        registry = CollectorRegistry()
        registry.register(_Collector(read))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        host, _, port = listen.rpartition(":")
        self._server: WSGIServer
        self._thread: threading.Thread
        self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Ends it; takes up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collector(Collector):
    def __init__(self, read: Read) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        for metric in self._read():
            yield _family(metric)


def _family(metric: Metric | HistogramMetric) -> Family:
    if isinstance(metric, HistogramMetric):
        observed, buckets, so_far = metric.observed, [], 0
        for bound, count in zip((*map(str, observed.bounds), "+Inf"), list(observed.counts), strict=True):
            so_far += count
            buckets.append((bound, float(so_far)))
        return HistogramMetricFamily(metric.name, metric.description, buckets=buckets, sum_value=observed.total)
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily
    family = kind(metric.name, metric.description, labels=metric.labels)
    for values, number in metric.values.items():
        family.add_metric(values, number)
    return family
