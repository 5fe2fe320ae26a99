"""Parameters: every value outside its range is refused, by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from outrider.core.params import InvalidParameter, Method, SamplingParams


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


def test_what_a_method_needs_follows_from_how_it_grows() -> None:
    with_model = {m for m in Method if m.has_draft_model}
    assert with_model == set(Method) - {Method.OFF, Method.RETRIEVAL, Method.SPACELIKE}
    assert {m for m in Method if m.needs_draft_model} == with_model - {Method.AUTO}, "auto can do without"
    assert {m for m in Method if m.drafts_ahead} == with_model - {Method.SPECULATIVE}
    assert {m for m in Method if m.needs_datastore} == {Method.SPACELIKE}
    assert not any(m.samples and not m.has_draft_model for m in Method)
