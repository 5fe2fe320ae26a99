"""Fits of power laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_bench.power_law import fit_power_law

BUDGETS = (1, 2, 4, 8, 16, 32, 64)


@given(st.floats(0.01, 10), st.floats(-3, 3))
def test_points_of_a_law_give_the_law_back(factor: float, exponent: float) -> None:
    law = fit_power_law([(budget, factor * budget**-exponent) for budget in BUDGETS])
    assert law is not None
    assert law.factor == pytest.approx(factor)
    assert law.exponent == pytest.approx(exponent, abs=1e-6)
    assert law.at(100) == pytest.approx(factor * 100**-exponent)


def test_a_law_explains_all_of_itself_and_less_of_what_is_scattered() -> None:
    exact = fit_power_law([(budget, budget**-0.5) for budget in BUDGETS])
    scattered = fit_power_law(
        [(budget, budget**-0.5 * (2 if number % 2 else 0.5)) for number, budget in enumerate(BUDGETS)]
    )
    assert exact is not None
    assert scattered is not None
    assert exact.r_squared == pytest.approx(1)
    assert 0 <= scattered.r_squared < 0.7


def test_what_has_no_logarithm_is_left_out() -> None:
    points = [(1.0, 1.0), (4.0, 0.5), (16.0, 0.0), (0.0, 1.0)]
    assert fit_power_law(points) == fit_power_law(points[:2])


@pytest.mark.parametrize("points", [[], [(1.0, 0.5)], [(2.0, 0.5), (2.0, 0.4)], [(1.0, 0.0), (2.0, 0.0)]])
def test_without_two_different_arguments_there_is_no_law(points: list[tuple[float, float]]) -> None:
    assert fit_power_law(points) is None
