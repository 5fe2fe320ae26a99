"""A service's numbers for Prometheus, over HTTP.

The services count for themselves; what they have counted is read when Prometheus asks. So nothing is counted twice, and
counting costs an addition.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class Metric:
    """A number, or one for each value of a label."""

    name: str
    """With `_total` for a counter, and with its unit."""
    description: str
    kind: Literal["counter", "gauge"]
    label: str = ""
    """Name of the label; empty = one number."""
    values: Mapping[str, float] = field(default_factory=dict)
    """By value of the label; that of one number is ''."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many observations there were of each size."""

    name: str
    description: str
    bounds: Sequence[float]
    """Upper bounds, ascending."""
    counts: Sequence[int]
    """Observations up to each bound that are beyond the one before; the last number is of those beyond all bounds."""
    total: float
    """Sum of all observations."""


Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Read = Callable[[], Iterable[Metric | Histogram]]


class MetricsServer:
    """Serves what `read` returns. `read` is called in another thread."""

    def __init__(self, listen: str, read: Read) -> None:
        """Listens on HOST:PORT; port 0 = any free port. Raises OSError."""
        registry = CollectorRegistry()
        registry.register(_Collector(read))
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


def _family(metric: Metric | Histogram) -> Family:
    if isinstance(metric, Histogram):
        buckets, so_far = [], 0
        for bound, count in zip((*map(str, metric.bounds), "+Inf"), metric.counts, strict=True):
            so_far += count
            buckets.append((bound, float(so_far)))
        return HistogramMetricFamily(metric.name, metric.description, buckets=buckets, sum_value=metric.total)
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily
    family = kind(metric.name, metric.description, labels=[metric.label] if metric.label else [])
    for label, value in metric.values.items():
        family.add_metric([label] if metric.label else [], value)
    return family
