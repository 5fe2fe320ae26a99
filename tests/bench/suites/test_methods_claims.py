"""What the methods' suite says about measurements: its claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from outrider_bench.config import PARTS
from outrider_bench.experiment import LLAMA_CPP_CONTENDERS, label_of
from outrider_bench.measured import Measured
from outrider_bench.prediction import expected_tokens
from outrider_bench.result import (
    MET,
    MISSED,
    NOT_MEASURED,
    Measurement,
    above,
    at_least,
    counts_of,
    reported,
    share_of,
)
from outrider_bench.result import claim as compared
from outrider_bench.samples import Block
from outrider_bench.suites.methods import papers
from outrider_bench.suites.methods.claims import AT_BEST, claims_of
from outrider_bench.suites.methods.experiments import DRAFT_C2_5, MethodsSizes
from outrider_bench.suites.methods.replay import analyse
from outrider_bench.suites.methods.settings import ALL_METHODS
from tests.bench.experiment_samples import evidence, made, ran, replayed

TEMPERATURES = (0.0, 0.7, 1.0)
PAPERS = ("CARD", "SAGUARO", "DOUBLE", "Token Recycling", "Lookahead", "REST", "Takeoff", "the tutorial")


def claim(claims: Sequence[Measurement], what: str) -> Measurement:
    [found] = [each for each in claims if each.name == what]
    return found


def methods_run(seconds: dict[str, float]) -> dict[str, list[Block]]:
    """Every method of the table at every temperature, `off` taking 10 s and the others 5 s unless said."""
    labels = [label_of(one) for one in ALL_METHODS]
    usual = dict.fromkeys(labels, 5.0) | {"off": 10.0}
    blocks = [ran(label, t, made((usual | seconds)[label])) for label in labels for t in TEMPERATURES]
    return {"methods": blocks}


@pytest.mark.parametrize(
    ("claim_", "verdict"),
    [
        (at_least("p", "w", 1.12, 1.12), MET),
        (at_least("p", "w", 1.119, 1.12), MISSED),
        (above("p", "w", 1.0, 1.0), MISSED),
        (above("p", "w", 1.001, 1.0), MET),
        (compared("p", "w", 2.5, "<", 2.5), MISSED),
        (compared("p", "w", 2.4, "<", 2.5), MET),
        (compared("p", "w", 0.5, "<=", 0.5), MET),
        (at_least("p", "w", None, 1.12), NOT_MEASURED),
        (above("p", "w", 2.0, None), NOT_MEASURED),
        (reported("p", "w", 0.7), ""),
        (reported("p", "w", None), NOT_MEASURED),
    ],
)
def test_a_claim_is_met_missed_or_not_measured(claim_: Measurement, verdict: str) -> None:
    assert claim_.verdict == verdict
    assert claim_.to_json()["verdict"] == verdict


def test_what_was_never_run_is_not_measured_and_claims_nothing() -> None:
    claims = claims_of(PARTS, evidence({}))
    assert {claim.part for claim in claims} == set(PARTS)
    assert {claim.verdict for claim in claims} == {NOT_MEASURED}
    assert counts_of([claim.to_json() for claim in claims])[NOT_MEASURED] == len(claims)


def test_every_claim_has_its_papers_figure_with_its_place_or_says_that_there_is_none() -> None:
    claims = claims_of(PARTS, replace(evidence({}), sizes=MethodsSizes(llama_cpp=True)))
    figures = [each.paper for each in claims if each.paper != papers.NONE]
    assert all(each.paper for each in claims)
    # A figure without its place cannot be looked up.
    assert all(figure.endswith(")") and any(name in figure for name in PAPERS) for figure in figures)
    assert {name for name in PAPERS if any(name in figure for figure in figures)} == set(PAPERS)
    assert claim(claims, "T = 0: query only, share of both").paper.startswith("30.23 by 41.34 tokens/s = 73 %")
    assert "2.14x to 2.30x" in claim(claims, "T = 0: double by double with no rejected tier").paper
    assert claim(claims, "T = 0: auto by the best fixed method").paper == papers.NONE


def test_every_method_of_a_paper_has_its_papers_speed_up() -> None:
    methods = {one.method for one in ALL_METHODS}
    assert papers.SPEEDUPS.keys() == methods - {"off", "best-first", "opt-tree", "sequoia", "auto"}
    assert all(figure.endswith(")") for figures in papers.SPEEDUPS.values() for figure in figures.values())


def test_a_claim_has_one_name_so_that_draws_find_it_again() -> None:
    names = [(each.part, each.name) for each in claims_of(PARTS, evidence({}))]
    assert len(set(names)) == len(names)


def test_a_share_of_what_is_missing_is_missing() -> None:
    assert share_of(1.0, 2.0) == 0.5
    assert share_of(None, 2.0) is None
    assert share_of(1.0, None) is None
    assert share_of(1.0, 0.0) is None


def test_best_first_stands_beside_the_fastest_other_method_and_not_beside_itself() -> None:
    run = methods_run({"best-first": 4.0, "best-first chain": 1.0, "card": 3.96, "auto": 0.5})
    claims = claims_of(["methods"], evidence(run))
    found = claim(claims, "T = 0.7: best-first by every other method")
    assert found.value == pytest.approx(0.99)
    assert (found.verdict, found.remark) == (MET, "best of them: card")
    assert claim(claims, "T = 1: best-first by off").value == pytest.approx(2.5)
    assert [claim(claims, f"T = {t:g}: best-first by off").target.value for t in TEMPERATURES] == list(AT_BEST.values())


def test_auto_stands_beside_the_best_of_all_fixed_methods() -> None:
    run = methods_run({"best-first chain": 2.0, "auto": 2.05})
    found = claim(claims_of(["methods"], evidence(run)), "T = 0: auto by the best fixed method")
    assert found.value == pytest.approx(2.0 / 2.05)
    assert (found.verdict, found.remark) == (MET, "best of them: best-first chain")


def test_a_method_that_was_refused_is_named_where_the_others_are_compared() -> None:
    blocks = [block for block in methods_run({})["methods"] if block.condition.method != "double"]
    found = claim(claims_of(["methods"], evidence({"methods": blocks})), "T = 0: best-first by every other method")
    assert found.value == 1.0
    assert "not measured: double" in found.remark


def test_nobody_is_beside_the_best_of_nobody() -> None:
    assert Measured({}).beside_the_best("e", "auto", ["pearl"], 0.0) == (None, "")


def test_saguaro_is_compared_with_draft_then_verify() -> None:
    claims = claims_of(["methods"], evidence(methods_run({"saguaro": 4.4, "speculative": 5.0})))
    assert claim(claims, "T = 0: saguaro by speculative").value == pytest.approx(5 / 4.4)
    assert claim(claims, "T = 0: saguaro by speculative").verdict == MET
    assert claim(claims, "T = 1: saguaro by off").verdict == MISSED


def test_the_ceiling_of_double_is_the_measured_speed_ratio() -> None:
    blocks = [
        ran(label, 0.0, made(seconds))
        for label, seconds in (("off", 10.0), ("pearl", 5.0), ("double", 10 / 2.7), ("double no prior", 5.0))
    ]
    claims = claims_of(["double"], evidence({"double": blocks}, speed_ratios={DRAFT_C2_5: 2.5}))
    assert claim(claims, "T = 0: pearl by off stays below C").verdict == MET
    assert claim(claims, "T = 0: double by off exceeds C").verdict == MET
    assert claim(claims, "T = 0: double by off exceeds C").target.value == 2.5
    assert claim(claims, "T = 0: double by pearl").value == pytest.approx(1.35)
    assert claim(claims, "T = 0: double by double with no prior").verdict == MET
    assert claim(claims, "T = 0: double by double with no rejected tier").verdict == NOT_MEASURED
    unknown = claims_of(["double"], evidence({"double": blocks}))
    assert claim(unknown, "T = 0: pearl by off stays below C").verdict == NOT_MEASURED


@pytest.mark.parametrize(("at_a_quarter", "verdict"), [(35, MET), (30, MET), (25, MISSED)])
def test_a_prior_saturates_where_its_last_part_brings_little(at_a_quarter: int, verdict: str) -> None:
    blocks = {
        "double": [
            ran("pearl", 0.0, made(1.0)),
            ran("double no prior", 0.0, made(1 / 2.0)),
            ran("double", 0.0, made(1 / 4.0)),
        ],
        "double-prior-1": [ran("pearl", 0.0, made(3.0)), ran("double", 0.0, made(30.0 / at_a_quarter))],
    }
    found = claims_of(["double"], evidence(blocks))[-1]
    assert "saturates" in found.name
    assert found.value == pytest.approx((40 - at_a_quarter) / 20)
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("speeds", "rises", "falls"),
    [([5.0, 4.0, 3.0, 4.0, 5.0], MET, MET), ([3.0, 4.0, 5.0, 6.0, 7.0], MISSED, MET), ([5, 4, 3, 2, 1], MET, MISSED)],
)
def test_a_wider_beam_pays_up_to_a_point(speeds: list[float], rises: str, falls: str) -> None:
    widths = MethodsSizes().beam_widths
    blocks = [
        ran(f"card K = {width}", 0.0, made(seconds, num_hits=5 + place))
        for place, (width, seconds) in enumerate(zip(widths, speeds, strict=True))
    ]
    claims = claims_of(["card"], evidence({"card-width": blocks}))
    assert claim(claims, "T = 0: tokens/s, the best K by K = 5 (rises)").verdict == rises
    assert claim(claims, "T = 0: tokens/s, the best K by K = 200 (falls)").verdict == falls
    assert claim(claims, "T = 0: hit rate, the highest by K = 5").value == pytest.approx(9 / 5)
    assert claim(claims, "T = 0: highest hit rate").value == pytest.approx(0.9)
    assert claim(claims, "T = 0: highest hit rate").verdict == MET


def test_sixteen_rows_are_claimed_and_the_others_reported() -> None:
    blocks = [ran("best-first chain", 1.0, made(1.0, num_accepted=20))]
    blocks += [ran(f"best-first rows = {rows}", 1.0, made(1.0, num_accepted=26)) for rows in MethodsSizes().max_rows]
    claims = claims_of(["rows"], evidence({"rows": blocks}))
    assert {claim.verdict for claim in claims} == {MET, ""}
    assert [claim.verdict for claim in claims].count(MET) == 1
    assert all(claim.value == pytest.approx(3.6 / 3) for claim in claims)


def test_auto_is_asked_about_every_kind_of_prompt_at_every_temperature_and_where_drafting_cannot_pay() -> None:
    labels = {"off": 10.0, "pearl": 5.0, "best-first": 4.0, "retrieval": 8.0, "auto": 4.1}
    blocks = [
        ran(label, t, made(seconds), prompt=place, category=category)
        for label, seconds in labels.items()
        for t in TEMPERATURES
        for place, category in enumerate(("prose", "repetitive"))
    ]
    alone = [ran("off", 0.7, made(10.0)), ran("auto", 0.7, made(10.5))]
    claims = claims_of(["auto"], evidence({"auto": blocks, "auto-slow": alone}))
    assert len(claims) == 2 * 6 + 3
    assert claim(claims, "T = 0.7, prose: auto by the best of three").value == pytest.approx(4 / 4.1)
    assert claim(claims, "draft model slowed twenty times, T = 0.7: auto by off").verdict == MISSED
    assert claim(claims, "T = 1.5: auto by off").verdict == NOT_MEASURED


def test_auto_stands_beside_the_best_setting_of_llama_cpp_in_the_same_run() -> None:
    run = methods_run({"auto": 2.0})
    seconds = dict.fromkeys(map(label_of, LLAMA_CPP_CONTENDERS), 9.0) | {"llama.cpp 10 drafted, p >= 0.4": 2.4}
    run["methods"] += [ran(label, t, made(each)) for label, each in seconds.items() for t in TEMPERATURES]
    claims = claims_of(["methods"], replace(evidence(run), sizes=MethodsSizes(llama_cpp=True)))
    found = [claim(claims, f"T = {t:g}: auto by llama.cpp's best setting") for t in TEMPERATURES]
    assert [each.value for each in found] == [pytest.approx(1.2)] * 3
    assert [each.target.value for each in found] == [1.25, 1.25, 1.15]
    assert [each.verdict for each in found] == [MISSED, MISSED, MET]
    assert {each.remark for each in found} == {"best of them: llama.cpp 10 drafted, p >= 0.4"}


def test_nothing_is_claimed_about_llama_cpp_where_it_took_no_part_and_where_it_failed_nothing_is_measured() -> None:
    run = methods_run({})
    assert not [each for each in claims_of(["methods"], evidence(run)) if "llama.cpp" in each.name]
    claims = claims_of(["methods"], replace(evidence(run), sizes=MethodsSizes(llama_cpp=True)))
    assert [each.verdict for each in claims if "llama.cpp" in each.name] == [NOT_MEASURED] * 3


def test_the_claims_of_spacelike_are_those_of_the_replay() -> None:
    seconds = [10.2] * 20 + [8.0] * 20 + [6.0] * 20
    replay = analyse(replayed(seconds, off_at=[0, 1, 2, 30, 45], near=[58]), 60, num_cold=3)
    claims = claims_of(["spacelike"], evidence({}, replay=replay))
    assert [each.verdict for each in claims] == [MET, MISSED, MET]
    assert claims[2].value == pytest.approx(1 / 1.02)


def test_tokens_per_round_stand_beside_what_the_acceptance_predicts() -> None:
    rounds = {"num_rounds": 10, "num_accepted": 16, "num_judged": 20}
    claims = claims_of(["noise"], evidence({"noise": [ran("speculative ratio rule", 1.0, made(1.0, **rounds))]}))
    assert claim(claims, "T = 1: acceptance, ratio rule").value == 0.8
    assert claim(claims, "T = 1: tokens per round, ratio rule").value == pytest.approx(2.6)
    predicted = claim(claims, "T = 1: tokens per round, ratio rule, predicted")
    assert predicted.value == pytest.approx(expected_tokens(0.8, 8)) == pytest.approx((1 - 0.8**9) / 0.2)
    assert claim(claims, "T = 1: tokens per round, shared noise, predicted").value is None


def test_double_is_serial_where_both_models_share_a_core() -> None:
    blocks = [ran("speculative", 0.0, made(4.0)), ran("double serial", 0.0, made(3.2)), ran("double", 0.0, made(9.0))]
    found = claim(
        claims_of(["double"], evidence({"double-one-core": blocks})), "T = 0, on one core: double serial by speculative"
    )
    assert (found.value, found.verdict) == (pytest.approx(1.25), MET)


def test_the_best_depth_and_the_best_length_are_named() -> None:
    blocks = [ran(f"double d = {d}", 0.0, made({1: 9.0, 10: 3.0}.get(d, 5.0))) for d in MethodsSizes().depths]
    found = claim(claims_of(["double"], evidence({"double-depth": blocks})), "T = 0: the best d by d = 1")
    assert found.remark == "best: double d = 10"
    assert found.value == pytest.approx(3.0)
    assert found.verdict == ""


def at_once(label: str, concurrency: int, seconds: float, repeat: int = 0) -> Block:
    block = ran(label, 0.7, made(seconds), repeat=repeat)
    return replace(block, condition=replace(block.condition, concurrency=concurrency))


def test_auto_is_asked_at_every_number_of_generations_at_once() -> None:
    blocks = [at_once("off", count, 10.0) for count in (1, 4, 16)]
    blocks += [at_once("auto", 1, 4.0), at_once("auto", 4, 10.1), at_once("auto", 16, 12.5), at_once("pearl", 16, 20.0)]
    claims = claims_of(["batch"], evidence({"batch": blocks}))
    verdicts = [claim(claims, f"T = 0.7, {count} at once: auto by off").verdict for count in (1, 2, 4, 8, 16)]
    assert verdicts == [MET, NOT_MEASURED, MET, NOT_MEASURED, MISSED]
    assert claim(claims, "T = 0.7, 16 at once: pearl by off").value == 0.5
    assert "1.73x at 16" in claim(claims, "T = 0.7, 16 at once: pearl by off").paper


def test_the_chosen_fallback_stands_beside_the_best_of_the_others() -> None:
    seconds = {"auto": 5.0, "draft": 8.0, "retrieval": 4.9, "plain": 6.0}
    blocks = [at_once(f"saguaro fallback {name}", 16, each) for name, each in seconds.items()]
    claims = claims_of(["batch"], evidence({"batch-fallbacks": blocks}))
    found = claim(claims, "T = 0.7, 16 at once: fallback auto by the best other")
    assert (found.value, found.verdict, found.remark) == (
        pytest.approx(0.98),
        MET,
        "best of them: saguaro fallback retrieval",
    )
    assert claim(claims, "T = 0.7, 16 at once: fallback plain by draft").value == pytest.approx(8 / 6)
    assert claim(claims, "T = 0.7, 4 at once: fallback auto by the best other").verdict == NOT_MEASURED
