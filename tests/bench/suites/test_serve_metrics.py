"""Metrics of made-up requests, by numbers that were computed by hand; and the report of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from outrider_bench.samples import Chunk, GenerationSample, Rounds
from outrider_bench.suites.serve.load import Outcome
from outrider_bench.suites.serve.metrics import details_of, metrics_of, statistics_of
from outrider_bench.suites.serve.report import report_of
from outrider_bench.suites.serve.suite import ServeSuite

OF_VLLM = {
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "spec_decode_acceptance_rate",
    "spec_decode_acceptance_length",
    "spec_decode_num_drafts",
    "spec_decode_draft_tokens",
    "spec_decode_accepted_tokens",
    "spec_decode_per_position_acceptance_rates",
} | {f"{measure}_{name}_ms" for measure in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")}
"""Fields that a results file of `vllm bench serve` has."""


def made(
    num_prompt: int, chunks: Sequence[tuple[float, int]], duration_s: float, rounds: Rounds | None = None
) -> GenerationSample:
    num_tokens = sum(count for _, count in chunks)
    arrivals = tuple(Chunk(at_s, count) for at_s, count in chunks)
    return GenerationSample(num_prompt, tuple(range(num_tokens)), arrivals, duration_s, rounds or Rounds())


def outcome(index: int, sent_s: float, generation: GenerationSample | None, **more: Any) -> Outcome:
    ended_s = sent_s + (generation.duration_s if generation else 0.0)
    return Outcome(index, sent_s, sent_s, sent_s, ended_s, generation, **more)


# TTFT 125 ms, gaps 250 and 125 ms, E2EL 625 ms, TPOT (625 - 125) / 4 = 125 ms.
FAST = made(10, [(0.125, 2), (0.375, 2), (0.5, 1)], 0.625, Rounds(3, 8, 3, num_empty=1))
# TTFT 500 ms, a gap of 500 ms, E2EL 1250 ms, TPOT (1250 - 500) / 1 = 750 ms.
SLOW = made(20, [(0.5, 1), (1.0, 1)], 1.25, Rounds(2, 4, 1, num_empty=0))
OUTCOMES = [
    outcome(0, 0.0, FAST, kept=(2, 1)),
    outcome(1, 0.5, SLOW, kept=(1, 0)),
    outcome(2, 0.75, None, error="RESOURCE_EXHAUSTED", message="too many sessions"),
]


def found(goodput: Mapping[str, float] | None = None, outcomes: Sequence[Outcome] = OUTCOMES) -> dict[str, Any]:
    return metrics_of(outcomes, 4.0, (50.0, 90.0, 99.0), goodput or {})


def test_throughput_is_by_the_duration_of_the_run_and_of_completed_requests() -> None:
    metrics = found()
    assert (metrics["completed"], metrics["failed"], metrics["duration"]) == (2, 1, 4.0)
    assert (metrics["total_input_tokens"], metrics["total_output_tokens"]) == (30, 7)
    assert metrics["request_throughput"] == 0.5
    assert metrics["output_throughput"] == 1.75
    assert metrics["total_token_throughput"] == 9.25


def test_a_request_has_one_value_of_each_latency_but_a_gap_for_every_chunk() -> None:
    metrics = found()
    assert metrics["mean_ttft_ms"] == metrics["median_ttft_ms"] == metrics["p50_ttft_ms"] == 312.5
    assert metrics["std_ttft_ms"] == 187.5
    assert metrics["p90_ttft_ms"] == pytest.approx(125 + 0.9 * 375)
    assert metrics["mean_tpot_ms"] == (125 + 750) / 2
    assert metrics["mean_e2el_ms"] == 937.5
    assert metrics["mean_itl_ms"] == pytest.approx((250 + 125 + 500) / 3)
    assert metrics["median_itl_ms"] == 250


def test_tokens_of_the_best_second_and_requests_of_the_fullest_moment_are_counted() -> None:
    assert found()["max_output_tokens_per_s"] == 5, (
        "the first second has the whole of the fast one, no token of the slow"
    )
    assert found()["max_concurrent_requests"] == 2
    behind = [outcome(0, 0.0, FAST), outcome(1, 0.625, SLOW)]
    assert found(outcomes=behind)["max_concurrent_requests"] == 1, "one begins where the other ends"


@pytest.mark.parametrize(
    ("limits", "num_good"),
    [
        ({"ttft": 125}, 1),  # a limit is kept where it is just reached
        ({"ttft": 124.9}, 0),
        ({"ttft": 500}, 2),
        ({"tpot": 749}, 1),
        ({"e2el": 625}, 1),
        ({"ttft": 500, "tpot": 750, "e2el": 1250}, 2),
        ({"ttft": 500, "tpot": 750, "e2el": 1249}, 1),
    ],
)
def test_a_good_request_keeps_every_limit(limits: dict[str, float], num_good: int) -> None:
    metrics = found(limits)
    assert metrics["request_goodput"] == num_good / 4.0
    assert metrics["goodput_share"] == pytest.approx(num_good / 3), "the failed one is not good"


def test_without_limits_there_is_no_goodput() -> None:
    assert (found()["request_goodput"], found()["goodput_share"]) == (None, None)


def test_a_text_of_one_token_has_no_time_per_further_token_and_keeps_every_limit_of_it() -> None:
    metrics = found({"tpot": 1}, [outcome(0, 0.0, made(1, [(0.5, 1)], 0.5))])
    assert metrics["mean_tpot_ms"] is None
    assert metrics["goodput_share"] == 1


def test_acceptance_is_of_rounds_that_had_a_draft() -> None:
    metrics = found()
    assert metrics["spec_decode_num_drafts"] == 4
    assert (metrics["spec_decode_draft_tokens"], metrics["spec_decode_accepted_tokens"]) == (12, 4)
    assert metrics["spec_decode_acceptance_rate"] == pytest.approx(100 * 4 / 12), "percent, as in vLLM"
    assert metrics["spec_decode_acceptance_length"] == 2.0
    assert metrics["spec_decode_per_position_acceptance_rates"] == [0.75, 0.25]


def test_without_drafts_nothing_is_said_about_acceptance() -> None:
    plain = [outcome(0, 0.0, made(1, [(0.5, 1), (0.75, 1)], 1.0, Rounds(2, num_empty=2)))]
    assert not [name for name in found(outcomes=plain) if name.startswith("spec_decode")]


def test_failures_are_counted_by_kind_with_the_words_of_the_first() -> None:
    errors = [("UNAVAILABLE", "gone"), ("RESOURCE_EXHAUSTED", "full"), ("RESOURCE_EXHAUSTED", "full still")]
    outcomes = [outcome(i, 0.0, None, error=kind, message=words) for i, (kind, words) in enumerate(errors)]
    metrics = found({"ttft": 100}, outcomes)
    assert metrics["failures"] == {
        "RESOURCE_EXHAUSTED": {"count": 2, "message": "full"},
        "UNAVAILABLE": {"count": 1, "message": "gone"},
    }
    assert (metrics["completed"], metrics["failed"], metrics["request_throughput"]) == (0, 3, 0.0)
    assert (metrics["mean_ttft_ms"], metrics["p99_e2el_ms"], metrics["max_concurrent_requests"]) == (None, None, 0)
    assert metrics["goodput_share"] == 0.0


def test_lateness_is_the_generators_and_its_tail_is_always_known() -> None:
    late = [Outcome(i, 1.0, 1.0 + i / 8, 3.0, 4.0, None, error="INTERNAL") for i in range(3)]
    metrics = metrics_of(late, 4.0, (50.0,), {})
    assert (metrics["mean_lateness_ms"], metrics["p50_lateness_ms"]) == (125.0, 125.0)
    assert metrics["p99_lateness_ms"] == pytest.approx(247.5)
    assert "p99_ttft_ms" not in metrics


def test_the_fields_are_those_of_vllm() -> None:
    assert found({"ttft": 100}).keys() >= OF_VLLM
    assert "p99.9_ttft_ms" in statistics_of("ttft", [1.0], (99.9,))


def test_details_have_a_value_of_each_request() -> None:
    details = details_of(OUTCOMES)
    assert details["ttfts"] == [0.125, 0.5, 0.0]
    assert details["itls"] == [[0.25, 0.125], [0.5], []]
    assert (details["input_lens"], details["output_lens"]) == ([10, 20, 0], [5, 2, 0])
    assert (details["start_times"], details["latencies"]) == ([0.0, 0.5, 0.75], [0.625, 1.25, 0.0])
    assert details["errors"] == ["", "", "RESOURCE_EXHAUSTED: too many sessions"]


def run(rate: float | str, **changes: Any) -> dict[str, Any]:
    more = {"request_rate": rate, "num_prompts": 3, "max_concurrency": None, "unfinished": 0, "client_cpu_share": 0.125}
    return found({"ttft": 125}) | more | changes


def results_of(*runs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    config = {"address": "h:1", "arrival": "poisson", "burstiness": 1.0, "num_prompts": 3, "num_texts": 2, "seed": 0}
    return {
        "environment": {"cpu": "a CPU", "num_cores": 2, "memory_gib": 8, "versions": {}, "models": {}},
        "config": config | {"options": {"method": "pearl"}, "goodput": {"ttft": 125}, "percentiles": [50.0, 99.0]},
        "interrupted": False,
        "failures": {},
        "runs": runs,
    } | changes


def test_the_report_has_a_row_and_a_table_of_latencies_for_each_rate() -> None:
    text = report_of(results_of(run(2.0), run("inf"))).to_markdown()
    assert "| 2 | 2 of 3 | 1 | 0.50 | 0.25 | 33% | 1.8 | 5 | 2 | 33% | 2.00 | 12% |" in text
    assert text.count("| TTFT | 312.5 | 187.5 | 312.5 | 496.2 |") == 2
    assert text.index("2 req/s: latencies in ms") < text.index("all at once: latencies in ms")
    assert "|  | mean | std | P50 | P99 |" in text, "the median is P50"
    assert "Each run has 3 requests of 2 prompts." in text
    assert "Every run sends the same requests." in text
    assert "Every run" not in report_of(results_of(run(2.0))).to_markdown()


def test_failures_an_interruption_and_a_late_generator_are_said_before_the_numbers() -> None:
    text = report_of(results_of(run(2.0, unfinished=4, p99_lateness_ms=250.0), interrupted=True)).to_markdown()
    for note in (
        "The benchmark was interrupted",
        "2 req/s: 1 failed with RESOURCE_EXHAUSTED: too many sessions",
        "2 req/s: 4 had not ended, or not begun",
        "2 req/s: the generator took 12% of a core and was late, by 250 ms or more for one request in a hundred",
    ):
        assert 0 <= text.index(note) < text.index("| rate |")
    assert "was late" not in report_of(results_of(run(2.0))).to_markdown()
    busy = report_of(results_of(run(2.0, client_cpu_share=0.9))).to_markdown()
    assert "2 req/s: the generator took 90% of a core" in busy


def test_a_table_fits_into_an_ordinary_terminal() -> None:
    console = Console(width=118, force_terminal=False)
    with console.capture() as capture:
        report_of(results_of(run(1234.5, output_throughput=123456.7, max_output_tokens_per_s=123456.0))).print(console)
    assert "…" not in capture.get()


def test_every_run_has_a_file_of_its_own_beside_results_report_and_picture(tmp_path: Path) -> None:
    paths = ServeSuite.write(results_of(run(2.0), run(4.0), run("inf")), tmp_path)
    assert [path.name for path in paths] == [
        "results.json",
        "report.md",
        "load.png",
        "outrider-2.0qps.json",
        "outrider-4.0qps.json",
        "outrider-infqps.json",
    ]
    assert json.loads(paths[-1].read_text())["request_rate"] == "inf"
    assert json.loads(paths[3].read_text()).keys() >= OF_VLLM
    with Image.open(paths[2]) as image:
        assert min(image.size) >= 300
        assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 10


def test_a_single_rate_has_no_picture(tmp_path: Path) -> None:
    names = [path.name for path in ServeSuite.write(results_of(run(2.0), run("inf")), tmp_path)]
    assert "load.png" not in names
