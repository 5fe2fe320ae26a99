"""Parameters: every value outside its range is refused, by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from outrider.core.params import InvalidParameter, Method, SamplingParams
from outrider.core.speculation import SpeculationParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_sampling_parameters_outside_their_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=f"sampling.{field} must be"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("num_speculative_tokens", {"num_speculative_tokens": 0}),
        ("lookahead", {"num_speculative_tokens": 8, "lookahead": 7}),
        ("min_path_probability", {"min_path_probability": 1.0}),
        ("min_path_probability", {"min_path_probability": math.nan}),
        ("retrieval", {"method": Method.OFF, "retrieval": True}),
    ],
)
def test_speculation_parameters_outside_their_range_are_refused_by_name(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match=f"speculation.{field} must be"):
        SpeculationParams(**values)
