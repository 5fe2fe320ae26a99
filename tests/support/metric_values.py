"""Metrics as plain numbers, for tests."""

from __future__ import annotations

from outrider.telemetry.metrics import HistogramMetric, Metrics

Values = dict[str, dict[str, float]]
"""By the name of the metric, by its labels' values with commas between; '' = it has none. A histogram's are count and
sum."""


def values_of(metrics: Metrics) -> Values:
    """As they are now."""
    found: Values = {}
    for metric in metrics:
        if isinstance(metric, HistogramMetric):
            observed = metric.observed
            found[metric.name] = {"count": observed.num_observations, "sum": observed.total}
        else:
            found[metric.name] = {",".join(labels): value for labels, value in metric.values.items()}
    return found


def above_0(values: dict[str, float]) -> dict[str, float]:
    """Without those that are 0."""
    return {labels: value for labels, value in values.items() if value}
