"""Bounds on the speed that can be kept: the simulation, at the costs and with the odds that were measured here."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.costs import ForwardTimes
from outrider.core.speculation import Waiting
from outrider_bench.experiment import DRAFT
from outrider_bench.simulation import Odds, SimulatedCosts, SimulatedMethod, simulate
from outrider_bench.suites.network.experiments import SMALL_TARGET, NetworkSizes
from outrider_bench.workers.client import Worker
from outrider_cli.prompts import choose, default_prompts

WORKER_MODULE = "outrider_bench.workers.bare"
NUM_RANKS = 8
"""Choices of the draft model that can become nodes."""
CONTEXT_LEN = 192
TARGET_ROWS, DRAFT_ROWS = (1, 2, 4, 8, 16, 32), (1, 4, 8, 16, 32)
USUAL_OVERHEAD_MS = USUAL_LATENCY_MS = 1.0
"""Assumed if the round trips were not measured."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Tokens a second that the best tree brings, in simulated time."""

    temperature: float
    tokens_per_s: Mapping[float, float]
    """Tokens per second by round trip in milliseconds."""
    off_tokens_per_s: float
    """Speed of plain decoding at these costs."""
    odds: Odds
    """Probabilities that the target's token is the draft model's choice number 0, 1, ..."""

    def kept(self, rtt_ms: float) -> float | None:
        """Return the share of the speed without a round trip; None means that it was not simulated."""
        known = self.tokens_per_s
        return known[rtt_ms] / known[0.0] if rtt_ms in known and 0.0 in known else None

    def to_json(self) -> dict[str, Any]:
        """Return the object that results.json keeps."""
        return {
            "temperature": self.temperature,
            "off_tokens_per_s": self.off_tokens_per_s,
            "points": [
                {"rtt_ms": rtt_ms, "tokens_per_s": speed, "kept": self.kept(rtt_ms)}
                for rtt_ms, speed in self.tokens_per_s.items()
            ],
            "odds_by_run": [list(row) for row in self.odds.by_run],
        }


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Holds the times of everything on this machine, in milliseconds."""

    target_ms: Mapping[int, float]
    draft_ms: Mapping[int, float]
    """Times of draft forwards, by their rows."""
    overhead_ms: float
    """Time of a round beside its forward."""
    latency_ms: float
    """Time of a message and its answer without a round trip, the drafting not counted."""

    def at(self, rtt_ms: float) -> SimulatedCosts:
        """Return the costs with a round trip added."""
        target_ms, draft_ms = ForwardTimes(self.target_ms), ForwardTimes(self.draft_ms)
        return SimulatedCosts(target_ms, draft_ms, self.latency_ms + rtt_ms, self.overhead_ms)


async def measure_forwards(target: str, core: int | None) -> tuple[dict[int, float], dict[int, float]]:
    """Measure the times of forwards of the target and of the draft model, in milliseconds, by rows."""
    worker = await _start(target, "auto", core)
    try:
        times = await worker.call(
            "measure", target_rows=list(TARGET_ROWS), draft_rows=list(DRAFT_ROWS), context=CONTEXT_LEN
        )
    finally:
        await worker.stop()
    of_target, of_draft = times["target_forward_ms"], times["draft_forward_ms"]
    return {int(rows): ms for rows, ms in of_target.items()}, {int(rows): ms for rows, ms in of_draft.items()}


async def watch(temperatures: Sequence[float], sizes: NetworkSizes, seed: int, core: int | None) -> dict[float, Odds]:
    """Return the odds by temperature, from what the small target says: the inflated one says the same."""
    prompts = choose(default_prompts(), ["code"], sizes.watched_prompts)
    worker = await _start(SMALL_TARGET, "float32", core)
    try:
        ranks: dict[float, list[list[int]]] = {temperature: [] for temperature in temperatures}
        for temperature, (index, prompt) in itertools.product(temperatures, enumerate(prompts)):
            request = {
                "prompt": prompt.text,
                "temperature": temperature,
                "seed": seed + index,
                "max_tokens": sizes.watched_tokens,
            }
            answer = await worker.call("ranks", request=request, num_ranks=NUM_RANKS)
            ranks[temperature].append(answer["ranks"])
    finally:
        await worker.stop()
    return {temperature: Odds.measured(texts, NUM_RANKS) for temperature, texts in ranks.items()}


async def bound_of(
    temperature: float, odds: Odds, costs: MeasuredCosts, rtts_ms: Sequence[float], sizes: NetworkSizes
) -> Bound:
    """Simulates every round trip, each with several trees; the fastest counts."""
    speeds = {}
    for rtt_ms in rtts_ms:
        # In a thread: it takes seconds, and somebody may want to interrupt them.
        speeds[rtt_ms] = await asyncio.to_thread(_best_speed, odds, costs.at(rtt_ms), sizes)
    plain_ms = ForwardTimes(costs.target_ms).of(1) + costs.overhead_ms
    return Bound(temperature, speeds, 1e3 / plain_ms, odds)


def _best_speed(odds: Odds, costs: SimulatedCosts, sizes: NetworkSizes) -> float:
    """Return the tokens a second of the best method simulated."""
    best = 0.0
    for num_expanded, waiting in itertools.product(sizes.simulated_expansions, (Waiting.WORTH, Waiting.NEVER)):
        method = SimulatedMethod(num_expanded=num_expanded, waiting=waiting)
        # All methods get the same seeds, so they draw the same texts and differ by the method alone.
        runs = [simulate(odds, costs, method, sizes.simulated_tokens, seed) for seed in range(sizes.simulated_seeds)]
        # Tokens of all texts by their time: a mean of speeds would favour the short ones.
        best = max(best, sum(run.num_tokens for run in runs) / sum(run.time_ms for run in runs))
    return 1e3 * best


async def _start(target: str, dtype: str, core: int | None) -> Worker:
    arguments = ["--target", target, "--draft", DRAFT, "--dtype", dtype, "--draft-dtype", "float32"]
    return await Worker.start(WORKER_MODULE, arguments, core)
