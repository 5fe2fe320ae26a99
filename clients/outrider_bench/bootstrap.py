"""Bootstrap intervals: how far a value moves with other prompts of the same kind. Pure.

Prompts are drawn again, with repetition, and every claimed value is computed again from their measurements (Efron and
Tibshirani, An Introduction to the Bootstrap, section 13.3: percentile intervals). A draw holds for all claims: both
sides of a ratio, and the choice of the best of several, use the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

NUM_DRAWS = 1000
CONFIDENCE = 0.95
MIN_SHARE = 0.95
"""Minimum share of the draws that must have a value: an interval of only those that have one would be too narrow."""

Multiplicities = Mapping[int, int]
"""Maps the index of a unit to the number of times that it was drawn."""


def draw(strata: Iterable[Sequence[int]], random: np.random.Generator) -> dict[int, int]:
    """Draws as many units of each stratum, with repetition, as it has.

    Args:
        strata: Indices of units; kinds of prompts that are compared separately are separate strata.
        random: Decides the draw.

    Returns:
        How often each unit was drawn.
    """
    drawn: dict[int, int] = {}
    for stratum in strata:
        counts = random.multinomial(len(stratum), [1 / len(stratum)] * len(stratum))
        drawn.update(zip(stratum, counts.tolist(), strict=True))
    return drawn


def intervals_of(
    count: int,
    drawn_values: Callable[[np.random.Generator], Sequence[float | None]],
    seed: int,
    num_draws: int = NUM_DRAWS,
) -> list[tuple[float, float] | None]:
    """Returns the intervals that hold values with 95 % confidence, as far as prompts decide them.

    A value gets no interval if nothing varies (a single prompt says nothing about others), or if more than one draw in
    twenty has no value.

    Args:
        count: Number of values.
        drawn_values: Makes all values of a draw of the prompts.
        seed: Seed of the draws: the same seed gives the same intervals.
        num_draws: Number of draws.
    """
    random = np.random.default_rng(seed)
    draws = [drawn_values(random) for _ in range(num_draws)]
    return [_interval([one[index] for one in draws], num_draws) for index in range(count)]


def _interval(drawn: Sequence[float | None], num_draws: int) -> tuple[float, float] | None:
    values = [value for value in drawn if value is not None]
    if len(values) < max(1, MIN_SHARE * num_draws) or min(values) == max(values):
        return None
    outside = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.asarray(values, float), [outside, 100 - outside])
    return float(low), float(high)
