"""Claims about metrics and traces: pairs of turns, since the machine changes more than what is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider_bench.result import Measurement, Section, change_of, statistic_of
from outrider_bench.suites.observability.experiments import CPU_TIME, METHODS, NOTHING, SPEED, TARGETS, VARIANTS

SLOWER = ": slower by"

Round = Mapping[str, Mapping[str, float]]
"""Values of the turns of a round: SPEED and CPU_TIME by variant."""


def sections_of(rounds: Mapping[str, Sequence[Round]]) -> list[Section]:
    """Return the numbers, as far as they are known. `rounds`: by method."""
    return [_section(method, rounds[method]) for method in METHODS if rounds.get(method)]


def _section(method: str, rounds: Sequence[Round]) -> Section:
    section = Section(f"Method {method}")
    for unit in (SPEED, CPU_TIME):
        section.measurements.append(Measurement(NOTHING, unit, tuple(turns[NOTHING][unit] for turns in rounds)))
    for variant in VARIANTS[1:]:
        pairs = [(turns[NOTHING], turns[variant]) for turns in rounds]
        losses = tuple(-change_of(nothing[SPEED], turn[SPEED]) for nothing, turn in pairs)
        more = tuple(change_of(nothing[CPU_TIME], turn[CPU_TIME]) for nothing, turn in pairs)
        section.measurements.append(Measurement(f"{variant}{SLOWER}", "%", losses, TARGETS.get(variant)))
        section.measurements.append(Measurement(f"{variant}: more CPU time by", "%", more))
    section.notes = [
        "A loss is that of a turn against the turn with nothing in the same round, of the same services; the medians "
        "over the rounds count, and the quartiles say how far rounds lie apart. What equals lose is noise."
    ]
    return section


def quartiles_of(measurement: Mapping[str, Any]) -> tuple[float, float]:
    """Return the quartiles of a measurement's values."""
    return statistic_of(measurement["values"], "p25"), statistic_of(measurement["values"], "p75")
