"""Predictions from an acceptance rate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_bench.prediction import expected_tokens


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
