"""Measured numbers beside their targets, in sections: what a suite finds, and how results.json has it.

Pure: numbers in, values out. A number has one run for each repeat; its median is what counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import numpy as np

MET, MISSED = "met", "missed"
PLOTTED_PERCENTILES = (*range(1, 100), 99.5, 99.9)
"""What is kept of a distribution, for the pictures."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a number should be."""

    comparison: Literal["<=", ">="]
    value: float

    def is_met_by(self, value: float) -> bool:
        """Whether a value is as it should be; the limit itself is."""
        return value <= self.value if self.comparison == "<=" else value >= self.value


@dataclass(frozen=True, slots=True)
class Number:
    """Something measured."""

    name: str
    unit: str
    runs: tuple[float, ...]
    """One for each repeat; at least one."""
    target: Target | None = None
    """None = measured for comparison."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError(f"{self.name} was not measured")

    @property
    def median(self) -> float:
        """Over the runs."""
        return median(self.runs)

    @property
    def verdict(self) -> str:
        """MET or MISSED; nothing where there is no target."""
        if self.target is None:
            return ""
        return MET if self.target.is_met_by(self.median) else MISSED

    def to_json(self) -> dict[str, Any]:
        """As results.json has it."""
        target = self.target and {"comparison": self.target.comparison, "value": self.target.value}
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "runs": list(self.runs),
            "target": target,
            "verdict": self.verdict,
        }


@dataclass(slots=True)
class Section:
    """Numbers that belong together."""

    title: str
    numbers: list[Number] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """How they were measured, and what must be known to read them. Sentences."""
    distributions: dict[str, list[float]] = field(default_factory=dict)
    """Values at PLOTTED_PERCENTILES, in the unit of the section's numbers, by name."""
    curves: dict[str, list[list[float]]] = field(default_factory=dict)
    """[size, value] in a row, by name."""

    def to_json(self) -> dict[str, Any]:
        """As results.json has it."""
        return {
            "title": self.title,
            "numbers": [number.to_json() for number in self.numbers],
            "notes": self.notes,
            "distributions": self.distributions,
            "curves": self.curves,
        }


class Runs:
    """Values by name, as they come repeat by repeat; the names keep the order in which they came first."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        """One more run."""
        self._values.setdefault(name, []).append(value)

    def add_latencies(self, name: str, values: Sequence[float], *statistics: str) -> None:
        """The runs "NAME: p50" and so on, for each statistic: "p50", "p99", "max"."""
        for statistic in statistics:
            self.add(f"{name}: {statistic}", statistic_of(values, statistic))

    def numbers(self, unit: str, targets: Mapping[str, Target] | None = None) -> list[Number]:
        """All of them. Raises KeyError for a target of something that was not measured."""
        wanted = dict(targets or {})
        found = [Number(name, unit, tuple(runs), wanted.pop(name, None)) for name, runs in self._values.items()]
        if wanted:
            raise KeyError(f"not measured: {', '.join(wanted)}")
        return found


def statistic_of(values: Sequence[float], statistic: str) -> float:
    """The maximum for "max", a percentile for "p50", "p99", "p99.9"."""
    if statistic == "max":
        return float(max(values))
    return float(np.percentile(np.asarray(values, float), float(statistic.removeprefix("p"))))


def distribution_of(values: Sequence[float]) -> list[float]:
    """The values at PLOTTED_PERCENTILES."""
    return [float(value) for value in np.percentile(np.asarray(values, float), PLOTTED_PERCENTILES)]


def change_of(before: float, after: float) -> float:
    """How much more there is afterwards, in percent; negative = less."""
    return 100 * (after - before) / before


def lost_seconds(acknowledged: Sequence[tuple[float, int]], num_stored: int) -> float:
    """How far back the loss of a stream of records reaches: from the last acknowledgement that still holds to the last.

    Args:
        acknowledged: (time of the acknowledgement in seconds, tokens that were stored then), in order.
        num_stored: Tokens that are there afterwards.
    """
    kept = [when for when, num_tokens in acknowledged if num_tokens <= num_stored]
    if len(kept) == len(acknowledged):
        return 0.0
    return acknowledged[-1][0] - (kept[-1] if kept else acknowledged[0][0])


def counts_of(sections: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many targets were met and missed, from sections as results.json has them."""
    verdicts = [number["verdict"] for section in sections for number in section["numbers"]]
    return {verdict: verdicts.count(verdict) for verdict in (MET, MISSED)}
