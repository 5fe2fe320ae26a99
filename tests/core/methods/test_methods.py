"""Methods by their own description: how each one grows, waits, and combines with others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from outrider.core.methods import (
    AUTO,
    BEST_FIRST,
    CARD,
    DOUBLE,
    METHODS,
    OFF,
    OPT_TREE,
    PEARL,
    RETRIEVAL,
    SAGUARO,
    SEQUOIA,
    SPACELIKE,
    SPECULATIVE,
    growth_policy,
)
from outrider.core.methods.best_first import BestFirstGrowth, BestFirstParams
from outrider.core.methods.best_path import BestPathGrowth
from outrider.core.methods.card import CardParams
from outrider.core.methods.chain import ChainGrowth, SampledChainGrowth
from outrider.core.methods.double import DoubleParams
from outrider.core.methods.saguaro import SaguaroParams
from outrider.core.methods.spacelike import SpacelikeParams
from outrider.core.params import AcceptanceRule, InvalidParameter, RetrievalScope
from outrider.core.speculation import Fallback, Method, MethodParams, SpeculationParams, Waiting

GAMMA, LOOKAHEAD = 4, 16
SERIAL = DoubleParams(serial=True)


def params(method: Method, *own: MethodParams, **fields: object) -> SpeculationParams:
    return SpeculationParams(method, GAMMA, LOOKAHEAD, 0.25, own=own, **fields)  # type: ignore[arg-type]


def test_double_grows_as_pearl_does() -> None:
    policy = growth_policy(params(DOUBLE))
    assert policy == growth_policy(params(PEARL))
    assert isinstance(policy, ChainGrowth)
    assert policy.max_depth == LOOKAHEAD


def test_where_draft_and_target_take_turns_double_grows_as_speculative_does() -> None:
    policy = growth_policy(params(DOUBLE, SERIAL))
    assert policy == growth_policy(params(SPECULATIVE)) == ChainGrowth(GAMMA, math.log(0.25), GAMMA, math.log(0.25))


@pytest.mark.parametrize(("serial", "kind"), [(False, BestFirstGrowth), (True, BestPathGrowth)])
def test_best_first_grows_one_path_where_draft_and_target_take_turns(*, serial: bool, kind: type) -> None:
    assert isinstance(growth_policy(params(BEST_FIRST, BestFirstParams(serial=serial))), kind)


@pytest.mark.parametrize("double", [DoubleParams(), SERIAL], ids=["ahead", "serial"])
def test_under_the_ratio_rule_the_chain_is_one_of_samples(double: DoubleParams) -> None:
    policy = growth_policy(params(DOUBLE, double, acceptance_rule=AcceptanceRule.RATIO))
    assert isinstance(policy, SampledChainGrowth)


def test_what_a_method_needs_follows_from_how_it_grows() -> None:
    methods = set(METHODS.values())
    with_model = {m for m in methods if m.has_draft_model}
    assert not with_model & {OFF, RETRIEVAL, SPACELIKE}
    assert {m for m in methods if m.needs_draft_model} == with_model - {AUTO}, "auto can do without"
    assert not any(m.drafts_ahead for m in (SPECULATIVE, OPT_TREE, SEQUOIA, RETRIEVAL))
    assert all(m.drafts_ahead for m in (PEARL, CARD, SAGUARO, DOUBLE, BEST_FIRST, AUTO))
    assert {m for m in methods if m.needs_datastore} == {SPACELIKE}
    assert {m for m in methods if m.is_off} == {OFF}
    assert {m for m in methods if m.is_auto} == {AUTO}
    assert not any(m.samples and not m.has_draft_model for m in methods)


@pytest.mark.parametrize("method", METHODS.values())
def test_every_method_has_defaults_that_are_valid(method: Method) -> None:
    assert SpeculationParams(method).retrieves == method.always_retrieves


def test_retrieval_may_be_added_to_every_method_that_speculates() -> None:
    for method in set(METHODS.values()) - {OFF}:
        wider = SpeculationParams(method, retrieval=True, retrieval_scope=RetrievalScope.GLOBAL, contribute=True)
        assert wider.retrieves


def test_how_a_round_waits_is_the_methods_own() -> None:
    waiting = {method: method.waits(SpeculationParams(PEARL)) for method in METHODS.values()}
    assert waiting[OFF] is Waiting.NEVER
    assert all(waiting[m] is Waiting.IN_TURNS for m in (SPECULATIVE, OPT_TREE, SEQUOIA))
    assert all(waiting[m] is Waiting.WORTH for m in (PEARL, CARD, BEST_FIRST, DOUBLE))


@pytest.mark.parametrize(
    ("fallback", "expected"),
    [
        (Fallback.AUTO, Waiting.BY_BATCH),
        (Fallback.DRAFT, Waiting.ALWAYS),
        (Fallback.RETRIEVAL, Waiting.NEVER),
        (Fallback.PLAIN, Waiting.NEVER),
        (Fallback.RANDOM, Waiting.NEVER),
    ],
)
def test_saguaros_fallback_says_what_a_miss_is_worth(fallback: Fallback, expected: Waiting) -> None:
    assert SAGUARO.waits(params(SAGUARO, SaguaroParams(fallback=fallback), retrieval=True)) is expected


@pytest.mark.parametrize(("serial", "waiting"), [(False, Waiting.WORTH), (True, Waiting.IN_TURNS)])
def test_draft_and_target_take_turns_where_the_method_is_serial(*, serial: bool, waiting: Waiting) -> None:
    own = (BestFirstParams(serial=serial), DoubleParams(serial=serial))
    # `auto` has the parameters of all its methods.
    for method in (BEST_FIRST, DOUBLE, AUTO):
        assert BEST_FIRST.waits(params(method, *own)) is waiting
        assert DOUBLE.waits(params(method, *own)) is waiting
        assert PEARL.waits(params(method, *own)) is Waiting.WORTH


def test_own_parameters_that_are_the_defaults_are_those_that_are_not_given() -> None:
    assert params(CARD, CardParams()) == params(CARD)
    card, double = CardParams(beam_width=3), DoubleParams(serial=True)
    assert params(AUTO, card, double) == params(AUTO, double, card)
    assert params(AUTO, card).with_own(double, CardParams(4)).of(CardParams) == CardParams(4)
    assert params(AUTO, card).of(DoubleParams) == DoubleParams()


def test_what_means_nothing_by_the_match_rule_has_its_default_there() -> None:
    own = SaguaroParams(budget=3, bias=0.5, num_biased=2)
    matched = params(SAGUARO, own, acceptance_rule=AcceptanceRule.RATIO).by_match()
    assert (matched.is_ratio, matched.of(SaguaroParams)) == (False, SaguaroParams(budget=3))


@pytest.mark.parametrize(
    ("field", "build"),
    [
        ("card.beam_width", lambda: CardParams(beam_width=0)),
        ("card.beam_width", lambda: CardParams(beam_width=257)),
        ("saguaro.budget", lambda: SaguaroParams(budget=0)),
        ("saguaro.exponent", lambda: SaguaroParams(exponent=math.nan)),
        ("saguaro.bias", lambda: SaguaroParams(bias=math.nan)),
        ("saguaro.num_biased", lambda: SaguaroParams(num_biased=65)),
        ("double.max_phrase_len", lambda: DoubleParams(max_phrase_len=17)),
        ("spacelike.max_match_len", lambda: SpacelikeParams(max_match_len=11)),
        ("best_first.num_children", lambda: BestFirstParams(num_children=0)),
    ],
)
def test_a_method_s_own_parameter_is_refused_with_the_method_s_name(field: str, build: Callable[[], object]) -> None:
    with pytest.raises(InvalidParameter, match=f"speculation.{field} must be"):
        build()
