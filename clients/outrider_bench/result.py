"""The one type of what a suite finds: a `Measurement` beside its target, and what of it results.json keeps.

Pure: numbers in, values out. A measurement has a value for each repeat; their median is what counts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

FORMAT_VERSION = 2
"""The format of results.json. Version 1 had `numbers` of sections apart from `claims`, with other names of fields."""
MET, MISSED, INCONCLUSIVE, NOT_MEASURED = "met", "missed", "inconclusive", "not measured"
PLOTTED_PERCENTILES = (*range(1, 100), 99.5, 99.9)
"""Percentiles of a distribution that are kept, for the pictures."""
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}


@dataclass(frozen=True, slots=True)
class Target:
    """Says how a value should compare with a limit."""

    comparison: str
    """One of >=, >, <=, <."""
    value: float | None
    """None means that the limit itself depends on something that was not measured."""

    def is_met_by(self, value: float) -> bool:
        """Compare a value with the limit, which must be known."""
        assert self.value is not None
        return _COMPARISONS[self.comparison](value, self.value)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Holds something measured, and what it should be."""

    name: str
    unit: str = ""
    values: tuple[float, ...] = ()
    """One for each repeat; empty means that it was not measured."""
    target: Target | None = None
    """None means that it was measured for comparison."""
    remark: str = ""
    part: str = ""
    """The part of the suite that it belongs to, where that has claims of several parts."""
    paper: str = ""
    """The figure of the paper that claims the same, with its place there; empty where papers are not spoken of."""
    interval: tuple[float, float] | None = None
    """The value lies between these two with 95 % confidence; None means that it was not estimated."""

    @property
    def value(self) -> float | None:
        """The median over the repeats."""
        return median(self.values) if self.values else None

    @property
    def verdict(self) -> str:
        """MET, MISSED, INCONCLUSIVE or NOT_MEASURED; empty where there is a value but no target.

        A claim is inconclusive where the limit lies within the interval: other prompts might have decided otherwise.
        """
        value = self.value
        if value is None or (self.target is not None and self.target.value is None):
            return NOT_MEASURED
        if self.target is None:
            return ""
        if self.interval is not None and self.target.value is not None:
            low, high = self.interval
            if low <= self.target.value <= high:
                return INCONCLUSIVE
        return MET if self.target.is_met_by(value) else MISSED

    def to_json(self) -> dict[str, Any]:
        """Return the object that results.json keeps."""
        target = self.target and {"comparison": self.target.comparison, "value": self.target.value}
        return {
            "part": self.part,
            "name": self.name,
            "unit": self.unit,
            "value": self.value,
            "values": list(self.values),
            "target": target,
            "verdict": self.verdict,
            "interval": None if self.interval is None else list(self.interval),
            "paper": self.paper,
            "remark": self.remark,
        }


def claim(
    part: str,
    name: str,
    value: float | None,
    comparison: str,
    limit: float | None,
    remark: str = "",
    paper: str = "",
) -> Measurement:
    """Hold one value against a limit. None means that the value, or what the limit depends on, was not measured."""
    values = () if value is None else (value,)
    return Measurement(name, "", values, Target(comparison, limit), remark, part, paper)


def at_least(
    part: str, name: str, value: float | None, limit: float | None, remark: str = "", paper: str = ""
) -> Measurement:
    """Claim that a value reaches a limit."""
    return claim(part, name, value, ">=", limit, remark, paper)


def at_most(
    part: str, name: str, value: float | None, limit: float | None, remark: str = "", paper: str = ""
) -> Measurement:
    """Claim that a value does not exceed a limit."""
    return claim(part, name, value, "<=", limit, remark, paper)


def above(
    part: str, name: str, value: float | None, limit: float | None, remark: str = "", paper: str = ""
) -> Measurement:
    """Claim that a value exceeds a limit."""
    return claim(part, name, value, ">", limit, remark, paper)


def reported(part: str, name: str, value: float | None, remark: str = "", paper: str = "") -> Measurement:
    """Report a value that nothing is claimed about."""
    return Measurement(name, "", () if value is None else (value,), None, remark, part, paper)


@dataclass(slots=True)
class Section:
    """Holds measurements that belong together."""

    title: str
    measurements: list[Measurement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences: how they were measured, and what must be known to read them."""
    distributions: dict[str, list[float]] = field(default_factory=dict)
    """Values at PLOTTED_PERCENTILES, in the unit of the section's measurements, by name."""
    curves: dict[str, list[list[float]]] = field(default_factory=dict)
    """[size, value] in a row, by name."""

    def to_json(self) -> dict[str, Any]:
        """Return the object that results.json keeps."""
        return {
            "title": self.title,
            "measurements": [one.to_json() for one in self.measurements],
            "notes": self.notes,
            "distributions": self.distributions,
            "curves": self.curves,
        }


class Runs:
    """Collects values by name, repeat by repeat; the names keep the order in which they came first."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        """Add the value of one more repeat."""
        self._values.setdefault(name, []).append(value)

    def add_latencies(self, name: str, values: Sequence[float], *statistics: str) -> None:
        """Add a value "NAME: p50" and so on, for each statistic: "p50", "p99", "max"."""
        for statistic in statistics:
            self.add(f"{name}: {statistic}", statistic_of(values, statistic))

    def measurements(self, unit: str, targets: Mapping[str, Target] | None = None) -> list[Measurement]:
        """Return a measurement for each name. Raises KeyError for a target of something that was not measured."""
        missing = dict(targets or {})  # a target that no name takes is a typing error, not a result
        found = [Measurement(name, unit, tuple(runs), missing.pop(name, None)) for name, runs in self._values.items()]
        if missing:
            raise KeyError(f"not measured: {', '.join(missing)}")
        return found


def statistic_of(values: Sequence[float], statistic: str) -> float:
    """Return the maximum for "max", a percentile for "p50", "p99", "p99.9"."""
    if statistic == "max":
        return float(max(values))
    return float(np.percentile(np.asarray(values, float), float(statistic.removeprefix("p"))))


def distribution_of(values: Sequence[float]) -> list[float]:
    """Return the values at PLOTTED_PERCENTILES."""
    return [float(value) for value in np.percentile(np.asarray(values, float), PLOTTED_PERCENTILES)]


def change_of(before: float, after: float) -> float:
    """Return the growth in percent; negative means that it became less."""
    return 100 * (after - before) / before


def lost_seconds(acknowledged: Sequence[tuple[float, int]], num_stored: int) -> float:
    """Return how far back the loss of a stream of records reaches.

    That is the time from the last acknowledgement that still holds to the last one.

    Args:
        acknowledged: (time of the acknowledgement in seconds, tokens that were stored then), in order.
        num_stored: Tokens that are stored afterwards.
    """
    kept = [when for when, num_tokens in acknowledged if num_tokens <= num_stored]
    if len(kept) == len(acknowledged):
        return 0.0
    # If nothing is left, the loss reaches back to the first acknowledgement.
    return acknowledged[-1][0] - (kept[-1] if kept else acknowledged[0][0])


def share_of(value: float | None, whole: float | None) -> float | None:
    """Divide one value by another; None where one of them is missing, or the second is zero."""
    return value / whole if value is not None and whole else None


def counts_of(measurements: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count verdicts of measurements that come from results.json."""
    verdicts = [one["verdict"] for one in measurements]
    return {verdict: verdicts.count(verdict) for verdict in (MET, MISSED, INCONCLUSIVE, NOT_MEASURED)}
