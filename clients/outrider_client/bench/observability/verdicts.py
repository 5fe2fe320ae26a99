"""What was measured, beside what is asked for: pairs of turns, since the machine changes more than what is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider_client.bench.numbers import Number, Section, change_of, statistic_of
from outrider_client.bench.observability.plan import METHODS, NOTHING, TARGETS, VARIANTS

Rounds = Mapping[str, Sequence[Mapping[str, float]]]
"""By method: what each round has measured, tokens a second by variant."""


def sections_of(rounds: Rounds) -> list[Section]:
    """The numbers, as far as they are known."""
    return [_section(method, rounds[method]) for method in METHODS if rounds.get(method)]


def _section(method: str, rounds: Sequence[Mapping[str, float]]) -> Section:
    section = Section(f"Speed of method {method}")
    for variant in VARIANTS:
        if speeds := tuple(speed[variant] for speed in rounds if variant in speed):
            section.numbers.append(Number(f"{variant}: speed", "tokens/s", speeds))
    for variant in VARIANTS[1:]:
        if losses := tuple(-change_of(speed[NOTHING], speed[variant]) for speed in rounds if variant in speed):
            section.numbers.append(Number(f"{variant}: slower by", "%", losses, TARGETS.get(variant)))
    section.notes = [
        "A loss is that of a turn against the turn of the services with nothing in the same round; the medians over "
        "the rounds count, and the quartiles say how far rounds lie apart. What equals lose to each other is noise."
    ]
    return section


def quartiles_of(number: Mapping[str, Any]) -> tuple[float, float]:
    """Of the runs of a number as results.json has it."""
    return statistic_of(number["runs"], "p25"), statistic_of(number["runs"], "p75")
