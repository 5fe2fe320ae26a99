"""How many outcomes are drafted for after each position: Theorem 12 of SAGUARO, in whole numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.calibration import MAX_ACCEPTANCE_RATE, MIN_ACCEPTANCE_RATE
from outrider.core.drafting.saguaro import apportioned, fan_outs, geometric_shares
from outrider.core.params import FanOut, SaguaroParams

RATES = st.floats(MIN_ACCEPTANCE_RATE, MAX_ACCEPTANCE_RATE)
EXPONENTS = st.floats(0.1, 10.0)


def test_the_shares_are_those_of_the_theorem() -> None:
    # a = 1/4, r = 1: the root of a is 1/2, that of 1 - a is .866.
    assert geometric_shares(3, 0.25, 1.0) == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8 / math.sqrt(0.75)])
    # a = .729, r = 2: the cube root of a is .9; all after the last position.
    assert geometric_shares(2, 0.729, 2.0) == pytest.approx([1, 0.9, 0.81 * 0.271 ** (-1 / 3)])
    assert geometric_shares(0, 0.5, 1.0) == pytest.approx([math.sqrt(2)])


def test_whole_numbers_follow_from_the_largest_remainders() -> None:
    # 10 * (1, .5, .25, .144) / 1.894 = 5.28, 2.64, 1.32, 0.76: one short each for the second and the last.
    assert fan_outs(SaguaroParams(budget=10), 3, 0.25) == [5, 3, 1, 1]
    # a = .64: the root is .8; 16 * (1, .8, .64, .512 / .6) / 3.293 = 4.86, 3.89, 3.11, 4.15.
    assert fan_outs(SaguaroParams(budget=16), 3, 0.64) == [5, 4, 3, 4]


def test_equal_remainders_go_to_the_earlier_positions() -> None:
    assert fan_outs(SaguaroParams(FanOut.UNIFORM, budget=10), 3, 0.5) == [3, 3, 2, 2]
    assert apportioned(2, [1.0, 1.0, 1.0]) == [1, 1, 0]


def test_given_fan_outs_are_taken_as_they_are_and_the_last_one_stands_for_the_rest() -> None:
    params = SaguaroParams(FanOut.GIVEN, fan_outs=(5, 3, 1))
    assert fan_outs(params, 4, 0.5) == [5, 3, 1, 1, 1]
    assert fan_outs(params, 1, 0.5) == [5, 3]


def test_a_surer_draft_model_gets_more_outcomes_after_later_positions() -> None:
    doubtful, sure = (fan_outs(SaguaroParams(budget=32), 8, rate) for rate in (0.3, 0.9))
    assert doubtful[0] > sure[0]
    assert sum(doubtful[4:]) < sum(sure[4:])
    assert sure[8] > sure[0]


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_rate_that_gives_all_to_one_end_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="acceptance_rate"):
        geometric_shares(4, rate, 1.0)


@given(budget=st.integers(1, 256), chain_len=st.integers(0, 20), rate=RATES, exponent=EXPONENTS)
def test_the_sum_is_the_budget_and_later_positions_before_the_last_get_no_more(
    budget: int, chain_len: int, rate: float, exponent: float
) -> None:
    counts = fan_outs(SaguaroParams(budget=budget, exponent=exponent), chain_len, rate)
    assert len(counts) == chain_len + 1
    assert sum(counts) == budget
    assert min(counts) >= 0
    assert counts[:-1] == sorted(counts[:-1], reverse=True)
    shares = geometric_shares(chain_len, rate, exponent)
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - budget * share / sum(shares)) < 1


@given(budget=st.integers(1, 256), chain_len=st.integers(0, 20))
def test_the_geometric_fan_out_becomes_uniform_before_the_last_position_as_all_is_accepted(
    budget: int, chain_len: int
) -> None:
    almost_one = math.nextafter(1.0, 0.0)
    shares = geometric_shares(chain_len, almost_one, 1.0)
    assert shares[:-1] == pytest.approx([1.0] * chain_len)
    uniform = apportioned(budget, [1.0] * chain_len) if chain_len else []
    assert apportioned(budget, shares[:-1]) == uniform if chain_len else True


@given(budget=st.integers(1, 64), chain_len=st.integers(0, 12), rate=RATES)
def test_the_geometric_fan_out_becomes_uniform_where_more_guesses_bring_nearly_all_at_once(
    budget: int, chain_len: int, rate: float
) -> None:
    assert geometric_shares(chain_len, rate, 1e9) == pytest.approx([1.0] * (chain_len + 1))


def hit_probability(counts: Sequence[float], rate: float, exponent: float) -> float:
    """The theorem's model: F guesses miss with probability F ** -r; without a guess nothing is hit."""
    last = len(counts) - 1
    weights = [rate**k * (1 - rate) for k in range(last)] + [rate**last]
    return sum(w * (1 - count**-exponent) for w, count in zip(weights, counts, strict=True) if count >= 1)


def allocations(budget: int, num_positions: int) -> Iterator[tuple[int, ...]]:
    """Every way to spend the budget, at least one guess each."""
    if num_positions == 1:
        yield (budget,)
        return
    for first in range(1, budget - num_positions + 2):
        for rest in allocations(budget - first, num_positions - 1):
            yield (first, *rest)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize(("budget", "chain_len"), [(12, 2), (16, 3), (24, 3)])
def test_no_allocation_has_a_higher_hit_probability_but_for_rounding(
    budget: int, chain_len: int, rate: float, exponent: float
) -> None:
    counts = fan_outs(SaguaroParams(budget=budget, exponent=exponent), chain_len, rate)
    shares = geometric_shares(chain_len, rate, exponent)
    exact = [budget * share / sum(shares) for share in shares]
    best = max(allocations(budget, chain_len + 1), key=lambda found: hit_probability(found, rate, exponent))
    most = hit_probability(best, rate, exponent)
    if min(exact) >= 1:  # the theorem's solution is one: nothing in whole numbers is better
        assert hit_probability(exact, rate, exponent) >= most
    assert hit_probability(counts, rate, exponent) >= most - 0.01
    uniform = fan_outs(SaguaroParams(FanOut.UNIFORM, budget=budget), chain_len, rate)
    assert hit_probability(counts, rate, exponent) >= hit_probability(uniform, rate, exponent) - 0.01
