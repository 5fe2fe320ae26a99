"""From samples to rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider_bench.environment import Machine
from outrider_bench.samples import Block, Condition, Sample
from outrider_bench.statistics import Row, first_difference, rows_of
from tests.bench.samples import block, full_run, generation

OFF = Condition("off", "", 0.0)
PEARL = Condition("pearl", "", 0.0)


def row_of(blocks: list[Block], condition: Condition, category: str = "all", *, repeats: int = 1) -> Row:
    rows = rows_of(blocks, num_prompts=2, repeats=repeats)
    names = {"method": condition.method, "temperature": condition.temperature, "category": category}
    return next(row for row in rows if all(row[name] == value for name, value in names.items()))


def test_throughput_is_all_tokens_by_all_seconds_not_the_mean_of_the_rates() -> None:
    # 10 tokens in 1 s and 10 tokens in 4 s.
    fast, slow = generation(10, 1), generation(10, 1, prefill_s=0.4, round_s=0.4)
    row = row_of([block(OFF, fast), block(OFF, slow, prompt=1)], OFF)
    assert row["output_throughput"] == pytest.approx(20 / 5.0)
    assert row["duration"] == pytest.approx(5.0)
    assert row["total_output_tokens"] == 20
    assert row["total_input_tokens"] == 6
    assert row["request_throughput"] == pytest.approx(2 / 5.0)


def test_throughput_of_a_row_is_the_median_over_the_repeats() -> None:
    made = generation(10, 1)
    blocks = [
        block(OFF, replace(made, duration_s=seconds), repeat=repeat) for repeat, seconds in enumerate((1.0, 2.0, 10.0))
    ]
    row = row_of(blocks, OFF, repeats=3)
    assert row["runs"] == pytest.approx([10.0, 5.0, 1.0])
    assert row["output_throughput"] == pytest.approx(5.0)


def test_decode_throughput_leaves_the_prefill_and_its_tokens_out() -> None:
    row = row_of([block(PEARL, generation(5, 3, prefill_s=7.0, round_s=0.5))], PEARL)
    assert row["decode_throughput"] == pytest.approx(4 * 3 / (4 * 0.5))


def test_speed_up_compares_within_a_repeat_so_that_a_slow_repeat_slows_both() -> None:
    blocks = []
    for repeat, slowness in enumerate((1.0, 3.0)):
        for condition, made in ((OFF, generation(12, 1)), (PEARL, generation(4, 3))):
            blocks.append(block(condition, replace(made, duration_s=made.duration_s * slowness), repeat=repeat))
    row = row_of(blocks, PEARL, repeats=2)
    assert row["speedup_runs"] == pytest.approx([3.0, 3.0])
    assert row["speedup_over_off"] == pytest.approx(3.0)


def test_speed_up_of_an_interrupted_run_compares_only_prompts_that_both_have_done() -> None:
    long_prompt = generation(12, 1, round_s=9.0)
    blocks = [block(OFF, generation(12, 1)), block(PEARL, generation(4, 3)), block(OFF, long_prompt, prompt=1)]
    row = row_of(blocks, PEARL)
    assert row["speedup_over_off"] == pytest.approx(3.0)
    assert row["partial"]


def test_a_failed_generation_is_counted_and_wins_nothing() -> None:
    blocks = [block(OFF, generation(12, 1)), block(PEARL, None)]
    row = row_of(blocks, PEARL)
    assert (row["completed"], row["failed"], row["errors"]) == (0, 1, ["UNAVAILABLE: gone"])
    assert row["speedup_over_off"] is None
    assert row["output_throughput"] == 0
    assert row["median_ttft_ms"] is None


def test_acceptance_counts_the_next_token_and_rates_are_by_rounds() -> None:
    row = row_of([block(PEARL, generation(4, 3))], PEARL)
    assert row["mean_acceptance_length"] == 3
    assert row["draft_acceptance_rate"] == 8 / 16
    assert row["hit_rate"] == 2 / 4
    assert row["empty_chain_rate"] == 1 / 4
    assert row["forward_ms_p50"] == 20.0
    assert row["draft_forward_ms_p50"] == 60.0


def test_a_method_without_drafts_has_no_rates() -> None:
    row = row_of([block(OFF, generation(4, 1))], OFF)
    assert row["mean_acceptance_length"] == 1
    assert row["draft_acceptance_rate"] is row["hit_rate"] is row["empty_chain_rate"] is None


def test_latencies_are_of_arrivals_tpot_of_tokens() -> None:
    row = row_of([block(PEARL, generation(5, 4, prefill_s=0.3, round_s=0.2))], PEARL)
    assert row["mean_ttft_ms"] == pytest.approx(300)
    assert row["p99_itl_ms"] == pytest.approx(200)
    assert row["median_tpot_ms"] == pytest.approx(50)


def test_a_text_that_differs_from_off_is_reported_with_the_place_where_it_parts() -> None:
    same, other = generation(12, 1), generation(4, 3)
    other = replace(other, token_ids=(*other.token_ids[:7], 99, *other.token_ids[8:]))
    blocks = [block(OFF, same), block(OFF, same, prompt=1), block(PEARL, same), block(PEARL, other, prompt=1)]
    row = row_of(blocks, PEARL)
    assert row["identical_to_off"] == 0.5
    assert row["first_differences"] == [{"repeat": 0, "prompt": 1, "position": 7}]
    assert row["median_first_difference"] == 7


def test_samples_of_transformers_are_not_compared_because_its_noise_is_another() -> None:
    blocks = full_run(repeats=1)
    assert row_of(blocks, Condition("hf-assisted", "", 0.0))["identical_to_off"] is not None
    assert row_of(blocks, Condition("hf-assisted", "", 0.7))["identical_to_off"] is None


def test_the_best_of_several_settings_is_marked_and_a_single_setting_is_not() -> None:
    rows = [row for row in rows_of(full_run(), 2, 2) if row["category"] == "all" and row["temperature"] == 0]
    assert [(row["method"], row["setting"], row["best_setting"]) for row in rows] == [
        ("off", "", False),
        ("pearl", "", False),
        ("hf-assisted", "constant 3", False),
        ("hf-assisted", "constant 5", True),
    ]


def test_each_category_has_a_row_of_its_own() -> None:
    blocks = [block(OFF, generation(10, 1)), block(OFF, generation(10, 1, round_s=0.9, prefill_s=0.9), prompt=1)]
    assert row_of(blocks, OFF, "code")["output_throughput"] == pytest.approx(10.0)
    assert row_of(blocks, OFF, "prose")["output_throughput"] == pytest.approx(10 / 9)


def test_generations_at_once_are_measured_by_the_time_all_of_them_took() -> None:
    condition = replace(OFF, concurrency=2)
    made = generation(10, 1)
    samples = tuple(Sample(condition, 0, index, category, made) for index, category in enumerate(("code", "prose")))
    rows = rows_of([Block(condition, 0, 1.25, samples)], 2, 1)
    assert [row["category"] for row in rows] == ["all"]
    assert rows[0]["output_throughput"] == pytest.approx(20 / 1.25)


def test_the_row_has_the_fields_that_others_read() -> None:
    fields = """method setting category temperature concurrency rtt_ms output_throughput speedup_over_off
        mean_acceptance_length draft_acceptance_rate hit_rate empty_chain_rate overhead_ms_p50 forward_ms_p50
        wait_ms_p50 draft_latency_ms_p50 draft_forward_ms_p50 identical_to_off runs partial completed failed duration
        request_throughput total_token_throughput total_input_tokens total_output_tokens mean_ttft_ms median_ttft_ms
        p99_ttft_ms mean_tpot_ms median_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms p99_itl_ms std_itl_ms
        median_e2el_ms"""
    assert all(set(fields.split()) <= row.keys() for row in rows_of(full_run(), 2, 2))


@pytest.mark.parametrize(("ours", "theirs", "position"), [((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((4,), (5,), 0)])
def test_texts_part_at_the_first_other_token_or_where_one_ends(
    ours: tuple[int, ...], theirs: tuple[int, ...], position: int
) -> None:
    assert first_difference(ours, theirs) == position


def test_of_an_answer_that_comes_whole_no_time_is_known_but_that_of_all_of_it() -> None:
    whole = replace(generation(10, 1), chunks=(), duration_s=2.0)
    row = row_of([block(OFF, whole)], OFF)
    assert (row["output_throughput"], row["median_e2el_ms"]) == (pytest.approx(5.0), pytest.approx(2000.0))
    assert [row[f"median_{name}_ms"] for name in ("ttft", "tpot", "itl")] == [None] * 3
    assert row["decode_throughput"] == 0.0


@pytest.mark.parametrize("method", ["hf-generate", "llama.cpp"])
def test_texts_of_those_who_draw_with_noise_of_their_own_are_compared_where_nothing_is_drawn(method: str) -> None:
    for temperature, identical in ((0.0, 1.0), (0.7, None)):
        off, other = Condition("off", "", temperature), Condition(method, "plain", temperature)
        row = row_of([block(off, generation(10, 1)), block(other, generation(10, 1))], other)
        assert row["identical_to_off"] == identical


def test_perfect_drafts_win_no_more_than_the_forward_allows() -> None:
    machine = Machine({1: 10.0, 2: 10.0, 4: 20.0}, {1: 0.4})
    assert machine.ceilings == pytest.approx({1: 2.0, 2: 2.0, 3: 2.0})
    assert machine.speed_ratio == pytest.approx(25.0)


def test_a_machine_that_was_not_measured_has_no_ceiling() -> None:
    assert Machine().ceilings == {}
    assert Machine().speed_ratio is None
