"""The parts of the methods' suite in simulated time: their plan, their claims, their pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from matplotlib import pyplot as plt

from outrider_bench.config import PARTS, SIMULATED_PARTS, MethodsConfig
from outrider_bench.experiment import OFF, label_of
from outrider_bench.measured import Measured
from outrider_bench.result import MET, MISSED, NOT_MEASURED, Measurement
from outrider_bench.samples import Block
from outrider_bench.suites.methods import papers
from outrider_bench.suites.methods.claims import claims_of
from outrider_bench.suites.methods.estimate import total_seconds
from outrider_bench.suites.methods.experiments import QUICK, MethodsSizes, experiments_of, sizes_of
from outrider_bench.suites.methods.figures import figures_of
from outrider_bench.suites.methods.replay import NEAR
from outrider_bench.suites.methods.simulated import batch, card, double, saguaro, spacelike, speculative
from outrider_bench.suites.methods.simulated.sizes import SimulatedSizes
from outrider_bench.suites.methods.suite import MethodsSuite
from tests.bench.experiment_samples import evidence, made, ran

BUDGET_S = 40 * 60.0
SIZES = SimulatedSizes()


def claim(claims: Sequence[Measurement], what: str) -> Measurement:
    [found] = [each for each in claims if each.name == what]
    return found


@pytest.mark.slow
def test_a_whole_run_in_simulated_time_fits_into_40_minutes() -> None:
    experiments = experiments_of(SIMULATED_PARTS, MethodsSizes(), MethodsConfig().repeats)
    assert total_seconds(experiments, MethodsSizes()) <= BUDGET_S
    assert {experiment.part for experiment in experiments} == set(SIMULATED_PARTS)


def test_a_quick_run_in_simulated_time_is_a_small_part_of_a_whole_one() -> None:
    seconds = [total_seconds(experiments_of(SIMULATED_PARTS, sizes, 1), sizes) for sizes in (QUICK, MethodsSizes())]
    assert seconds[0] < 0.05 * seconds[1]


@pytest.mark.slow
def test_parts_in_simulated_time_are_run_where_they_are_named() -> None:
    assert not set(SIMULATED_PARTS) & set(MethodsConfig().parts)
    assert MethodsSuite(MethodsConfig(parts=SIMULATED_PARTS)).experiments
    assert all(one.costs is None for one in experiments_of(PARTS, MethodsSizes(), 3))


def test_experiments_in_simulated_time_have_costs_a_dozen_prompts_and_names_of_their_own() -> None:
    experiments = experiments_of(SIMULATED_PARTS, MethodsSizes(), 3)
    names = [one.name for one in experiments]
    assert len(set(names)) == len(names)
    for one in experiments:
        assert one.costs is not None
        assert len(one.prompts) >= 12
        labels = [label_of(each) for each in one.contenders]
        assert len(set(labels)) == len(labels), one.name
        assert OFF in labels


def test_what_was_never_simulated_claims_nothing() -> None:
    claims = claims_of(SIMULATED_PARTS, evidence({}))
    assert {each.verdict for each in claims} == {NOT_MEASURED}
    assert {each.part for each in claims} == set(SIMULATED_PARTS)
    names = [(each.part, each.name) for each in claims]
    assert len(set(names)) == len(names)
    # A figure without its place cannot be looked up.
    assert all(each.paper.endswith(")") for each in claims if each.paper != papers.NONE)


def rounds(hit_rate: float = 0.0, acceptance: float = 0.5) -> dict[str, Any]:
    return {
        "num_rounds": 10_000,
        "num_empty": 0,
        "num_drafted": 2000,
        "num_draft_rows": 100,
        "num_withheld_nodes": 10,
        "num_hits": 10_000,
        "num_ready_hits": round(1e4 * hit_rate),
        "num_judged": 1000,
        "num_accepted": round(1000 * acceptance),
    }


def budgets(hit_rates: Mapping[int, float]) -> Measured:
    """A hit rate for each budget, at T = 1 without shared noise."""
    blocks = [
        ran(f"saguaro no shared noise, B = {budget}", 1.0, made(1.0, **rounds(rate)))
        for budget, rate in hit_rates.items()
    ]
    return Measured({saguaro.BUDGET: blocks})


def test_misses_that_fall_like_a_power_have_its_exponent() -> None:
    claims = saguaro.claims(budgets({budget: 1 - 0.8 * budget**-0.5 for budget in SIZES.budgets}), SIZES)
    exponent = claim(claims, "T = 1: no shared noise, misses by B, exponent r")
    fit = claim(claims, "T = 1: no shared noise, misses by B, R2 of the power law")
    assert exponent.value == pytest.approx(0.5, abs=1e-3)
    assert (exponent.verdict, fit.verdict) == (MET, MET)
    assert claim(claims, "T = 0.7: no shared noise, misses by B, exponent r").verdict == NOT_MEASURED


def test_misses_that_do_not_fall_with_the_budget_miss_both_claims() -> None:
    up_and_down = {budget: 0.5 + 0.2 * (-1) ** number for number, budget in enumerate(SIZES.budgets)}
    claims = saguaro.claims(budgets(up_and_down), SIZES)
    assert claim(claims, "T = 1: no shared noise, misses by B, R2 of the power law").verdict == MISSED
    worse = saguaro.claims(budgets({budget: 1 - 0.1 * budget**0.5 for budget in SIZES.budgets}), SIZES)
    assert claim(worse, "T = 1: no shared noise, misses by B, exponent r").verdict == MISSED


@pytest.mark.parametrize(("hits", "acceptance", "verdicts"), [(0.6, 0.4, (MET, MET)), (0.2, 0.6, (MISSED, MISSED))])
def test_a_bias_trades_acceptance_for_hits(hits: float, acceptance: float, verdicts: tuple[str, str]) -> None:
    blocks = [
        ran("saguaro C = 1", 1.0, made(1.0, **rounds(0.3, 0.5))),
        ran("saguaro C = 0.25", 1.0, made(1.0, **rounds(hits, acceptance))),
    ]
    claims = saguaro.claims(Measured({saguaro.BIAS: blocks}), SIZES)
    up, down = (claim(claims, f"T = 1: C = 0.25 by 1, {what}") for what in ("hit rate (up)", "acceptance (down)"))
    assert (up.verdict, down.verdict) == verdicts
    assert up.value == pytest.approx(hits / 0.3)


def at_once(name: str, count: int, seconds: float) -> list[Block]:
    blocks = [ran(f"saguaro fallback {name}", saguaro.FALLBACK_TEMPERATURE, made(seconds), repeat=k) for k in range(3)]
    return [replace(each, condition=replace(each.condition, concurrency=count)) for each in blocks]


def test_drafting_after_a_miss_pays_alone_and_random_tokens_pay_in_a_batch() -> None:
    seconds = {("draft", 1): 1.0, ("random", 1): 2.0, ("auto", 1): 1.0}
    seconds |= {("draft", 16): 3.0, ("random", 16): 2.0, ("auto", 16): 2.5}
    blocks = [each for (name, count), one in seconds.items() for each in at_once(name, count, one)]
    claims = saguaro.claims(Measured({saguaro.FALLBACK: blocks}), SIZES)
    alone, batch = (claim(claims, f"{count} at once: random by draft") for count in (1, 16))
    assert (alone.value, alone.verdict) == (0.5, MET)
    assert (batch.value, batch.verdict) == (1.5, MET)
    auto = claim(claims, "16 at once: auto by the best other")
    assert (auto.value, auto.verdict) == (0.8, MISSED)
    assert auto.remark.startswith("best of them: saguaro fallback random; not measured: ")


def test_query_only_has_the_share_of_the_paper_or_misses_it() -> None:
    blocks = [
        ran(label, t, made(seconds))
        for label, seconds in (("off", 10.0), ("card query only", 4.0), ("card", 3.0))
        for t in card.TEMPERATURES
    ]
    claims = card.claims(Measured({card.PARTS_OF_CARD: blocks}), SIZES)
    share, cache = (claim(claims, f"T = 0: query only{what}") for what in (", share of both", " by off"))
    assert (share.value, share.verdict, cache.value, cache.verdict) == (0.75, MET, 2.5, MET)
    assert share.paper.startswith("30.23 by 41.34 tokens/s = 73 %")


def test_the_cost_of_a_beam_is_parameters_by_rows_for_each_token() -> None:
    counts = {"num_draft_rows": 5000, "num_draft_forwards": 100, "num_withheld_nodes": 20, "num_drafted": 40}
    block = ran("card K = 64", card.WIDTH_TEMPERATURE, made(1.0, num_rounds=10, num_empty=0, **counts))
    claims = card.claims(Measured({card.WIDTH: [block]}), SIZES)
    values = {each.name.removeprefix("T = 0.7, K = 64: "): each.value for each in claims if "K = 64: " in each.name}
    assert values["rows of a draft forward"] == 50
    assert values["draft, Params x L_new by token"] == pytest.approx(1.2 * 50)
    assert values["target, Params x L_new by token"] == pytest.approx(99.3 * 0.5)
    assert values["nodes held back for a time, by token"] == 0.2


def of_double(label: str, seconds: float, rejected: int = 0, **counts: Any) -> Block:
    sources = {"draft": 20, "prior": 10, "dynamic": 10, "rejected": rejected}
    return ran(label, 1.0, made(seconds, tokens=100, accepted_by_source=sources, **counts))


def test_a_part_of_double_is_worth_what_double_loses_without_it() -> None:
    by_label = {"off": 4.0, "pearl": 2.0, "double": 1.0, "double no target retrieval": 1.5, "double no prior": 0.8}
    blocks = [of_double(label, seconds) for label, seconds in by_label.items()]
    claims = double.claims(Measured({double.PARTS_OF_DOUBLE: blocks}), SIZES)
    tails, prior = (claim(claims, f"T = 1: double by double with no {what}") for what in ("target retrieval", "prior"))
    assert (tails.value, tails.verdict) == (1.5, MET)
    assert tails.paper.startswith("11.5 to 14.35 accepted tokens")
    assert (prior.value, prior.verdict) == (0.8, MISSED)
    assert claim(claims, "T = 1: pearl by off stays below C").verdict == MET
    assert claim(claims, "T = 1: double by pearl").value == 2
    assert claim(claims, "T = 0: double by pearl").verdict == NOT_MEASURED


@pytest.mark.parametrize(("rejected", "verdict"), [(9, MET), (4, MISSED)])
def test_the_rejected_tier_brings_so_many_more_retrieved_tokens(rejected: int, verdict: str) -> None:
    counts = {"num_tail_tokens": 7, "num_phrase_tokens": 30, "num_draft_forwards": 20}
    blocks = [of_double("double", 1.0, rejected, **counts), of_double("double no rejected tier", 1.0, **counts)]
    claims = double.claims(Measured({double.REJECTED_TIER: blocks}), SIZES)
    more = claim(claims, "T = 1: retrieved tokens, with the rejected tier by without")
    assert (more.value, more.verdict) == (pytest.approx(1 + rejected / 50), verdict)
    assert claim(claims, "T = 1: tokens kept behind a draft, by token").value == pytest.approx(0.07)
    assert claim(claims, "T = 1: retrieved tokens of a draft forward (AMT)").value == pytest.approx(1.5)


def test_depth_saturates_where_the_greatest_brings_no_more_tokens() -> None:
    for accepted, verdict in ((200, MET), (400, MISSED)):
        blocks = [
            ran(f"double d = {depth}", 0.7, made(seconds, num_rounds=100, num_accepted=kept))
            for depth, seconds, kept in ((1, 2.0, 100), (10, 1.0, 200), (16, 1.1, accepted))
        ]
        claims = double.claims(Measured({double.DEPTH: blocks}), SIZES)
        assert claim(claims, "T = 0.7: tokens per forward, d = 16 by d = 10 (saturates)").verdict == verdict
        best = claim(claims, "T = 0.7: the best d by d = 1")
        assert (best.value, best.verdict, best.remark) == (2.0, MET, "best: double d = 10")


def test_a_batch_is_held_beside_as_many_plain_generations() -> None:
    seconds = {"off": 4.0, "double": 2.0, "best-first": 1.0, "auto": 1.25}
    blocks = [ran(label, batch.TEMPERATURE, made(each), repeat=k) for label, each in seconds.items() for k in range(3)]
    blocks = [replace(each, condition=replace(each.condition, concurrency=16)) for each in blocks]
    claims = batch.claims(Measured({batch.PART: blocks}), SIZES)
    assert claim(claims, "16 at once: double by off").value == 2
    assert claim(claims, "16 at once: auto by off").verdict == MET
    auto = claim(claims, "16 at once: auto by the best fixed method")
    assert (auto.value, auto.verdict) == (0.8, MISSED)
    assert auto.remark.startswith("best of them: best-first; not measured: speculative, pearl, ")
    assert claim(claims, "1 at once: double by off").verdict == NOT_MEASURED


@pytest.mark.parametrize(("tokens", "verdict"), [(3.36, MET), (2.0, MISSED)])
def test_a_round_has_the_predicted_tokens_or_misses_them(tokens: float, verdict: str) -> None:
    # 80 % accepted and gamma = 4: (1 - .8 ** 5) / .2 = 3.36 tokens, and 2.8 times the speed where c is a twentieth.
    counts = {"num_rounds": 100, "num_accepted": round(100 * (tokens - 1)), "num_empty": 0}
    judged = counts["num_accepted"] / 0.8
    block = ran("speculative ratio, gamma = 4", 1.0, made(1.0, num_judged=judged, **counts))
    found = speculative.claims(Measured({speculative.GAMMA: [block, ran("off", 1.0, made(2.8))]}), SIZES)
    of_tokens = claim(found, "T = 1, ratio, gamma = 4: tokens of a round by the prediction, error")
    of_speed = claim(found, "T = 1, ratio, gamma = 4: speed-up by the prediction, error")
    assert (of_tokens.verdict, of_tokens.remark) == (verdict, "predicted: 3.36")
    assert (of_speed.verdict, of_speed.remark) == (MET, "predicted: 2.80, measured: 2.80")


def test_a_used_service_has_the_tokens_of_its_proposals() -> None:
    # 40 of 100 rounds have nothing, the others 4 tokens of which 80 % are kept: .4 + .6 * 3.36 = 2.416 a round.
    counts = {"num_rounds": 100, "num_empty": 40, "num_drafted": 240, "num_accepted": 142, "num_judged": 177.5}
    name = spacelike.name_of(0.4)
    blocks = [ran("spacelike as published", 0.0, made(1.0, tokens=242, **counts), category=NEAR)]
    measured = Measured({name: [*blocks, ran("off", 0.0, made(2.4, tokens=242), category=NEAR)]})
    found = spacelike.claims(measured, SIZES)
    what = "T = 0, 40% near-repeats, as published"
    of_tokens = claim(found, f"{what}: tokens of a round by the prediction, error")
    assert spacelike.predicted_tokens(measured, name, "spacelike as published", 0.0) == pytest.approx(2.417, abs=0.002)
    assert (of_tokens.verdict, of_tokens.remark) == (MET, "predicted: 2.42, measured: 2.42")
    assert claim(found, f"{what}: speed-up by the predicted tokens, error").verdict == MET
    assert claim(found, f"{what}: all requests by off").verdict == MET
    assert claim(found, f"{what}: near-repeats by off").verdict == MISSED


def test_ours_stands_beside_spacelike_as_published_alone_and_in_a_batch() -> None:
    def turn(label: str, time_ms: float, count: int) -> Block:
        block = ran(label, 1.0, made(time_ms))
        return replace(block, condition=replace(block.condition, concurrency=count))

    by_label = {"spacelike token by token": (4.0, 6.0), "spacelike as published": (5.0, 3.0)}
    blocks = [
        turn(label, time, count) for label, times in by_label.items() for time, count in zip(times, (1, 8), strict=True)
    ]
    found = spacelike.claims(Measured({spacelike.name_of(0.4): blocks}), SIZES)
    assert claim(found, "T = 1: ours by as published").verdict == MET
    assert claim(found, "T = 1, 8 at once: ours by as published").verdict == MISSED


def test_replays_have_the_near_repeats_that_they_are_named_after() -> None:
    for one in experiments_of(("simulated-spacelike",), MethodsSizes(), 3):
        near = [prompt.category == NEAR for prompt in one.prompts]
        assert not any(near[: SIZES.replay_cold])
        share = sum(near) / (len(near) - SIZES.replay_cold)
        assert share == pytest.approx(int(one.name.rpartition("-")[2]) / 100, abs=0.12)


def results_of(part: str) -> dict[str, Any]:
    """results.json of a run in which everybody did everything, the later ones faster."""
    suite = MethodsSuite(MethodsConfig(parts=(part,)))
    for one in suite.experiments:
        for number, each in enumerate(one.contenders):
            for t in one.temperatures:
                for count in one.concurrencies:
                    sample = made(10 / (1 + number), **rounds(0.1 + 0.8 * number / len(one.contenders)))
                    block = ran(label_of(each), t, sample, category="code")
                    suite.keep(one.name, [replace(block, condition=replace(block.condition, concurrency=count))])
    return suite.results()


@pytest.mark.parametrize("part", SIMULATED_PARTS)
def test_every_part_in_simulated_time_has_a_picture_and_none_of_nothing(part: str) -> None:
    figure = figures_of(results_of(part))[part]
    assert figure is not None
    assert all(axes.get_title() for axes in figure.axes if axes.get_xlabel())
    plt.close(figure)
    assert figures_of(MethodsSuite(MethodsConfig(parts=(part,))).results())[part] is None


def test_quick_sizes_are_those_of_quick_runs() -> None:
    assert sizes_of(MethodsConfig(is_quick=True)).simulated == QUICK.simulated != SIZES
