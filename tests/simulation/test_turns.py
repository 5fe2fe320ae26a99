"""Turns in simulated time, with the demo pair."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from typing import Any

import pytest

from outrider.core.params import InvalidParameter
from outrider_bench.costs import GPU, Costs
from outrider_bench.samples import GenerationSample, Request, generation_from_json
from outrider_bench.workers.simulated import SimulatedPair
from tests.support.services import draft_model, target_model

pytestmark = pytest.mark.slow

REQUESTS = [Request(f"def {name}(text):\n    ", 0.7, seed, 16) for seed, name in enumerate(("parse", "count"))]
CHAINS = {"method": "speculative", "num_speculative_tokens": 4, "min_path_probability": 0.0}


@cache
def plain(num_at_once: int = 2) -> tuple[float, list[GenerationSample]]:
    """The turn of plain decoding."""
    return take({"method": "off"}, num_at_once)


def take(options: dict[str, Any], num_at_once: int = 2, costs: Costs = GPU) -> tuple[float, list[GenerationSample]]:
    """A turn of a new pair: the simulated time, and the generations."""
    pair = SimulatedPair(target_model(), draft_model())
    answer = pair.take_turn("some", options, costs.to_json(), [asdict(each) for each in REQUESTS], num_at_once)
    return answer["time_ms"], [generation_from_json(each) for each in answer["generations"]]


def test_a_draft_changes_the_time_and_not_the_text() -> None:
    (slow, undrafted), (fast, drafted) = plain(), take(CHAINS)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in undrafted]
    assert [len(each.token_ids) for each in undrafted] == [16, 16]
    assert undrafted[0].token_ids != undrafted[1].token_ids
    assert fast < slow


def test_a_turn_takes_the_same_time_on_every_machine() -> None:
    assert take(CHAINS) == take(CHAINS)


def test_generations_at_once_share_the_forwards_and_so_the_time() -> None:
    (together, _), (alone, generations) = plain(), plain(num_at_once=1)
    assert together < 0.6 * alone
    assert generations[0].duration_s == pytest.approx(alone / 1e3)


def test_tokens_are_judged_up_to_the_first_that_is_refused() -> None:
    _, generations = take(CHAINS)
    for each in generations:
        rounds = each.rounds
        assert rounds.num_judged is not None
        assert rounds.num_accepted <= rounds.num_judged <= rounds.num_accepted + rounds.num_rounds
        assert rounds.num_judged <= rounds.num_drafted


def test_under_the_ratio_rule_drafts_decide_the_text_and_the_target_runs() -> None:
    _, undrafted = plain()
    _, drafted = take(CHAINS | {"acceptance_rule": "ACCEPTANCE_RULE_RATIO"})
    assert [len(each.token_ids) for each in drafted] == [16, 16]
    assert [each.token_ids for each in drafted] != [each.token_ids for each in undrafted]


def test_greedily_both_rules_keep_the_same_tokens() -> None:
    greedy = [asdict(replace(each, temperature=0.0)) for each in REQUESTS[:1]]
    pair = SimulatedPair(target_model(), draft_model())
    match, ratio = (
        pair.take_turn("some", CHAINS | rule, GPU.to_json(), greedy, 1)["generations"][0]
        for rule in ({}, {"acceptance_rule": "ACCEPTANCE_RULE_RATIO"})
    )
    assert ratio["token_ids"] == match["token_ids"]
    assert ratio["rounds"]["num_accepted"] == match["rounds"]["num_accepted"] > 0


def test_what_a_server_refuses_is_refused_here() -> None:
    with pytest.raises(InvalidParameter, match=r"speculation\.saguaro\.bias must be unset"):
        take({"method": "saguaro", "saguaro": {"bias": 0.5}})


@pytest.mark.suite
def test_on_a_near_line_the_beam_is_cut_in_the_first_rounds_alone() -> None:
    wide = {"method": "card", "card": {"beam_width": 64}}
    (_, near), (_, far) = take(wide), take(wide, costs=replace(GPU, one_way_ms=10.0))
    withheld = [sum(each.rounds.num_withheld_nodes or 0 for each in found) for found in (near, far)]
    assert 0 < withheld[0] < 0.6 * withheld[1]


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_service_that_contributes_answers_what_was_asked_before_in_fewer_rounds(is_whole: bool) -> None:
    pair, rounds = SimulatedPair(target_model(), draft_model()), {}
    for contributes in (True, False):
        retrieval = {"scope": "RETRIEVAL_SCOPE_TENANT", "contribute": contributes}
        options = {"method": "spacelike", "retrieval_params": retrieval, "spacelike": {"whole_runs": is_whole}}
        again = [asdict(REQUESTS[0])]
        turns = [pair.take_turn("some", options, GPU.to_json(), again, 1) for _ in range(2)]
        rounds[contributes] = [generation_from_json(turn["generations"][0]).rounds for turn in turns]
    first, second = rounds[True]
    assert second.num_rounds < 0.5 * first.num_rounds
    assert second.accepted_by_source == {"ring": second.num_accepted}
    assert rounds[False][1].num_rounds == rounds[False][0].num_rounds
    # Another experiment starts over.
    options = options | {"retrieval_params": {"scope": "RETRIEVAL_SCOPE_TENANT", "contribute": True}}
    other = pair.take_turn("another", options, GPU.to_json(), again, 1)
    assert generation_from_json(other["generations"][0]).rounds.num_rounds == first.num_rounds
