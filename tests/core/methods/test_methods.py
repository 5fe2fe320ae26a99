"""Every method with a draft model has a growth policy, by its parameters."""

from __future__ import annotations

import math

import pytest

from outrider.core.methods import GROWTH_POLICIES, growth_policy
from outrider.core.methods.best_first import BestFirstGrowth
from outrider.core.methods.best_path import BestPathGrowth
from outrider.core.methods.chain import ChainGrowth, SampledChainGrowth
from outrider.core.params import AcceptanceRule, BestFirstParams, DoubleParams, Method, SpeculationParams

GAMMA, LOOKAHEAD = 4, 16
SERIAL = DoubleParams(serial=True)


def params(method: Method, double: DoubleParams | None = None, **fields: object) -> SpeculationParams:
    return SpeculationParams(method, GAMMA, LOOKAHEAD, 0.25, double=double or DoubleParams(), **fields)  # type: ignore[arg-type]


def test_double_grows_as_pearl_does() -> None:
    policy = growth_policy(params(Method.DOUBLE))
    assert policy == growth_policy(params(Method.PEARL))
    assert isinstance(policy, ChainGrowth)
    assert policy.max_depth == LOOKAHEAD


def test_where_draft_and_target_take_turns_double_grows_as_speculative_does() -> None:
    policy = growth_policy(params(Method.DOUBLE, SERIAL))
    assert (
        policy == growth_policy(params(Method.SPECULATIVE)) == ChainGrowth(GAMMA, math.log(0.25), GAMMA, math.log(0.25))
    )


@pytest.mark.parametrize(("serial", "kind"), [(False, BestFirstGrowth), (True, BestPathGrowth)])
def test_best_first_grows_one_path_where_draft_and_target_take_turns(*, serial: bool, kind: type) -> None:
    own = BestFirstParams(serial=serial)
    assert isinstance(growth_policy(params(Method.BEST_FIRST, best_first=own)), kind)


@pytest.mark.parametrize("double", [DoubleParams(), SERIAL], ids=["ahead", "serial"])
def test_under_the_ratio_rule_the_chain_is_one_of_samples(double: DoubleParams) -> None:
    policy = growth_policy(params(Method.DOUBLE, double, acceptance_rule=AcceptanceRule.RATIO))
    assert isinstance(policy, SampledChainGrowth)


def test_every_method_that_needs_a_draft_model_has_a_policy() -> None:
    assert set(GROWTH_POLICIES) == {method for method in Method if method.needs_draft_model}
