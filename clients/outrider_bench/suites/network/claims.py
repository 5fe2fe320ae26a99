"""The claims of each part, from what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider_bench.experiment import OFF, Experiment, label_of
from outrider_bench.measured import Measured
from outrider_bench.result import Measurement, at_least, at_most, reported
from outrider_bench.suites.network.bound import Bound
from outrider_bench.suites.network.experiments import EDGE, SAMPLED_METHODS, WAN, WAN_METHODS, WAN_TEXTS, WIDE, rtt_name
from outrider_bench.suites.network.traffic import TrafficCount

AUTO_KEEPS = {10.0: 0.9, 40.0: 0.7, 100.0: 0.45}
"""Shares of its greedy speed without a round trip that auto should keep, by round trip in milliseconds."""
SAMPLED_RTT_MS, SAMPLED_KEEPS = 40.0, 0.6
"""Round trip, and the share of its speed without one that auto should keep there, at temperature 1."""
BYTES_PER_ACCEPTED = {"pearl": 120.0, label_of(WIDE): 1000.0}
"""Bytes for an accepted token at temperature 0, by method."""
BYTES_PER_ROUND = 4000.0
"""Bytes of a round at temperature 1."""
WAN_SPEEDUP = 1.5
EDGE_SPEEDUP = 2.5


@dataclass(frozen=True, slots=True)
class NetworkEvidence:
    """All that was measured."""

    measured: Measured
    experiments: Sequence[Experiment]
    traffic: TrafficCount = field(default_factory=TrafficCount)
    bounds: Mapping[float, Bound] = field(default_factory=dict)
    """Bounds by temperature."""

    def of(self, part: str) -> list[Experiment]:
        """List the experiments of a part."""
        return [experiment for experiment in self.experiments if experiment.part == part]


def claims_of(parts: Sequence[str], evidence: NetworkEvidence) -> list[Measurement]:
    """Return the claims of these parts."""
    return [one for part in parts for one in _CLAIMS[part](evidence)]


def _round_trips(evidence: NetworkEvidence) -> list[Measurement]:
    measured, part = evidence.measured, "rtt"
    claims = [
        at_least(
            part,
            f"T = 0: auto at {rtt_ms:g} ms by itself at 0",
            measured.kept(rtt_name(rtt_ms, 0.0), rtt_name(0.0, 0.0), "auto", 0.0),
            limit,
        )
        for rtt_ms, limit in AUTO_KEEPS.items()
    ]
    for experiment in evidence.of(part):
        (temperature,) = experiment.temperatures
        speedup = measured.speedup(experiment.name, "auto", temperature)
        claims.append(at_least(part, f"T = {temperature:g}: auto by off at {experiment.rtt_ms:g} ms", speedup, 1.0))
    for method in SAMPLED_METHODS:
        kept = measured.kept(rtt_name(SAMPLED_RTT_MS, 1.0), rtt_name(0.0, 1.0), method, 1.0)
        claims.append(at_least(part, f"T = 1: {method} at {SAMPLED_RTT_MS:g} ms by itself at 0", kept, SAMPLED_KEEPS))
    return claims


def _simulation(evidence: NetworkEvidence) -> list[Measurement]:
    """Measured shares by simulated ones: how much of what could be kept is kept."""
    claims = []
    for temperature, bound in evidence.bounds.items():
        for rtt_ms in bound.tokens_per_s:
            could = bound.kept(rtt_ms)
            # Shares are of the speed at 0 ms, where they are 1 by definition.
            if not rtt_ms or not could:
                continue
            kept = evidence.measured.kept(
                rtt_name(rtt_ms, temperature), rtt_name(0.0, temperature), "best-first", temperature
            )
            what = f"T = {temperature:g}: best-first's share at {rtt_ms:g} ms by the simulated one"
            remark = f"measured {kept:.2f}, simulated {could:.2f}" if kept is not None else f"simulated {could:.2f}"
            claims.append(reported("simulation", what, None if kept is None else kept / could, remark))
    return claims


def _traffic(evidence: NetworkEvidence) -> list[Measurement]:
    part, claims = "bytes", list[Measurement]()
    for label, limit in BYTES_PER_ACCEPTED.items():
        traffic = evidence.traffic.of(label, 0.0)
        measured = traffic.per_accepted if traffic is not None else None
        claims.append(at_most(part, f"T = 0: bytes for each accepted token of {label}", measured, limit))
    for experiment in evidence.of(part):
        if experiment.temperatures == (1.0,):
            for label in map(label_of, experiment.contenders):
                traffic = evidence.traffic.of(label, 1.0)
                measured = traffic.per_round if traffic is not None else None
                claims.append(at_most(part, f"T = 1: bytes for each round of {label}", measured, BYTES_PER_ROUND))
    return claims


def _wan(evidence: NetworkEvidence) -> list[Measurement]:
    measured, part = evidence.measured, "wan"
    claims = [at_least(part, "T = 0: auto by off", measured.speedup(WAN, "auto", 0.0), WAN_SPEEDUP)]
    claims += [
        reported(part, f"T = 0: {method} by off", measured.speedup(WAN, method, 0.0))
        for method in WAN_METHODS
        if method != "auto"
    ]
    rows = {
        (row["method"], row["temperature"]): row["identical_to_off"]
        for experiment in evidence.of(part)
        if experiment.name == WAN_TEXTS
        for row in measured.rows(experiment.name, len(experiment.prompts), experiment.repeats)
    }
    for temperature in (0.0, 1.0):
        for method in WAN_METHODS:
            what = f"T = {temperature:g}, float32: texts of {method} that are those of {OFF}"
            claims.append(at_least(part, what, rows.get((method, temperature)), 1.0))
    return claims


def _edge(evidence: NetworkEvidence) -> list[Measurement]:
    measured, label, claims = evidence.measured, label_of(EDGE), list[Measurement]()
    for experiment in evidence.of("edge"):
        what = f"T = 0: an application beside the edge by plain decoding in the cloud, {experiment.max_tokens} tokens"
        first = {who: measured.first_token_s(experiment.name, who, 0.0) for who in (OFF, label)}
        remark = ", ".join(f"{who}: {seconds:.2f} s" for who, seconds in first.items() if seconds is not None)
        remark = f"until the first token {remark}" if remark else ""
        claims.append(at_least("edge", what, measured.speedup(experiment.name, label, 0.0), EDGE_SPEEDUP, remark))
    return claims


_CLAIMS: dict[str, Callable[[NetworkEvidence], list[Measurement]]] = {
    "rtt": _round_trips,
    "simulation": _simulation,
    "bytes": _traffic,
    "wan": _wan,
    "edge": _edge,
}
