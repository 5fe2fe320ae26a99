"""A batch verifies what pays, and waits while that pays for all of its rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.vllm.budget import OVERHEAD_MS, Budget, StepTimes

PROBABILITIES = st.lists(st.floats(0, 1), max_size=8).map(lambda chain: sorted(chain, reverse=True))


def measured(first_ms: float, row_ms: float) -> Budget:
    """A budget that has seen steps of many sizes."""
    budget = Budget(2.0)
    for _ in range(20):
        for num_rows in (1, 4, 9, 17, 33):
            budget.steps.observe(num_rows, first_ms + row_ms * (num_rows - 1))
    return budget


def test_steps_are_learnt_as_a_line() -> None:
    times = measured(10.0, 0.5).steps.forward_times
    assert times.of(1) == pytest.approx(10.0, rel=0.05)
    assert times.of(41) == pytest.approx(30.0, rel=0.05)


def test_one_hiccup_teaches_little() -> None:
    budget = measured(10.0, 0.0)
    budget.steps.observe(1, 1e6)
    assert budget.steps.forward_times.of(1) < 12


@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=30), st.lists(st.integers(1, 300), min_size=30, max_size=30))
def test_more_rows_never_seem_to_cost_less(times_ms: list[float], sizes: list[int]) -> None:
    steps = StepTimes()
    for num_rows, time_ms in zip(sizes, times_ms, strict=False):
        steps.observe(num_rows, time_ms)
    known = [steps.forward_times.of(num_rows) for num_rows in range(1, 300)]
    assert min(known) > 0
    assert all(less <= more * (1 + 1e-9) for less, more in pairwise(known))


def test_rows_that_cost_nothing_are_all_verified() -> None:
    assert measured(10.0, 0.0).num_tokens([[0.9, 0.5, 0.1], [0.2]]) == [3, 1]


def test_rows_that_cost_as_much_as_a_step_are_not_verified() -> None:
    assert measured(10.0, 10.0).num_tokens([[0.5, 0.3], [0.2]]) == [0, 0]


def test_the_probable_tokens_come_first_whose_ever_they_are() -> None:
    assert measured(10.0, 4.0).num_tokens([[0.95, 0.9], [0.1, 0.05]]) == [2, 0]


@given(st.lists(PROBABILITIES, max_size=6), st.floats(0.0, 5.0))
def test_no_budget_makes_a_step_worse_than_a_plain_one(chains: list[list[float]], row_ms: float) -> None:
    budget = measured(10.0, row_ms)
    counts = budget.num_tokens(chains)
    assert all(0 <= count <= len(chain) for count, chain in zip(counts, chains, strict=True))
    if chains:
        times = budget.steps.forward_times
        tokens = len(chains) + sum(sum(chain[:count]) for count, chain in zip(counts, chains, strict=True))
        plain = len(chains) / (times.of(len(chains)) + OVERHEAD_MS)
        assert tokens / (times.of(len(chains) + sum(counts)) + OVERHEAD_MS) >= plain * (1 - 1e-9)


def test_nothing_is_waited_for_once_half_of_the_rows_have_drafts() -> None:
    budget = Budget(2.0)
    assert budget.patience_ms(4, [5.0, 5.0]) == 0
    assert budget.patience_ms(4, [5.0, 5.0, 5.0]) == 2.0
    assert budget.patience_ms(1, []) == 0


def test_a_wait_is_as_long_as_it_is_worth_to_all() -> None:
    assert Budget(20.0).patience_ms(4, [4.0, 4.0, 0.0]) == 2.0


def test_a_drafter_that_lies_is_given_fewer_and_fewer_rows() -> None:
    budget = measured(10.0, 1.0)
    certain = [[1.0] * 8]
    assert budget.num_tokens(certain) == [8]
    for _ in range(60):
        budget.learn(8.0, 0)
    assert budget.num_tokens(certain) == [0]
    for _ in range(400):
        budget.learn(0.0, 0)  # steps without drafts: it is tried again
    assert budget.num_tokens(certain) == [8]
