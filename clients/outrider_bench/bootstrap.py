"""Intervals by the bootstrap: how far a value moves with other prompts of the same kind. Pure.

Prompts are drawn anew, with repetition, and everything that is claimed is computed again from what was measured with
them (Efron and Tibshirani, An Introduction to the Bootstrap, section 13.3: percentile intervals). A draw holds for all
claims: both sides of a ratio, and the choice of the best of several, are of the same prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from outrider_bench.result import Measurement

NUM_DRAWS = 1000
CONFIDENCE = 0.95
MIN_SHARE = 0.95
"""Share of the draws that must have a value: an interval of the others alone would be too narrow."""

Multiplicities = Mapping[int, int]
"""Maps the index of a unit to the number of times that it was drawn."""


def draw(strata: Iterable[Sequence[int]], random: np.random.Generator) -> dict[int, int]:
    """Draw as many units of each stratum, with repetition, as it has.

    Args:
        strata: Indices of units; kinds of prompts that are compared apart are apart here too.
        random: Decides the draw.

    Returns:
        How often each unit was drawn.
    """
    drawn: dict[int, int] = {}
    for stratum in strata:
        counts = random.multinomial(len(stratum), [1 / len(stratum)] * len(stratum))
        drawn.update(zip(stratum, counts.tolist(), strict=True))
    return drawn


def with_intervals(
    claims: Sequence[Measurement],
    drawn_claims: Callable[[np.random.Generator], Sequence[Measurement]],
    seed: int,
    num_draws: int = NUM_DRAWS,
) -> list[Measurement]:
    """Give each claim the interval in which its value lies with 95 % confidence, as far as prompts decide it.

    A claim gets none where nothing varies (a single prompt says nothing about others), and where more than one draw in
    twenty has no value.

    Args:
        claims: Of all that was measured; part and name tell them apart.
        drawn_claims: Makes the same claims of a draw of the prompts.
        seed: Of the draws: the same seed gives the same intervals.
        num_draws: How often is drawn.
    """
    random = np.random.default_rng(seed)
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(num_draws):
        for one in drawn_claims(random):
            if one.value is not None:
                values[one.part, one.name].append(one.value)
    return [replace(one, interval=_interval(values[one.part, one.name], num_draws)) for one in claims]


def _interval(values: Sequence[float], num_draws: int) -> tuple[float, float] | None:
    if len(values) < max(1, MIN_SHARE * num_draws) or min(values) == max(values):
        return None
    outside = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.asarray(values, float), [outside, 100 - outside])
    return float(low), float(high)
