"""The worth of each method: with the demo pair, at the costs of a CPU, in simulated time.

The bounds are far from the measured values (in the comments), so they hold even if floats are rounded differently."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from outrider.core.methods import AUTO, METHODS, OFF, RETRIEVAL
from outrider.core.methods.card import CardParams
from outrider.core.methods.saguaro import FanOut, SaguaroParams
from outrider.core.params import Rows, SamplingParams, Source
from outrider.core.speculation import Method, SpeculationParams
from outrider.models.demo.training.corpus import code_prompts, load_corpus
from outrider.models.loading import load_model
from outrider_bench.costs import CPU, GPU, Costs
from outrider_bench.workers.simulated_pair import Outcome, Simulation, text_of
from tests.support.services import draft_model, target_model

pytestmark = pytest.mark.slow

NUM_PROMPTS, NUM_TOKENS, CHAIN_LEN = 3, 64, 12


@cache
def texts(temperature: float) -> list[tuple[list[int], list[int]]]:
    """Held-out prompts, and the target's texts after them."""
    model, sampling = target_model(), SamplingParams(seed=0, temperature=temperature)
    codes = code_prompts(load_corpus(), NUM_PROMPTS)
    prompts = [model.tokenizer.encode(code, add_special_tokens=False) for code in codes]
    return [(prompt, text_of(model, prompt, sampling, NUM_TOKENS + CHAIN_LEN + 1)) for prompt in prompts]


FAST = Costs(target_ms={1: 8.0, 32: 9.0}, draft_ms=0.5, draft_row_ms=0.01, one_way_ms=0.45, overhead_ms=0.5)
WHERE = {
    "near": CPU,
    "slow draft": replace(GPU, draft_ms=8.0),
    "two forwards away": replace(CPU, one_way_ms=20.0),
    "twelve forwards away": replace(FAST, one_way_ms=50.0),
}


@cache
def simulated(temperature: float, params: SpeculationParams, where: str = "near") -> Outcome:
    """All prompts, after one that warms up."""
    simulation, outcome = Simulation(draft_model(), WHERE[where]), Outcome()
    sampling = SamplingParams(seed=0, temperature=temperature)
    simulation.generate(*texts(temperature)[0], sampling, params)
    for prompt, text in texts(temperature):
        time_ms, statistics = simulation.generate(prompt, text, sampling, params)
        outcome.num_tokens += NUM_TOKENS
        outcome.time_ms += time_ms
        outcome.rounds.append(statistics)
    return outcome


def of(method: Method, **fields: Any) -> SpeculationParams:
    """A method with a server's defaults."""
    return SpeculationParams(method, CHAIN_LEN, 64, 0.2, **fields)


SPECULATIVE, PEARL, CARD, SAGUARO = map(
    of, (METHODS["speculative"], METHODS["pearl"], METHODS["card"], METHODS["saguaro"])
)
BEST_FIRST, BEST_CHAIN = of(METHODS["best-first"], rows=Rows.TREE), of(METHODS["best-first"])


def test_a_round_of_plain_decoding_takes_what_it_costs() -> None:
    assert simulated(0.7, of(OFF)).throughput == pytest.approx(1e3 / 21.0)


@pytest.mark.suite
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_outcomes_that_were_drafted_for_are_faster_than_draft_then_verify(temperature: float) -> None:
    ahead, behind = simulated(temperature, SAGUARO), simulated(temperature, SPECULATIVE)
    assert ahead.throughput > 1.06 * behind.throughput  # 1.16, 1.11
    assert ahead.hit_rate > 0.65 > 0.35 > behind.hit_rate


@pytest.mark.suite
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_no_other_method_is_faster_than_best_first(temperature: float) -> None:
    best = simulated(temperature, BEST_FIRST).throughput
    for params in (SPECULATIVE, PEARL, CARD, SAGUARO, BEST_CHAIN):
        assert best > 0.95 * simulated(temperature, params).throughput, params.method


@pytest.mark.suite
def test_drafting_ahead_is_faster_than_any_draft_then_verify_where_the_draft_model_is_slow() -> None:
    # DOUBLE, Theorem 3. A chain of each length, without regard to its worth.
    fixed = {"min_path_probability": 0.0, "calibration": False}
    chains = [replace(SPECULATIVE, num_speculative_tokens=gamma, **fixed) for gamma in range(1, 6)]
    best = max(simulated(0.7, chain, "slow draft").throughput for chain in chains)
    assert simulated(0.7, PEARL, "slow draft").throughput > 1.1 * best  # 1.29
    assert simulated(0.7, SPECULATIVE, "slow draft").throughput > best  # 1.12


@pytest.mark.suite
def test_a_sub_tree_brings_more_tokens_a_forward_than_a_chain_where_the_draft_model_is_unsure() -> None:
    tree, chain = simulated(1.0, of(METHODS["best-first"], rows=Rows.TREE, max_rows=16)), simulated(1.0, BEST_CHAIN)
    assert tree.tokens_per_forward > 1.1 * chain.tokens_per_forward


@pytest.mark.suite
@pytest.mark.parametrize("params", [BEST_FIRST, CARD, SAGUARO], ids=lambda params: params.method.name)
def test_without_the_targets_noise_the_next_token_is_known_much_less_often(params: SpeculationParams) -> None:
    with_noise, without = simulated(1.0, params), simulated(1.0, replace(params, shared_noise=False))
    assert with_noise.hit_rate > 0.75  # 0.91, 0.90, 0.88
    assert without.hit_rate < with_noise.hit_rate - 0.2


@pytest.mark.suite
def test_geometric_fan_outs_know_more_than_uniform_ones_for_chains_of_a_given_length() -> None:
    paper = of(METHODS["saguaro"], shared_noise=False)
    geometric, uniform = (
        simulated(1.0, replace(paper, min_path_probability=0.0, own=(SaguaroParams(fan_out=shape),)))
        for shape in (FanOut.GEOMETRIC, FanOut.UNIFORM)
    )
    assert geometric.hit_rate > 1.1 * uniform.hit_rate


@pytest.mark.suite
def test_a_wider_beam_knows_more_and_in_the_end_takes_too_long() -> None:
    narrow, usual, wide = (simulated(0.7, of(METHODS["card"], own=(CardParams(width),))) for width in (5, 16, 200))
    assert usual.hit_rate > narrow.hit_rate
    assert wide.throughput < 0.95 * usual.throughput


@pytest.mark.parametrize(("params", "temperature"), [(BEST_FIRST, 0.0), (BEST_FIRST, 1.0), (PEARL, 1.0)])
def test_a_drafter_that_is_far_away_is_never_waited_for_in_vain(params: SpeculationParams, temperature: float) -> None:
    plain = simulated(temperature, of(OFF), "twelve forwards away").throughput
    assert simulated(temperature, params, "twelve forwards away").throughput > 0.97 * plain


HOSTILE = replace(CPU, draft_ms=20.0)
"""A draft as slow as the target."""


@pytest.mark.parametrize("one_way_ms", [0.45, 20.0])
def test_with_a_draft_that_is_slow_and_always_wrong_auto_is_as_fast_as_off(one_way_ms: float) -> None:
    untrained = load_model("demo/draft-untrained", dtype="float32")
    simulation, time_ms, draft_forwards = Simulation(untrained, replace(HOSTILE, one_way_ms=one_way_ms)), 0.0, []
    for number in range(20):
        prompt, text = texts(1.0)[number % NUM_PROMPTS]
        sampling = SamplingParams(seed=0, temperature=1.0)
        time_ms += simulation.generate(prompt, text, sampling, of(AUTO, retrieval=True))[0]
        draft_forwards.append(simulation.num_draft_forwards - sum(draft_forwards))
    assert time_ms <= 20 * NUM_TOKENS * 21.0 / 0.98
    assert draft_forwards[0] > 0
    assert sum(count == 0 for count in draft_forwards) >= 8, "where it is not tried it does nothing at all"


def test_with_a_good_draft_auto_is_nearly_as_fast_as_the_best_method() -> None:
    auto, best = (
        simulated(0.0, of(method, rows=Rows.TREE, retrieval=True)) for method in (AUTO, METHODS["best-first"])
    )
    assert auto.throughput > 0.9 * best.throughput


@pytest.mark.parametrize(("source", "least"), [(Source.RECYCLED, 1.4), (Source.POOL, 1.9)])
def test_what_the_target_has_computed_before_drafts_for_it_without_a_model(source: Source, least: float) -> None:
    prompt, text = texts(0.0)[0]
    params, sampling = of(RETRIEVAL, rows=Rows.TREE, sources=(source,)), SamplingParams(temperature=0.0)
    with pytest.raises(ValueError, match=r"a target must be given for the ratio rule, .* and for sources"):
        Simulation(draft_model(), CPU).generate(prompt, text, sampling, params)
    _, statistics = Simulation(draft_model(), CPU, target_model()).generate(prompt, text, sampling, params)
    assert NUM_TOKENS / statistics.num_rounds > least  # 1.8, 2.7
    assert statistics.accepted_by_source.keys() == {source}


def test_a_round_trip_of_two_forwards_costs_a_third_at_most() -> None:
    near, far = simulated(0.0, BEST_FIRST), simulated(0.0, BEST_FIRST, "two forwards away")
    assert far.throughput > 0.62 * near.throughput  # 0.70
