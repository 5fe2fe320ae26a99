"""Intervals of a value, from prompts that are drawn again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import bootstrap

from outrider_bench.bootstrap import NUM_DRAWS, draw, intervals_of

SPEEDS = [1.0, 1.2, 1.1, 1.4, 0.9, 1.3, 1.2, 1.6, 1.0, 1.1, 1.3, 1.2]


def interval_of_mean(values: Sequence[float], *, seed: int = 0) -> tuple[float, float] | None:
    """The interval of the mean over prompts."""

    def drawn(random: np.random.Generator) -> list[float | None]:
        times = draw([range(len(values))], random)
        return [float(np.mean([values[index] for index, count in times.items() for _ in range(count)]))]

    [found] = intervals_of(1, drawn, seed)
    return found


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_a_draw_has_as_many_units_of_each_stratum_as_there_are(sizes: list[int], seed: int) -> None:
    ends = np.cumsum(sizes).tolist()
    strata = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    drawn = draw(strata, np.random.default_rng(seed))
    assert drawn.keys() == set(range(sum(sizes)))
    assert [sum(drawn[index] for index in stratum) for stratum in strata] == sizes


def test_an_interval_of_a_mean_is_that_of_scipy() -> None:
    theirs = bootstrap((SPEEDS,), np.mean, n_resamples=20_000, method="percentile", rng=0).confidence_interval
    assert interval_of_mean(SPEEDS) == (pytest.approx(theirs.low, abs=0.02), pytest.approx(theirs.high, abs=0.02))


def test_the_same_seed_gives_the_same_interval_and_another_one_a_near_one() -> None:
    first, again, other = (interval_of_mean(SPEEDS, seed=seed) for seed in (3, 3, 4))
    assert first is not None
    assert first == again != other
    assert other == (pytest.approx(first[0], abs=0.05), pytest.approx(first[1], abs=0.05))


def test_one_prompt_says_nothing_about_others() -> None:
    assert interval_of_mean([1.2]) is None


@pytest.mark.parametrize(
    ("num_without", "has_interval"), [(0, True), (NUM_DRAWS // 20, True), (NUM_DRAWS // 10, False)]
)
def test_draws_without_a_value_are_too_many_above_one_in_twenty(num_without: int, has_interval: bool) -> None:
    values = iter([None] * num_without + [float(number) for number in range(NUM_DRAWS - num_without)])
    [found] = intervals_of(1, lambda _: [next(values)], 0)
    assert (found is not None) == has_interval
