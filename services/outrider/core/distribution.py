"""How often something had which size, since the start."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Distribution:
    """Observations by size. One thread adds; others may read, and see numbers of about the same time."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are upper bounds, ascending."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Observations up to each bound that are beyond the one before; the last number is of those beyond all
        bounds."""
        self.total = 0.0
        """Sum of all observations."""

    def add(self, value: float, count: int = 1) -> None:
        """Takes in `count` observations of the same size."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def num_observations(self) -> int:
        """How many there were."""
        return sum(self.counts)
