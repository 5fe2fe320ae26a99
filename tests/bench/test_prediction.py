"""Predictions from an acceptance rate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_bench.prediction import expected_tokens, walltime_improvement


@given(st.floats(0, 0.999), st.integers(0, 32))
def test_the_expected_tokens_are_those_of_the_closed_form(rate: float, chain_len: int) -> None:
    assert expected_tokens(rate, chain_len) == pytest.approx((1 - rate ** (chain_len + 1)) / (1 - rate))


def test_the_ends_are_one_token_and_the_whole_chain_with_the_targets_own() -> None:
    assert expected_tokens(0.0, 8) == 1
    assert expected_tokens(1.0, 8) == 9
    assert expected_tokens(0.7, 0) == 1


def test_rounds_of_independent_tokens_commit_as_many_as_expected() -> None:
    accepted = np.random.default_rng(0).random((200_000, 5)) < 0.8
    assert 1 + np.cumprod(accepted, axis=1).sum(axis=1).mean() == pytest.approx(expected_tokens(0.8, 5), abs=0.01)


@pytest.mark.parametrize(
    ("rate", "chain_len", "message"),
    [
        (1.1, 8, "acceptance_rate must be in"),
        (-0.1, 8, "acceptance_rate must be in"),
        (float("nan"), 8, "acceptance_rate must be in"),
        (0.5, -1, "chain_len must be at least 0"),
    ],
)
def test_a_rate_or_a_length_out_of_range_is_refused(rate: float, chain_len: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expected_tokens(rate, chain_len)


@given(st.floats(0, 1), st.integers(0, 16))
def test_a_draft_model_that_takes_no_time_improves_by_all_the_tokens(rate: float, chain_len: int) -> None:
    assert walltime_improvement(rate, chain_len, 0.0) == pytest.approx(expected_tokens(rate, chain_len))


def test_a_draft_model_as_slow_as_the_target_cannot_improve_anything() -> None:
    # Five drafted tokens cost five forwards, and a round commits six tokens at most.
    assert walltime_improvement(1.0, 5, 1.0) == pytest.approx(1.0)
    assert walltime_improvement(0.8, 5, 0.05) == pytest.approx(expected_tokens(0.8, 5) / 1.25)
    with pytest.raises(ValueError, match="draft_share must be at least 0, got -1"):
        walltime_improvement(0.5, 1, -1)
