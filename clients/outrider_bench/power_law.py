"""Power laws: how something falls, or rises, where its argument is multiplied. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """Says that y = factor * x ** -exponent."""

    factor: float
    exponent: float
    r_squared: float
    """Share of the variance of log y that the law explains, in [0, 1]; 1 where y does not vary."""

    def at(self, x: float) -> float:
        """Return what the law says of x, which is above 0."""
        return float(self.factor * x**-self.exponent)


def fit_power_law(points: Sequence[tuple[float, float]]) -> PowerLaw | None:
    """Fit a power law by least squares of the logarithms.

    Args:
        points: Pairs (x, y). Only those with both above 0 have logarithms; the others are left out.

    Returns:
        The law; None where fewer than two different x are left.
    """
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len({x for x, _ in logs}) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread
    total = sum((y - mean_y) ** 2 for _, y in logs)
    left = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in logs)
    return PowerLaw(math.exp(mean_y - slope * mean_x), -slope, 1 - left / total if total else 1.0)
