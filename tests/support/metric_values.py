"""Metrics as plain numbers, for tests."""

from __future__ import annotations

from outrider.telemetry.metrics import HistogramMetric, Metrics

Values = dict[str, dict[str, float]]
"""Values by the metric's name and its label values, joined by commas ('' = none). A histogram has count and sum."""


def values_of(metrics: Metrics) -> Values:
    """The current values."""
    found: Values = {}
    for metric in metrics:
        if isinstance(metric, HistogramMetric):
            observed = metric.observed
            found[metric.name] = {"count": observed.num_observations, "sum": observed.total}
        else:
            found[metric.name] = {",".join(labels): value for labels, value in metric.values.items()}
    return found


def above_0(values: dict[str, float]) -> dict[str, float]:
    """The values that are not 0."""
    return {labels: value for labels, value in values.items() if value}
