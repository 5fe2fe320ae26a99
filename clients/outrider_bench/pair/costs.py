"""Costs of all parts of a round: forwards as a worker has timed them, the rest as services report it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from outrider.core.costs import ForwardTimes
from outrider_bench.experiment import PLAIN, Contender, contender
from outrider_bench.samples import Block, GenerationSample

TARGET_ROWS, DRAFT_ROWS = (1, 2, 4, 8, 16, 32), (1, 4, 8, 16, 32)
PROBE = "probe"
"""First word of the settings that probe costs, and are compared with no prediction."""
SHORT, LONG = 2, 6
"""Lengths of two chains whose latencies tell the cost of a draft step from that of the network."""
LEAST_ROUNDS = 4
"""Minimum rounds of a generation for its mean and median to be meaningful."""
LEAST_MS = 0.05
"""Minimum time of a message, however noisy the timings."""


def _chain(method: str, length: int) -> Contender:
    # No chain ends early, whatever its probability: the number of forwards and rows must be known.
    fields = {"num_speculative_tokens": length, "min_path_probability": 0.0}
    return contender(method, f"{PROBE} gamma = {length}", **fields)


TURN_SHORT, TURN_LONG, AHEAD = _chain("speculative", SHORT), _chain("speculative", LONG), _chain("pearl", SHORT)
PROBES = (PLAIN, TURN_SHORT, TURN_LONG, AHEAD)
"""Contenders that tell the costs: each part of a round shows in one of them."""


@dataclass(frozen=True, slots=True)
class PairCosts:
    """Times in milliseconds."""

    target_ms: Mapping[int, float]
    """Times of a target forward that runs alone, by its number of rows."""
    draft_ms: Mapping[int, float]
    """Times of a draft forward that runs alone, by its number of rows."""
    plain_ms: float
    """Time of a target forward with one row, in the service, under `off`."""
    turn_slowdown: float
    """Factor of the time of a target forward that waits for the draft before it begins: its weights may have left the
    caches, and its core may have been given to others."""
    ahead_slowdown: float
    """The same factor for one while drafts are made."""
    step_ms: float
    """Time of a draft forward with one row in the service, including all other work for a node."""
    one_way_ms: float
    """Time of a message between the services."""
    plain_overhead_ms: float
    """Time of a round of `off` besides its forward."""
    turn_overhead_ms: float
    """Time of a round that takes turns with the draft, besides forward and waiting."""
    ahead_overhead_ms: float
    """Time of a round while drafts come in, besides its forward."""
    plain_stretch: float = 1.0
    """Mean over median of a round of `off`; all times above are medians. It accounts for other work on the machine, and
    for the rare long round."""
    turn_stretch: float = 1.0
    """The same of a round that takes turns with the draft."""
    ahead_stretch: float = 1.0
    """The same of a round while drafts come in."""

    @property
    def speed_ratio(self) -> float:
        """Returns C: forwards of the draft, one row each, that fit into one of the target (DOUBLE, section 3.1)."""
        return self.target_ms[1] / self.draft_ms[1]

    @property
    def beside_slowdown(self) -> float:
        """Returns the factor by which concurrent forwards take longer than those in turns, measured on the target. Both
        models read the same memory, which slows the draft down alike; the probes see the draft only in turns."""
        return max(1.0, self.ahead_slowdown / self.turn_slowdown)

    @property
    def plain_round_ms(self) -> float:
        """Returns the time of a token of `off`."""
        return self.plain_stretch * (self.plain_ms + self.plain_overhead_ms)

    def of(self, method: str) -> dict[str, Any]:
        """Returns the costs of the simulated pair under a method."""
        takes_turns = method == TURN_SHORT.method
        # The service's forwards are slower than the worker's because of other work there; rows keep their share.
        scale = self.plain_ms / self.target_ms[1] * (self.turn_slowdown if takes_turns else self.ahead_slowdown)
        step_ms = self.step_ms * (1.0 if takes_turns else self.beside_slowdown)
        draft_scale = step_ms / self.draft_ms[1]
        widest = max(self.draft_ms)
        row_ms = max(0.0, (self.draft_ms[widest] - self.draft_ms[1]) / (widest - 1)) * draft_scale
        stretch = self.turn_stretch if takes_turns else self.ahead_stretch
        overhead_ms = self.turn_overhead_ms if takes_turns else self.ahead_overhead_ms
        return {
            "target_ms": {rows: stretch * scale * ms for rows, ms in self.target_ms.items()},
            "draft_ms": stretch * max(0.0, step_ms - row_ms),
            "draft_row_ms": stretch * row_ms,
            "one_way_ms": stretch * self.one_way_ms,
            "overhead_ms": stretch * overhead_ms,
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the object that results.json keeps."""
        return {
            "target_ms": {str(rows): ms for rows, ms in self.target_ms.items()},
            "draft_ms": {str(rows): ms for rows, ms in self.draft_ms.items()},
            "speed_ratio": self.speed_ratio,
            "plain_ms": self.plain_ms,
            "turn_slowdown": self.turn_slowdown,
            "ahead_slowdown": self.ahead_slowdown,
            "step_ms": self.step_ms,
            "one_way_ms": self.one_way_ms,
            "plain_overhead_ms": self.plain_overhead_ms,
            "turn_overhead_ms": self.turn_overhead_ms,
            "ahead_overhead_ms": self.ahead_overhead_ms,
            "plain_stretch": self.plain_stretch,
            "turn_stretch": self.turn_stretch,
            "ahead_stretch": self.ahead_stretch,
        }


def costs_of(times: Mapping[str, Mapping[str, float]], blocks: Iterable[Block]) -> PairCosts:
    """Makes the costs from the times of a worker, and from the reports of the probes' rounds.

    Args:
        times: `target_forward_ms` and `draft_forward_ms`, by rows.
        blocks: Generations of the contenders in `PROBES`.

    Raises:
        ValueError: A probe lacks a time that is needed.
    """
    target_ms, draft_ms = (
        {int(rows): ms for rows, ms in times[name].items()} for name in ("target_forward_ms", "draft_forward_ms")
    )
    medians = _medians(blocks)
    plain, short, long, ahead = (medians[one.method, one.setting] for one in PROBES)
    step_ms = (long["draft_latency_ms"] - short["draft_latency_ms"]) / (LONG - SHORT)
    # If the noise exceeds four forwards, the worker's time is the better guess.
    step_ms = step_ms if step_ms > 0.5 * draft_ms[1] else draft_ms[1]
    plain_ms, times_of = plain["forward_ms"], ForwardTimes(target_ms)
    short_rows, long_rows = (plain_ms * times_of.of(length + 1) / target_ms[1] for length in (SHORT, LONG))
    return PairCosts(
        target_ms=target_ms,
        draft_ms=draft_ms,
        plain_ms=plain_ms,
        turn_slowdown=median((short["forward_ms"] / short_rows, long["forward_ms"] / long_rows)),
        ahead_slowdown=ahead["forward_ms"] / short_rows,
        step_ms=step_ms,
        one_way_ms=max(LEAST_MS, (short["draft_latency_ms"] - SHORT * step_ms) / 2),
        plain_overhead_ms=plain["overhead_ms"],
        turn_overhead_ms=short["overhead_ms"],
        ahead_overhead_ms=ahead["overhead_ms"],
        plain_stretch=plain["stretch"],
        turn_stretch=median((short["stretch"], long["stretch"])),
        ahead_stretch=ahead["stretch"],
    )


def _medians(blocks: Iterable[Block]) -> dict[tuple[str, str], dict[str, float]]:
    """Returns the median over the generations of each median time, and of `stretch`, by contender."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for block in blocks:
        for sample in block.samples:
            if sample.generation is not None:
                times = found.setdefault((block.condition.method, block.condition.setting), {})
                for name, ms in sample.generation.rounds.times_p50.items():
                    times.setdefault(name, []).append(ms)
                times.setdefault("stretch", []).append(_stretch(sample.generation))
    for one in PROBES:
        for name in (
            "forward_ms",
            "overhead_ms",
            *(["draft_latency_ms"] if one.method == "speculative" else []),
        ):
            if not found.get((one.method, one.setting), {}).get(name):
                raise ValueError(f"{one.method} {one.setting} must report {name}, and does not")
    return {key: {name: median(values) for name, values in times.items()} for key, times in found.items()}


def _stretch(generation: GenerationSample) -> float:
    """Returns the mean over the median of a round's time; 1 if a generation has too few rounds."""
    gaps = generation.gaps_s
    return sum(gaps) / len(gaps) / median(gaps) if len(gaps) >= LEAST_ROUNDS else 1.0
