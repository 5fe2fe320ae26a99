"""Parameters: every value outside its range is refused, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from outrider.core.params import (
    AcceptanceRule,
    BestFirstParams,
    CardParams,
    DoubleParams,
    FanOut,
    InvalidParameter,
    Method,
    RetrievalScope,
    Rows,
    SaguaroParams,
    SamplingParams,
    Source,
    SpacelikeParams,
    SpeculationParams,
    Steering,
)


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
    assert {m for m in Method if m.drafts_ahead} == with_model - {Method.SPECULATIVE, Method.OPT_TREE, Method.SEQUOIA}
    assert {m for m in Method if m.needs_datastore} == {Method.SPACELIKE}
    assert not any(m.samples and not m.has_draft_model for m in Method)


RATIO = AcceptanceRule.RATIO


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("num_speculative_tokens", {"num_speculative_tokens": 0}),
        ("lookahead", {"num_speculative_tokens": 8, "lookahead": 7}),
        ("min_path_probability", {"min_path_probability": 1.0}),
        ("min_path_probability", {"min_path_probability": math.nan}),
        ("max_rows", {"method": Method.CARD, "rows": Rows.TREE, "max_rows": 65}),
        ("max_rows", {"method": Method.CARD, "rows": Rows.TREE, "max_rows": -1}),
        ("rows", {"method": Method.SPACELIKE, "rows": Rows.TREE}),
        ("rows", {"method": Method.PEARL, "rows": Rows.TREE, "acceptance_rule": RATIO}),
        ("acceptance_rule", {"method": Method.CARD, "acceptance_rule": RATIO}),
        ("acceptance_rule", {"method": Method.AUTO, "acceptance_rule": RATIO}),
        ("saguaro.bias", {"method": Method.SAGUARO, "saguaro": SaguaroParams(bias=0.5)}),
        ("retrieval", {"method": Method.OFF, "retrieval": True}),
        ("retrieval_params.contribute", {"method": Method.RETRIEVAL, "contribute": True}),
    ],
)
def test_a_parameter_outside_its_range_is_refused_by_name(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match=f"speculation.{field} must be"):
        SpeculationParams(**values)


@pytest.mark.parametrize(
    ("field", "build"),
    [
        ("card.beam_width", lambda: CardParams(beam_width=0)),
        ("card.beam_width", lambda: CardParams(beam_width=257)),
        ("card.num_children", lambda: CardParams(num_children=257)),
        ("saguaro.budget", lambda: SaguaroParams(budget=0)),
        ("saguaro.exponent", lambda: SaguaroParams(exponent=-0.1)),
        ("saguaro.exponent", lambda: SaguaroParams(exponent=math.nan)),
        ("saguaro.fan_outs", lambda: SaguaroParams(fan_outs=(1, 2))),
        ("saguaro.fan_outs", lambda: SaguaroParams(fan_out=FanOut.GIVEN)),
        (r"saguaro.fan_outs\[1\]", lambda: SaguaroParams(fan_out=FanOut.GIVEN, fan_outs=(1, -1))),
        ("saguaro.bias", lambda: SaguaroParams(bias=math.nan)),
        ("saguaro.num_biased", lambda: SaguaroParams(num_biased=65)),
        ("double.max_match_len", lambda: DoubleParams(max_match_len=11)),
        ("double.max_phrase_len", lambda: DoubleParams(max_phrase_len=17)),
        (r"double.tiers\[0\]", lambda: DoubleParams(tiers=(Source.DRAFT,))),
        ("spacelike.max_match_len", lambda: SpacelikeParams(max_match_len=11)),
        ("best_first.num_expanded", lambda: BestFirstParams(num_expanded=65)),
        ("best_first.num_children", lambda: BestFirstParams(num_children=0)),
        (r"retrieval_params.sources\[0\]", lambda: SpeculationParams(Method.RETRIEVAL, sources=(Source.TARGET,))),
        (r"retrieval_params.sources\[1\]", lambda: SpeculationParams(Method.RETRIEVAL, sources=(Source.POOL,) * 2)),
        ("retrieval_params.sources", lambda: SpeculationParams(Method.RETRIEVAL, sources=())),
        ("retrieval_params.sources", lambda: SpeculationParams(Method.DOUBLE, sources=(Source.POOL,))),
        ("rows", lambda: SpeculationParams(Method.SPACELIKE, rows=Rows.TREE)),
    ],
)
def test_a_method_s_own_parameter_is_refused_with_the_method_s_name(field: str, build: Callable[[], object]) -> None:
    with pytest.raises(InvalidParameter, match=f"speculation.{field} must be"):
        build()


@pytest.mark.parametrize("method", Method)
def test_every_method_has_defaults_that_are_valid(method: Method) -> None:
    assert SpeculationParams(method).retrieves == method.always_retrieves


def test_retrieval_may_be_added_to_every_method_that_speculates() -> None:
    for method in set(Method) - {Method.OFF}:
        wider = SpeculationParams(method, retrieval=True, retrieval_scope=RetrievalScope.GLOBAL, contribute=True)
        assert wider.retrieves


def test_two_steerings_join_to_what_they_do_one_after_the_other() -> None:
    params = SpeculationParams(Method.PEARL)
    first = Steering(params, forward_us=20_000)
    assert first.then(Steering(round_trip_us=300)) == Steering(params, 20_000, 300)
    assert first.then(Steering(SpeculationParams(), forward_us=5)) == Steering(SpeculationParams(), 5)
    assert [steering.is_pause for steering in (first, Steering(), Steering(SpeculationParams()))] == [
        False,
        False,
        True,
    ]
