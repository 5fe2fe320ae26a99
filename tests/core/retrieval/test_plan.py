"""What each side of a session looks up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.core.methods import BEST_FIRST, DOUBLE, METHODS, OFF, PEARL, RETRIEVAL, SPACELIKE
from outrider.core.methods.double import DoubleParams
from outrider.core.methods.spacelike import SpacelikeParams
from outrider.core.params import TIERS, AcceptanceRule, Rows, Source
from outrider.core.retrieval.plan import CONTEXT_LEN, NGRAM_ORDER, RetrievalPlan
from outrider.core.retrieval.sides import draft_plan, target_plan
from outrider.core.speculation import Method, SpeculationParams


@pytest.mark.parametrize("method", [method for method in METHODS.values() if not method.always_retrieves])
def test_a_method_that_does_not_always_retrieve_does_so_where_it_is_asked_to(method: Method) -> None:
    assert target_plan(SpeculationParams(method)) is None
    assert draft_plan(SpeculationParams(method)) is None
    if method is not OFF:
        asked = SpeculationParams(method, retrieval=True)
        assert target_plan(asked) == draft_plan(asked) == RetrievalPlan(NGRAM_ORDER, CONTEXT_LEN, TIERS)


def test_sources_are_looked_up_in_their_order_and_those_of_the_verifier_on_its_side_alone() -> None:
    sources = (Source.POOL, Source.RING, Source.RECYCLED, Source.PRIOR)
    params = SpeculationParams(PEARL, retrieval=True, sources=sources)
    target, draft = target_plan(params), draft_plan(params)
    assert target is not None
    assert draft is not None
    assert (target.sources, target.tiers) == (sources, (Source.RING, Source.PRIOR))
    assert draft.sources == draft.tiers == (Source.RING, Source.PRIOR)
    assert draft_plan(replace(params, sources=(Source.POOL,))) is None


def test_a_tree_grows_where_rows_may_branch_and_nothing_drafts_or_the_verifiers_own_sources_are_asked() -> None:
    def has_branches(method: Method, rows: Rows, *sources: Source) -> bool:
        plan = target_plan(SpeculationParams(method, retrieval=True, rows=rows, sources=sources or TIERS))
        assert plan is not None
        return plan.has_branches

    assert has_branches(RETRIEVAL, Rows.TREE)
    assert has_branches(BEST_FIRST, Rows.TREE, Source.POOL)
    assert not has_branches(BEST_FIRST, Rows.TREE), "the tiers continue the drafted path"
    assert not has_branches(RETRIEVAL, Rows.CHAIN, Source.RECYCLED)


def test_the_tiers_of_double_are_a_set() -> None:
    plans = [
        target_plan(SpeculationParams(DOUBLE, own=(DoubleParams(tiers=tiers),)))
        for tiers in (TIERS, tuple(reversed(TIERS)))
    ]
    assert plans[0] == plans[1]


def test_without_a_draft_model_nothing_is_looked_up_on_the_draft_s_side() -> None:
    for method in (RETRIEVAL, SPACELIKE):
        assert target_plan(SpeculationParams(method)) is not None
        assert draft_plan(SpeculationParams(method)) is None


def test_double_looks_up_on_both_sides_as_its_parameters_say() -> None:
    tiers = (Source.PRIOR, Source.REJECTED)
    double = DoubleParams(max_match_len=7, max_phrase_len=3, tiers=tiers)
    params = SpeculationParams(DOUBLE, own=(double,))
    plan = RetrievalPlan(7, 7, tiers, 3)
    assert draft_plan(params) == plan
    assert target_plan(params) == replace(plan, max_tail_len=3)
    assert plan.is_in_process


def test_each_side_of_double_can_do_without() -> None:
    params = SpeculationParams(DOUBLE, own=(DoubleParams(draft_retrieval=False),))
    assert draft_plan(params) is None
    assert target_plan(params) is not None
    params = SpeculationParams(DOUBLE, own=(DoubleParams(target_retrieval=False),))
    assert draft_plan(params) is not None
    assert target_plan(params) is None


def test_spacelike_asks_the_ring_alone_and_looks_ahead() -> None:
    whole = target_plan(SpeculationParams(SPACELIKE, 7, 7, own=(SpacelikeParams(6, whole_runs=True),)))
    assert whole == RetrievalPlan(6, 6, (Source.RING,), whole_run_len=7, looks_ahead=True)
    plan = target_plan(SpeculationParams(SPACELIKE, own=(SpacelikeParams(6),)))
    assert plan == RetrievalPlan(6, 6, (Source.RING,), looks_ahead=True)
    assert not plan.is_in_process


def test_a_remote_session_looks_no_tier_up_in_process_and_its_drafts_wait_for_none() -> None:
    for method in (PEARL, RETRIEVAL):
        params = SpeculationParams(method, retrieval=True, remote=True)
        assert target_plan(params) == RetrievalPlan(is_remote=True, looks_ahead=True)
        assert draft_plan(params) is None


@pytest.mark.parametrize("method", [PEARL, DOUBLE])
def test_guesses_know_the_target_s_noise_only_where_they_may(method: Method) -> None:
    for rule in AcceptanceRule:
        for shared_noise in (False, True):
            params = SpeculationParams(method, retrieval=True, acceptance_rule=rule, shared_noise=shared_noise)
            for plan in (target_plan(params), draft_plan(params)):
                assert plan is not None
                assert plan.is_ranked_by_noise == (shared_noise and rule is AcceptanceRule.MATCH)
