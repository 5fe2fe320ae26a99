"""The pair's suite: its flags, its use of verdicts and times, its plan; and a full run, in small sizes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.models.demo.names import DEMO_FOLDER
from outrider_bench.experiment import PLAIN, Contender
from outrider_bench.pair.acceptance import OWN_CHOICE, RATIO, SHARED_NOISE, acceptances_of, by_position
from outrider_bench.pair.comparison import INCONCLUSIVE, MET, MISSED, claims_of, comparisons_of, token_times
from outrider_bench.pair.costs import DRAFT_ROWS, LONG, PROBES, SHORT, TARGET_ROWS, costs_of
from outrider_bench.pair.report import category_tables
from outrider_bench.pair.settings import METHODS, Prediction, Setting, best_of, measured_settings, predicted_for
from outrider_bench.samples import Block, Chunk, Condition, GenerationSample, Rounds, Sample
from outrider_cli.local.stack import LocalStack, StackConfig

TARGET_MS = dict.fromkeys(TARGET_ROWS, 10.0)
DRAFT_MS = {rows: 0.9 + 0.1 * rows for rows in DRAFT_ROWS}


def verdicts(*kept: int) -> tuple[list[float], list[float]]:
    return [float(one) for one in kept], [float(one) for one in kept]


@given(st.floats(0.05, 0.95), st.integers(1, 8))
def test_equal_probabilities_give_the_tokens_of_the_closed_form(alpha: float, chain_len: int) -> None:
    text: dict[str, Any] = {name: [alpha] * 40 for name in ("shared_noise", "own_choice", "kept", "overlap")}
    for one in acceptances_of([text], ["code"], 0.7, chain_len):
        assert one.by_position == pytest.approx((alpha,) * chain_len)
        assert one.tokens_per_round == pytest.approx((1 - alpha ** (chain_len + 1)) / (1 - alpha))


@given(st.lists(st.integers(0, 1), max_size=40), st.integers(1, 6))
def test_verdicts_that_are_certain_are_replayed_round_by_round(kept: list[int], chain_len: int) -> None:
    reached, accepted, start = [0] * chain_len, [0] * chain_len, 0
    while start + chain_len <= len(kept):
        run = next((i for i, one in enumerate(kept[start : start + chain_len]) if not one), chain_len)
        for place in range(min(run + 1, chain_len)):
            reached[place] += 1
            accepted[place] += place < run
        start += run + 1
    expected = tuple(a / r if r else None for a, r in zip(accepted, reached, strict=True))
    assert by_position([verdicts(*kept)], chain_len) == expected


def test_each_rule_is_judged_by_its_own_verdicts() -> None:
    text = {"shared_noise": [1] * 8, "own_choice": [0] * 8, "kept": [1.0] * 8, "overlap": [0.5] * 8}
    found = {one.rule: one for one in acceptances_of([text], ["code"], 1.0, 2)}
    assert found[SHARED_NOISE].by_position == (1.0, 1.0)
    assert found[OWN_CHOICE].mean == 0.0
    assert found[RATIO].by_position == (0.5, 0.5)


def test_acceptance_is_told_of_all_texts_and_of_each_category() -> None:
    right, wrong = (
        {name: [value] * 8 for name in ("shared_noise", "own_choice", "kept", "overlap")} for value in (1, 0)
    )
    found = acceptances_of([right, wrong, wrong, wrong], ["write", "code", "code", "code"], 1.0, 2)
    assert {one.category: one.mean for one in found} == {"all": 0.25, "write": 1.0, "code": 0.0}
    [table] = category_tables([one.to_json() for one in found])
    assert table.columns == ("T", "rule", "write", "code")
    assert {tuple(row[2:]) for row in table.rows} == {("1.00", "0.00")}


def probe(one: Contender, latency_ms: float = 0.0, last_s: float = 0.014, **times: float) -> Block:
    """A generation of one of the probes: eight rounds, of which the last may take longer than the others."""
    reported = {"forward_ms": 12.0, "overhead_ms": 1.0} | ({"draft_latency_ms": latency_ms} if latency_ms else {})
    ends_s = [place * 0.014 for place in range(8)] + [7 * 0.014 + last_s]
    made = GenerationSample(3, (1,), tuple(Chunk(at, 1) for at in ends_s), 1.0, Rounds(times_p50=reported | times))
    condition = Condition(one.method, one.setting, 0.0)
    return Block(condition, 0, 1.0, (Sample(condition, 0, 0, "code", made),))


def probed(short_ms: float = 5.0, long_ms: float = 11.0) -> list[Block]:
    plain, short, long, ahead = PROBES
    blocks = [probe(plain, overhead_ms=0.5), probe(ahead, overhead_ms=2.0, forward_ms=18.0)]
    return [*blocks, probe(short, short_ms, overhead_ms=1.5, forward_ms=13.2), probe(long, long_ms, forward_ms=13.2)]


TIMES = {
    "target_forward_ms": {str(rows): ms for rows, ms in TARGET_MS.items()},
    "draft_forward_ms": {str(rows): ms for rows, ms in DRAFT_MS.items()},
}


def test_the_latencies_of_two_chains_tell_a_step_of_the_draft_from_the_way_to_it() -> None:
    costs = costs_of(TIMES, probed(short_ms=5.0, long_ms=5.0 + 1.5 * (LONG - SHORT)))
    assert costs.step_ms == pytest.approx(1.5)
    assert costs.one_way_ms == pytest.approx((5.0 - SHORT * 1.5) / 2)
    assert costs.speed_ratio == pytest.approx(10.0)


def test_a_service_that_is_slower_than_the_worker_is_slower_at_all_rows() -> None:
    costs = costs_of(TIMES, probed())
    simulated = costs.of("speculative")
    assert simulated["target_ms"] == pytest.approx(dict.fromkeys(TARGET_ROWS, 13.2)), "slower after a wait"
    assert costs.of("best-first")["target_ms"] == pytest.approx(dict.fromkeys(TARGET_ROWS, 18.0)), "or beside drafts"
    assert simulated["draft_ms"] + simulated["draft_row_ms"] == pytest.approx(costs.step_ms)
    assert [simulated["overhead_ms"], costs.of("pearl")["overhead_ms"]] == pytest.approx([1.5, 2.0])
    assert costs.plain_round_ms == pytest.approx(12.5)


def test_what_slows_the_target_beside_the_draft_slows_the_draft_alike() -> None:
    costs = costs_of(TIMES, probed())
    beside, in_turns = costs.of("pearl"), costs.of("speculative")
    assert costs.beside_slowdown == pytest.approx(18.0 / 13.2)
    for name in ("draft_ms", "draft_row_ms"):
        assert beside[name] == pytest.approx(in_turns[name] * 18.0 / 13.2)
    faster = [probe(PROBES[3], overhead_ms=2.0, forward_ms=12.0), *(one for one in probed() if "pearl" not in str(one))]
    assert costs_of(TIMES, faster).beside_slowdown == 1.0, "no forward is faster beside another"


def test_rare_long_rounds_count_where_they_are() -> None:
    usual, plain = costs_of(TIMES, probed()), PROBES[0]
    rare = costs_of(TIMES, [probe(plain, overhead_ms=0.5, last_s=0.014 * 5), *probed()[1:]])
    assert rare.plain_round_ms == pytest.approx(1.5 * usual.plain_round_ms)
    assert rare.of("pearl") == usual.of("pearl")


def test_a_probe_of_few_rounds_tells_no_mean_from_a_median() -> None:
    plain, *others = probed()
    [sample] = plain.samples
    assert sample.generation is not None
    few = replace(sample.generation, chunks=(Chunk(0.0, 4), Chunk(0.1, 4), Chunk(0.9, 4)))
    costs = costs_of(TIMES, [replace(plain, samples=(replace(sample, generation=few),)), *others])
    assert costs.plain_stretch == 1.0


def test_latencies_that_make_no_sense_are_replaced_by_what_the_worker_has_timed() -> None:
    costs = costs_of(TIMES, probed(short_ms=5.0, long_ms=4.0))
    assert costs.step_ms == pytest.approx(DRAFT_MS[1])
    assert costs.one_way_ms > 0


def test_a_probe_that_reports_nothing_is_named() -> None:
    blocks = [block for block in probed() if block.condition.setting != f"probe gamma = {LONG}"]
    with pytest.raises(ValueError, match=f"speculative probe gamma = {LONG} must report forward_ms"):
        costs_of(TIMES, blocks)


def predictions(temperature: float = 0.7, **speedups: Sequence[float]) -> list[Prediction]:
    """Speed-ups of methods with chains of 2, 4, 8, ..."""
    return [
        Prediction(Setting(method.replace("_", "-"), 2 ** (1 + place)), temperature, 2.0, speedup, (1.0,))
        for method, of_method in speedups.items()
        for place, speedup in enumerate(of_method)
    ]


def test_the_best_setting_is_the_fastest_and_of_equals_the_one_with_the_shortest_chain() -> None:
    found = predictions(speculative=(1.2, 1.4), pearl=(1.5, 1.9, 1.9)) + predictions(1.0, card=(3.0,))
    best = best_of(found, 0.7)
    assert best is not None
    assert best.setting == Setting("pearl", 4)
    assert best.setting.flags == "--method pearl --num-speculative-tokens 4"
    assert best_of(predictions(pearl=(0.9, 1.0)), 0.7) is None, "off is as fast"


def test_what_is_measured_has_the_best_and_some_that_should_be_worse() -> None:
    found = predictions(speculative=(1.2, 1.4), pearl=(1.5, 1.9), card=(1.6, 1.7), best_first=(1.8, 2.0))
    chosen = measured_settings(found, 0.7)
    assert chosen == [
        Setting("best-first", 4),
        Setting("pearl", 4),
        Setting("speculative", 4),
        Setting("best-first", 2),
    ]
    assert measured_settings(found, 0.0) == []
    assert len(set(measured_settings(predictions(speculative=(2.0,)), 0.7))) == 1


def test_auto_should_be_as_fast_as_the_best_and_never_slower_than_off() -> None:
    rows = predictions(pearl=(1.5, 1.9)) + predictions(1.0, pearl=(0.8,))
    assert predicted_for(rows, "auto", "", 0.7) == 1.9
    assert predicted_for(rows, "auto", "", 1.0) == 1.0
    assert predicted_for(rows, "pearl", "gamma = 2", 0.7) == 1.5
    assert predicted_for(rows, "card", "gamma = 2", 0.7) is None
    assert predicted_for([], "auto", "", 0.7) is None


def turn(one: Contender, token_s: float, repeat: int = 0, prompt: int = 0, prefill_s: float = 1.0) -> Block:
    """A generation of 11 tokens that take equally long, except the first."""
    chunks = tuple(Chunk(prefill_s + place * token_s, 1) for place in range(11))
    made = GenerationSample(3, tuple(range(11)), chunks, chunks[-1].at_s, Rounds(num_rounds=11))
    condition = Condition(one.method, one.setting, 0.7)
    return Block(condition, repeat, made.duration_s, (Sample(condition, repeat, prompt, "code", made),))


PEARL = Setting("pearl", 4).contender


def test_speedups_are_of_decoding_and_a_busy_moment_falls_on_one_turn_only() -> None:
    blocks = [turn(PLAIN, 0.2, repeat, prompt) for repeat in range(3) for prompt in range(2)]
    blocks += [turn(PEARL, 0.1, repeat, prompt, prefill_s=5.0) for repeat in range(3) for prompt in range(2)]
    # Each prompt has another busy repeat, so no repeat as a whole is quiet.
    blocks += [turn(PEARL, 0.9, repeat=0, prompt=0), turn(PEARL, 0.9, repeat=1, prompt=1)]
    [found] = comparisons_of(token_times(blocks), predictions(pearl=(1.0, 2.2)))
    assert found.measured == pytest.approx(2.0)
    assert min(found.runs) < 1.0
    assert found.error == pytest.approx(0.1)


def test_probes_tell_costs_and_are_compared_with_nothing() -> None:
    blocks = [turn(one, 0.2) for one in PROBES]
    assert comparisons_of(token_times(blocks), []) == []


def test_prompts_that_only_one_of_both_has_finished_do_not_count() -> None:
    blocks = [turn(PLAIN, 0.2), turn(PEARL, 0.1), turn(PEARL, 5.0, prompt=1)]
    [found] = comparisons_of(token_times(blocks), [])
    assert found.measured == pytest.approx(2.0)
    assert found.error is None
    assert comparisons_of(token_times([turn(PEARL, 0.1)]), []) == []


def test_a_prediction_is_claimed_to_be_within_fifteen_percent_on_both_sides() -> None:
    blocks = [turn(PLAIN, 0.2), turn(PEARL, 0.1)]
    for speedup, verdict in ((2.28, MET), (1.72, MET), (2.4, MISSED), (1.6, MISSED)):
        [claim] = claims_of("a pair", token_times(blocks), predictions(pearl=(1, speedup)), 1, 0)
        assert claim.verdict == verdict
        assert (claim.title, claim.comparison.label) == ("a pair", "pearl gamma = 4")
        assert claim.interval is None, "one prompt says nothing about others"


def test_a_prediction_that_other_prompts_would_refute_is_inconclusive() -> None:
    blocks = [turn(PLAIN, 0.2, prompt=prompt) for prompt in range(4)]
    blocks += [turn(PEARL, token_s, prompt=prompt) for prompt, token_s in enumerate((0.1, 0.1, 0.1, 0.05))]
    told, right = (Prediction(Setting("pearl", 4), 0.7, 2.0, 2.0, text_ms) for text_ms in ((1.0,) * 4, (1, 1, 1, 0.5)))
    [claim] = claims_of("a pair", token_times(blocks), [told], 4, 0)
    assert claim.error == pytest.approx(1 - 2 / (0.8 / 0.35))
    assert claim.interval == pytest.approx((0, 1 - 2 / (0.8 / 0.25)))
    assert claim.verdict == INCONCLUSIVE
    [claim] = claims_of("a pair", token_times(blocks), [right], 4, 0)
    assert claim.verdict == MET, "both sides are of the prompts that were drawn"


def test_auto_is_held_against_the_setting_that_is_the_best_on_the_prompts_that_were_drawn() -> None:
    found = [
        Prediction(Setting("pearl", 4), 0.7, 2.0, 2.0, (1.0, 2.0)),
        Prediction(Setting("card", 4), 0.7, 2.0, 2.0, (2.5, 1.0)),
    ]
    assert predicted_for(found, "auto", "", 0.7) == pytest.approx(4 / 3)
    assert predicted_for(found, "auto", "", 0.7, {0: 0, 1: 2}) == pytest.approx(2.0)
    assert predicted_for(found, "pearl", "gamma = 4", 0.7, {0: 0, 1: 2}) == pytest.approx(1.0)


@pytest.mark.timeout(420)
@pytest.mark.suite
def test_the_suite_predicts_and_measures_a_pair_in_small_sizes(tmp_path: Path) -> None:
    flags = ["--quick", "--target", "demo/target", "--repeats", "1", "--num-prompts", "1", "--max-tokens", "16"]
    command = [sys.executable, "-m", "outrider_cli", "bench", "pair", *flags, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failures"] == {}
    [pair] = results["pairs"]
    assert len(pair["predictions"]) == 12
    assert all(one["speedup"] > 0 and one["tokens_per_round"] >= 1 for one in pair["predictions"])
    assert {one["method"] for one in pair["comparisons"]} >= {"speculative", "auto"}
    assert all(row["identical_to_off"] == 1 for row in pair["rows"] if row["method"] != "off")
    assert len(results["claims"]) == len(pair["comparisons"])
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "report.md"}


@pytest.mark.timeout(420)
@pytest.mark.suite
def test_models_that_are_no_pair_are_wrong_usage_and_one_line(tmp_path: Path) -> None:
    other = tmp_path / "draft"
    shutil.copytree(DEMO_FOLDER / "draft", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["!"], ids["#"] = ids["#"], ids["!"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    tokens = (
        f"the target's tokenizer, got '{other}' for 'demo/target': vocab sizes 2048 and 2048; the first tokens that"
    )
    complaints = {
        "demo/none": "error: demo/target and demo/none: there is no demo model 'demo/none'",
        str(other): f"error: --draft must be a model with {tokens} differ are 1: '!' and '#'",
    }
    for draft, complaint in complaints.items():
        command = [sys.executable, "-m", "outrider_cli", "bench", "pair", "--target", "demo/target", "--draft", draft]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 2
        assert complaint in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


@pytest.mark.timeout(420)
@pytest.mark.suite
def test_a_verifier_that_runs_is_measured_from_outside(tmp_path: Path) -> None:
    with LocalStack(StackConfig(target="demo/target", draft="demo/draft", num_threads=1)) as stack:
        flags = ["--quick", "--address", stack.address, "--repeats", "1", "--num-prompts", "1", "--max-tokens", "16"]
        command = [sys.executable, "-m", "outrider_cli", "bench", "pair", *flags, "--out", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [pair] = json.loads((tmp_path / "results.json").read_text())["pairs"]
    assert (pair["target"], pair["predictions"], pair["costs"]) == ("demo/target", [], None)
    assert {one["method"] for one in pair["comparisons"]} == {*METHODS, "auto"}
    assert all(one["measured"] > 0 and one["predicted"] is None for one in pair["comparisons"])
    assert [best["temperature"] for best in pair["best"]] == [0.7]


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.suite
def test_a_verifier_that_does_not_answer_is_one_line() -> None:
    command = [sys.executable, "-m", "outrider_cli", "bench", "pair", "--address", "127.0.0.1:1", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 3
    assert "error: the verifier at 127.0.0.1:1 does not answer" in done.stderr
    assert "Traceback" not in done.stderr
