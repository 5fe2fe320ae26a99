"""How many rows of a target forward are worth their time.

A forward reads its weights once, whatever its rows: up to a point, further rows are nearly free, and then they are not
(8 on a CPU in bfloat16, 32 to 64 on a GPU). Where that point lies is measured when the server starts; how much a row
brings is its path's probability.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from outrider.core.tree import Node

LEARNING_RATE = 0.05
"""Weight of a forward against all before it."""
MOST_OFF = 2.0
"""A forward that takes longer than this many times as usual was disturbed: it counts as that."""


class ForwardTimes:
    """Time of one target forward by its rows, in milliseconds: measured at some sizes, straight lines between them.

    More rows can be cheaper: matrix products have kernels for some sizes that beat those for smaller ones.
    """

    def __init__(self, measured_ms: Mapping[int, float]) -> None:
        """ValueError without a measurement, or for one that is not positive."""
        if not measured_ms or min(measured_ms.values()) <= 0 or min(measured_ms) < 1:
            raise ValueError(f"forward times must be positive, for at least one size, got {dict(measured_ms)}")
        self._sizes = sorted(measured_ms)
        self._times_ms = [measured_ms[size] for size in self._sizes]
        self._known: dict[int, float] = {}

    def observe(self, num_rows: int, time_ms: float) -> None:
        """A forward of so many rows took so long: the nearest size that was measured learns it, slowly. A machine that
        was busy when the server started is not busy for ever."""
        expected = self.of(num_rows)
        ratio = min(MOST_OFF, max(1 / MOST_OFF, time_ms / expected))
        nearest = min(range(len(self._sizes)), key=lambda index: abs(self._sizes[index] - num_rows))
        if num_rows <= 2 * self._sizes[-1]:
            self._times_ms[nearest] *= 1 + LEARNING_RATE * (ratio - 1)
            self._known.clear()

    def of(self, num_rows: int) -> float:
        """Time of a forward of so many rows; beyond the largest size that was measured, its last slope goes on."""
        time_ms = self._known.get(num_rows)
        if time_ms is None:
            time_ms = self._known[num_rows] = self._interpolated(num_rows)
        return time_ms

    def _interpolated(self, num_rows: int) -> float:
        sizes, times = self._sizes, self._times_ms
        if num_rows <= sizes[0]:
            return times[0]
        if len(sizes) == 1:
            return times[0]
        upper = min(bisect_left(sizes, num_rows), len(sizes) - 1)
        lower = upper - 1
        slope = (times[upper] - times[lower]) / (sizes[upper] - sizes[lower])
        return times[lower] + slope * (num_rows - sizes[lower])


def path_probabilities(nodes: Sequence[Node], root: Node) -> list[float]:
    """For each node, that the target says all tokens from the root down to it."""
    return [math.exp(min(0.0, node.path_logprob - root.path_logprob)) for node in nodes]


def num_worth(
    probabilities: Sequence[float], times: ForwardTimes, num_sharing: int = 1, overhead_ms: float = 1.0
) -> int:
    """How many of these rows, from the first, bring the most tokens in the time of the round.

    Args:
        probabilities: That a row's token is accepted, for rows in the order in which they would be taken.
        times: The target's forward.
        num_sharing: Sessions in one forward. Rows of all of them share its time; each is taken to want as many.
        overhead_ms: What a round takes beside its forward.
    """
    best, best_rate, tokens = 0, 1.0 / (times.of(num_sharing) + overhead_ms), 1.0
    for count, probability in enumerate(probabilities, start=1):
        tokens += probability
        rate = tokens / (times.of(num_sharing * (1 + count)) + overhead_ms)
        if rate > best_rate:
            best, best_rate = count, rate
    return best
