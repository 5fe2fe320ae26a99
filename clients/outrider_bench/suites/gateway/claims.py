"""Claims about the gateway: what HTTP costs, in pairs of turns: the machine changes more than what is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from outrider_bench.result import Measurement, Section, Target
from outrider_bench.suites.gateway.doors import GRPC, HTTP
from outrider_bench.suites.gateway.experiments import DOORS, Turn

LEAST_SPEED = 0.97
"""Tokens a second through the gateway by those over gRPC."""
MOST_EVENT_US = 15.0
"""CPU time that an event of HTTP takes beyond the SDK, which reads the verifier's message."""
MOST_FIRST_MS = 2.0
"""Time by which the first text comes later."""
MOST_LEAVING_MS = 100.0
"""Time until the session of a closed connection is gone."""


@dataclass(slots=True)
class GatewayEvidence:
    """Holds all that was measured."""

    turns: dict[tuple[str, int], list[Mapping[str, Turn]]] = field(default_factory=dict)
    """Pairs of turns by door, by method and number of streams."""
    firsts_ms: list[Mapping[str, float]] = field(default_factory=list)
    """Pairs of times to the first text by door."""
    leavings_ms: list[float] = field(default_factory=list)
    floods_us: Sequence[Mapping[str, float]] = ()
    """Pairs of CPU times for an event of a stream as fast as it goes."""


def sections_of(evidence: GatewayEvidence) -> list[Section]:
    """Return what was measured, as far as it is known."""
    sections = [
        _speed(method, {count: pairs for (of, count), pairs in evidence.turns.items() if of == method})
        for method in dict.fromkeys(method for method, _ in evidence.turns)
    ]
    sections += [_flood(evidence.floods_us), _latency(evidence)]
    return [section for section in sections if section.measurements]


def _speed(method: str, turns: Mapping[int, Sequence[Mapping[str, Turn]]]) -> Section:
    section = Section(f"Speed, method {method}")
    for count, pairs in turns.items():
        streams = f"{count} stream{'s' if count > 1 else ''}"
        for door in DOORS:
            speeds = tuple(pair[door].tokens_per_s for pair in pairs)
            section.measurements.append(Measurement(f"{streams}, {door}", "tokens/s", speeds))
        ratios = tuple(pair[HTTP].tokens_per_s / pair[GRPC].tokens_per_s for pair in pairs)
        section.measurements.append(Measurement(f"{streams}: HTTP by gRPC", "", ratios, Target(">=", LEAST_SPEED)))
        times = tuple(pair[HTTP].cpu_us_per_event for pair in pairs)
        section.measurements.append(Measurement(f"{streams}: CPU of the gateway an event", "us", times))
    num_same, num_texts = _same_texts(turns)
    section.notes = [
        "A ratio is that of two turns, one behind the other, on the same prompts and seeds.",
        f"{num_same} of {num_texts} texts are the same through both doors.",
    ]
    return section


def _same_texts(turns: Mapping[int, Sequence[Mapping[str, Turn]]]) -> tuple[int, int]:
    pairs = [
        (http, grpc)
        for of_count in turns.values()
        for pair in of_count
        for http, grpc in zip(pair[HTTP].texts, pair[GRPC].texts, strict=True)
    ]
    return sum(http == grpc for http, grpc in pairs), len(pairs)


def _flood(pairs: Sequence[Mapping[str, float]]) -> Section:
    section = Section("A stream as fast as it goes")
    if pairs:
        http, grpc = (tuple(pair[door] for pair in pairs) for door in (HTTP, GRPC))
        more = tuple(one - other for one, other in zip(http, grpc, strict=True))
        section.measurements = [
            Measurement("CPU of the gateway an event", "us", http),
            Measurement("CPU of an application with the SDK a chunk", "us", grpc),
            Measurement("CPU that HTTP takes beyond the SDK", "us", more, Target("<=", MOST_EVENT_US)),
        ]
        section.notes = ["The gateway stands on the same SDK: the difference is what HTTP takes."]
    return section


def _latency(evidence: GatewayEvidence) -> Section:
    section = Section("Beginning and end")
    if evidence.firsts_ms:
        for door in DOORS:
            times = tuple(pair[door] for pair in evidence.firsts_ms)
            section.measurements.append(Measurement(f"first text, {door}", "ms", times))
        # The medians are compared: a single request waits for a step that has begun, or does not.
        later = median(pair[HTTP] for pair in evidence.firsts_ms) - median(pair[GRPC] for pair in evidence.firsts_ms)
        section.measurements.append(
            Measurement("first text over HTTP, later by", "ms", (later,), Target("<=", MOST_FIRST_MS))
        )
    if evidence.leavings_ms:
        section.measurements.append(
            Measurement(
                "a closed connection frees its session within",
                "ms",
                tuple(evidence.leavings_ms),
                Target("<=", MOST_LEAVING_MS),
            )
        )
    return section
