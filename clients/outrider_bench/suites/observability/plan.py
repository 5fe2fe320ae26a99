"""What is compared, how often, and what is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_bench.config import ObservabilityConfig
from outrider_bench.result import Target

NOTHING, AGAIN, METRICS, SOME_TRACES, ALL_TRACES = (
    "nothing",
    "nothing, once more",
    "metrics, read every second",
    "traces of 10 %",
    "traces of 100 %",
)
VARIANTS = (NOTHING, AGAIN, METRICS, SOME_TRACES, ALL_TRACES)
"""Turns of the same services: two processes that do the same differ by some percent all their lives. The second shows
what a comparison of equals comes to."""
RATIOS = {SOME_TRACES: 0.1, ALL_TRACES: 1.0}
"""Share of the generations that are recorded; none in other turns."""
TARGETS = {METRICS: Target("<=", 1), SOME_TRACES: Target("<=", 2)}
"""Loss of speed in percent."""
SPEED, CPU_TIME = "tokens/s", "ms of CPU time a token"
"""What is measured of a turn, by its unit. CPU time is that of all services but Redis: less disturbed by whatever else
the machine does, though not what a caller notices."""
METHODS = ("off", "auto")
SCRAPE_S = 1.0


@dataclass(frozen=True, slots=True)
class ObservabilitySizes:
    """How much is done."""

    target: str
    concurrency: int
    """Generations at once."""
    max_tokens: int
    rounds_per_repeat: int
    """In a round every variant has one turn."""


SIZES = ObservabilitySizes("demo/target-100m", concurrency=4, max_tokens=48, rounds_per_repeat=8)
QUICK_SIZES = ObservabilitySizes("demo/target", concurrency=2, max_tokens=8, rounds_per_repeat=1)


def sizes_of(config: ObservabilityConfig) -> ObservabilitySizes:
    """How much a run does."""
    return QUICK_SIZES if config.is_quick else SIZES


def order_of(variants: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Who comes when in a round: each is first equally often, and every other round goes backwards, so that nobody
    always runs behind the same one."""
    first = number // 2 % len(variants)
    order = variants[first:] + variants[:first]
    return order[::-1] if number % 2 else order
