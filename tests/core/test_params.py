"""Parameters: values outside their ranges are refused, by name. `tests/wire` and `tests/verifier` have further ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from outrider.core.methods import (
    CARD,
    PEARL,
    RETRIEVAL,
    SPACELIKE,
)
from outrider.core.params import InvalidParameter, Rows, SamplingParams, Source
from outrider.core.speculation import SpeculationParams, Steering


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.inf),
        ("top_p", math.nan),
        ("min_p", -0.1),
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
        ("min_path_probability", {"min_path_probability": 1.0}),
        ("min_path_probability", {"min_path_probability": math.nan}),
        ("max_rows", {"method": CARD, "rows": Rows.TREE, "max_rows": 65}),
        ("max_rows", {"method": CARD, "rows": Rows.TREE, "max_rows": -1}),
        ("retrieval_params.contribute", {"method": RETRIEVAL, "contribute": True}),
    ],
)
def test_a_parameter_outside_its_range_is_refused_by_name(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match=f"speculation.{field} must be"):
        SpeculationParams(**values)


@pytest.mark.parametrize(
    ("field", "build"),
    [
        (r"retrieval_params.sources\[0\]", lambda: SpeculationParams(RETRIEVAL, sources=(Source.TARGET,))),
        ("retrieval_params.sources", lambda: SpeculationParams(RETRIEVAL, sources=())),
        ("retrieval_params.remote", lambda: SpeculationParams(RETRIEVAL, sources=(Source.POOL,), remote=True)),
        ("retrieval_params.remote", lambda: SpeculationParams(SPACELIKE, remote=True)),
    ],
)
def test_sources_that_cannot_be_looked_up_are_refused_by_name(field: str, build: Callable[[], object]) -> None:
    with pytest.raises(InvalidParameter, match=f"speculation.{field} must be"):
        build()


def test_two_steerings_join_to_what_they_do_one_after_the_other() -> None:
    params = SpeculationParams(PEARL)
    first = Steering(params, forward_us=20_000)
    assert first.then(Steering(round_trip_us=300)) == Steering(params, 20_000, 300)
    assert first.then(Steering(SpeculationParams(), forward_us=5)) == Steering(SpeculationParams(), 5)
    assert [steering.is_pause for steering in (first, Steering(), Steering(SpeculationParams()))] == [
        False,
        False,
        True,
    ]
