"""Intervals: what prompts drawn anew say about a claim."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import bootstrap

from outrider_bench.bootstrap import NUM_DRAWS, draw, with_intervals
from outrider_bench.result import INCONCLUSIVE, MET, MISSED, Measurement, at_least, reported

SPEEDS = [1.0, 1.2, 1.1, 1.4, 0.9, 1.3, 1.2, 1.6, 1.0, 1.1, 1.3, 1.2]


def mean_claims(values: Sequence[float], limit: float) -> list[Measurement]:
    return [at_least("p", "mean", float(np.mean(values)), limit)]


def with_mean_interval(values: Sequence[float], limit: float, *, seed: int = 0) -> Measurement:
    """A claim about the mean over prompts, with its interval."""

    def drawn(random: np.random.Generator) -> list[Measurement]:
        times = draw([range(len(values))], random)
        return mean_claims([values[index] for index, count in times.items() for _ in range(count)], limit)

    [found] = with_intervals(mean_claims(values, limit), drawn, seed)
    return found


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_a_draw_has_as_many_units_of_each_stratum_as_there_are(sizes: list[int], seed: int) -> None:
    ends = np.cumsum(sizes).tolist()
    strata = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    drawn = draw(strata, np.random.default_rng(seed))
    assert drawn.keys() == set(range(sum(sizes)))
    assert [sum(drawn[index] for index in stratum) for stratum in strata] == sizes


def test_an_interval_of_a_mean_is_that_of_scipy() -> None:
    interval = with_mean_interval(SPEEDS, 1.0).interval
    theirs = bootstrap((SPEEDS,), np.mean, n_resamples=20_000, method="percentile", rng=0).confidence_interval
    assert interval == (pytest.approx(theirs.low, abs=0.02), pytest.approx(theirs.high, abs=0.02))


def test_the_same_seed_gives_the_same_interval_and_another_one_a_near_one() -> None:
    first, again, other = (with_mean_interval(SPEEDS, 1.0, seed=seed).interval for seed in (3, 3, 4))
    assert first == again != other
    assert other == (pytest.approx(first[0], abs=0.05), pytest.approx(first[1], abs=0.05))


@pytest.mark.parametrize(("limit", "verdict"), [(0.9, MET), (1.15, INCONCLUSIVE), (1.25, INCONCLUSIVE), (1.6, MISSED)])
def test_a_claim_is_inconclusive_where_its_limit_lies_within_the_interval(limit: float, verdict: str) -> None:
    found = with_mean_interval(SPEEDS, limit)
    assert found.verdict == verdict
    assert found.to_json()["verdict"] == verdict
    assert found.to_json()["interval"] == list(found.interval)


def test_one_prompt_says_nothing_about_others() -> None:
    found = with_mean_interval([1.2], 1.0)
    assert found.interval is None
    assert found.verdict == MET


@pytest.mark.parametrize(
    ("num_without", "has_interval"), [(0, True), (NUM_DRAWS // 20, True), (NUM_DRAWS // 10, False)]
)
def test_draws_without_a_value_are_too_many_above_one_in_twenty(num_without: int, has_interval: bool) -> None:
    values = iter([None] * num_without + [float(number) for number in range(NUM_DRAWS - num_without)])
    [found] = with_intervals([reported("p", "v", 5.0)], lambda _: [reported("p", "v", next(values))], 0)
    assert (found.interval is not None) == has_interval


def test_claims_are_told_apart_by_part_and_name() -> None:
    claims = [reported("a", "v", 1.0), reported("b", "v", 2.0)]

    def drawn(random: np.random.Generator) -> list[Measurement]:
        return [reported("b", "v", 2 + random.random()), reported("a", "v", 1.0)]

    first, second = with_intervals(claims, drawn, 0)
    assert first.interval is None
    assert second.interval == (pytest.approx(2.025, abs=0.02), pytest.approx(2.975, abs=0.02))
