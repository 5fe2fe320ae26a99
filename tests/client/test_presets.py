"""A method as published: which parameters are fixed, which may be tuned, and which are refused."""

from __future__ import annotations

from typing import Any, cast

import pytest

from outrider.core.methods import AUTO, METHODS
from outrider.core.methods.card import CardParams
from outrider.core.methods.double import DoubleParams
from outrider.core.methods.spacelike import SpacelikeParams
from outrider.core.params import AcceptanceRule, Rows
from outrider.core.speculation import SpeculationLimits, SpeculationParams
from outrider.v1 import types_pb2
from outrider.wire.speculation import speculation_from_proto
from outrider_client.requests import GenerateOptions, generate_request

PAPERS = ("speculative", "card", "saguaro", "double", "spacelike")


def sent(**options: Any) -> types_pb2.SpeculationParams:
    return generate_request("hello", cast(GenerateOptions, {"as_published": True, **options})).speculation


def resolved(**options: Any) -> SpeculationParams:
    """The parameters as a server reads them, with Outrider's own defaults."""
    defaults = SpeculationParams(AUTO, 12, 64, 0.2, rows=Rows.TREE)
    return speculation_from_proto(sent(**options), defaults, SpeculationLimits())


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if method.published])
def test_every_preset_is_served_and_has_nothing_of_what_outrider_adds_to_all_methods(method: str) -> None:
    params = resolved(method=method)
    assert params.method is METHODS[method]
    assert not params.calibration
    if params.method.has_draft_model:
        assert not params.shared_noise
        assert params.min_path_probability == 0


def test_each_of_the_five_papers_has_a_preset() -> None:
    sampled = {method for method in PAPERS if resolved(method=method).acceptance_rule is AcceptanceRule.RATIO}
    assert sampled == {"speculative", "saguaro", "double"}


def test_a_preset_has_the_paper_s_numbers() -> None:
    card = resolved(method="card").of(CardParams)
    assert (card.beam_width, card.num_children, card.refill, card.correction) == (50, 50, False, True)
    params = resolved(method="double")
    double = params.of(DoubleParams)
    assert (params.num_speculative_tokens, double.max_match_len, double.max_phrase_len) == (5, 3, 10)
    assert [tier.name for tier in double.tiers] == ["PRIOR", "DYNAMIC", "REJECTED"]
    assert resolved(method="spacelike").of(SpacelikeParams).whole_runs
    assert resolved(method="opt-tree").rows is Rows.TREE


def test_what_the_paper_tunes_may_be_tuned() -> None:
    params = resolved(method="card", num_speculative_tokens=3, lookahead=9, card={"beam_width": 100})
    assert (params.num_speculative_tokens, params.lookahead) == (3, 9)
    assert params.of(CardParams) == CardParams(100, 50, refill=False)


def test_what_agrees_with_the_preset_may_be_said() -> None:
    assert sent(method="card", calibration=False, card={"refill": False}) == sent(method="card")
    assert sent(method="double", retrieval_scope="session") == sent(method="double")


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"method": "card", "calibration": True}, "calibration false, which as_published and calibration true contradict"),
    ({"method": "card", "card": {"refill": True}}, "card.refill false, which as_published and card.refill true"),
    ({"method": "card", "shared_noise": True}, "method card as published has shared_noise false, which as_published"),
    ({"method": "speculative", "acceptance_rule": "match"}, "acceptance_rule ratio, which .* acceptance_rule match"),
    ({"method": "speculative", "retrieval": True}, "retrieval false, which as_published and retrieval true"),
    ({"method": "saguaro", "saguaro": {"fan_out": "uniform"}}, "fan_out geometric, which .* saguaro.fan_out uniform"),
    ({"method": "double", "double": {"tiers": ["ring"]}}, "tiers prior, dynamic, rejected, which .* double.tiers ring"),
    ({"method": "double", "rows": "tree"}, "rows chain, which as_published and rows tree contradict"),
    ({"method": "auto"}, "as_published must come with one of the methods speculative, card, .*, got auto"),
    ({}, "as_published must come with one of the methods .*, got none"),
]


@pytest.mark.parametrize(("options", "message"), CONTRADICTIONS, ids=[message[:50] for _, message in CONTRADICTIONS])
def test_what_contradicts_the_preset_is_refused_and_both_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sent(**options)


def test_without_as_published_nothing_is_added() -> None:
    assert generate_request("hello", {"method": "card"}).speculation == types_pb2.SpeculationParams(
        method=types_pb2.METHOD_CARD
    )
