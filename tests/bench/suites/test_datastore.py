"""The datastore's suite: its flags, its numbers and verdicts, its report; and once all of it, in small sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from outrider_bench.report import QUICK_NOTE, shown, summary_of_sections
from outrider_bench.result import (
    MET,
    MISSED,
    NOT_MEASURED,
    PLOTTED_PERCENTILES,
    Measurement,
    Runs,
    Section,
    Target,
    change_of,
    distribution_of,
    lost_seconds,
    statistic_of,
)
from outrider_bench.suites.datastore.data import VOCAB_SIZE, contexts_of, documents_of, made_up_tokens
from outrider_bench.suites.datastore.report import report_of
from outrider_bench.suites.datastore.suite import DatastoreSuite
from outrider_bench.workers.replay import replay


def test_a_target_is_met_at_its_very_limit_and_by_the_median() -> None:
    assert Measurement("n", "us", (10.0, 1.0, 900.0), Target("<=", 10)).verdict == MET
    assert Measurement("n", "us", (10.1, 1.0, 900.0), Target("<=", 10)).verdict == MISSED
    assert Measurement("n", "1/s", (5.0, 7.0), Target(">=", 6)).verdict == MET
    assert Measurement("n", "1/s", (5.0, 6.9), Target(">=", 6)).verdict == MISSED
    assert Measurement("n", "1/s", (5.0,)).verdict == ""


def test_what_was_not_measured_has_no_value_and_meets_no_target() -> None:
    nothing = Measurement("n", "us", (), Target("<=", 1))
    assert (nothing.value, nothing.verdict) == (None, NOT_MEASURED)
    assert Measurement("n", "us", (1.0,), Target("<=", None)).verdict == NOT_MEASURED
    runs = Runs()
    runs.add("lookup: p50", 1.0)
    with pytest.raises(KeyError, match="lookup: p99"):
        runs.measurements("us", {"lookup: p99": Target("<=", 1)})


def test_runs_of_a_name_are_one_number_with_its_statistics() -> None:
    runs = Runs()
    for values in ([1.0, 2.0, 3.0], [2.0, 4.0, 6.0]):
        runs.add_latencies("lookup", values, "p50", "max")
    numbers = runs.measurements("us", {"lookup: max": Target("<=", 4)})
    assert [(number.name, number.values, number.verdict) for number in numbers] == [
        ("lookup: p50", (2.0, 4.0), ""),
        ("lookup: max", (3.0, 6.0), MISSED),
    ]


def test_statistics_of_latencies() -> None:
    values = [float(value) for value in range(101)][::-1]
    assert statistic_of(values, "p50") == 50
    assert statistic_of(values, "p99") == 99
    assert statistic_of(values, "max") == 100
    assert (change_of(200, 210), change_of(200, 150)) == (5, -25)
    assert distribution_of(values) == pytest.approx(PLOTTED_PERCENTILES)


@pytest.mark.parametrize(
    ("num_stored", "seconds"),
    [(192, 0.0), (500, 0.0), (191, 0.5), (128, 0.5), (127, 1.25), (64, 1.25), (63, 1.25), (0, 1.25)],
)
def test_a_loss_reaches_from_the_last_acknowledgement_that_holds_to_the_end(num_stored: int, seconds: float) -> None:
    acknowledged = [(10.0, 64), (10.75, 128), (11.25, 192)]
    assert lost_seconds(acknowledged, num_stored) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (3.0, "3"),
        (20000.0, "20 000"),
        (1234.5, "1 234"),
        (99.94, "99.9"),
        (1.5, "1.50"),
        (0.00349, "0.0035"),
    ],
)
def test_numbers_are_shown_with_the_digits_that_mean_something(value: float, text: str) -> None:
    assert shown(value) == text


def test_made_up_tokens_depend_on_their_seed_alone_and_on_no_length() -> None:
    tokens = made_up_tokens(5000, seed=3)
    assert len(tokens) == 5000
    assert tokens.dtype == np.int32
    assert 0 <= tokens.min() <= tokens.max() < VOCAB_SIZE
    assert np.array_equal(tokens, made_up_tokens(5000, seed=3))
    assert not np.array_equal(tokens, made_up_tokens(5000, seed=4))


def test_made_up_tokens_repeat_themselves_but_not_always() -> None:
    tokens = made_up_tokens(60_000, seed=0).tolist()
    grams = [tuple(tokens[end - 4 : end]) for end in range(4, len(tokens))]
    known = set(grams[:50_000])
    share = sum(gram in known for gram in grams[50_000:]) / len(grams[50_000:])
    assert 0.3 < share < 0.9


@given(st.integers(1, 300), st.integers(1, 40))
def test_documents_are_pieces_of_the_stream_in_order(num_tokens: int, length: int) -> None:
    stream = np.arange(num_tokens, dtype=np.int32)
    documents = documents_of(stream, length)
    joined = [token for document in documents for token in document]
    assert joined == list(range(len(joined)))
    assert num_tokens - len(joined) < length
    assert {len(document) for document in documents} <= {length, num_tokens}


@given(st.integers(16, 400), st.integers(1, 50))
def test_contexts_are_whole_and_reach_to_the_end(num_tokens: int, count: int) -> None:
    contexts = contexts_of(np.arange(num_tokens, dtype=np.int32), count, 16)
    assert len(contexts) == count
    assert all(context == list(range(context[0], context[0] + 16)) for context in contexts)
    assert contexts[0][0] == 0
    assert count == 1 or contexts[-1][-1] == num_tokens - 1


def test_a_replay_of_a_known_document_accepts_all_that_is_proposed() -> None:
    document = list(range(100, 160))
    ours = replay([document], [document], max_len=10)["ours"]
    # One token is given; each proposal brings 10 and the target's own, the last one the 4 that are left.
    assert len(ours["lookup_us"]) == 6
    assert ours["accepted_per_proposal"] == pytest.approx((5 * 10 + 4) / 6)
    assert ours["empty_rate"] == 0


def test_a_replay_of_an_unknown_document_goes_on_token_by_token() -> None:
    ours = replay([list(range(50))], [list(range(100, 120))], max_len=10)["ours"]
    assert len(ours["lookup_us"]) == 19
    assert ours["accepted_per_proposal"] == 0
    assert ours["empty_rate"] == 1


def results_of(**changes: Any) -> dict[str, Any]:
    """A small run: one target met, one missed."""
    times = distribution_of([100.0, 200.0, 900.0])
    section = Section(
        "Lookup of one context",
        [
            Measurement("lookup: p50", "us", (150.0, 170.0, 160.0), Target("<=", 200)),
            Measurement("lookup: p99", "us", (700.0, 650.0, 900.0), Target("<=", 600)),
            Measurement("echo: p50", "us", (90.25,)),
        ],
        ["Made-up tokens."],
        {"lookup": times, "echo": times},
        {"p50": [[1000.0, 10.0], [10_000.0, 12.0]]},
    )
    return {
        "suite": "datastore",
        "environment": {
            "cpu": "A CPU",
            "num_cores": 2,
            "memory_gib": 8.0,
            "versions": {"grpcio": "1.85", "torch": None},
        },
        "config": {"repeats": 3, "seed": 0, "cores": [0, 1], "is_quick": False},
        "interrupted": False,
        "failures": {},
        "sections": [section.to_json()],
    } | changes


def test_each_number_stands_beside_its_target() -> None:
    text = report_of(results_of()).to_markdown()
    assert "| measured | value | lowest–highest | unit | target | verdict |" in text
    assert "| lookup: p50 | 160 | 150–170 | us | ≤ 200 | met |" in text
    assert "| lookup: p99 | 700 | 650–900 | us | ≤ 600 | missed |" in text
    assert "| echo: p50 | 90.2 |  | us |  |  |" in text
    assert "Made-up tokens." in text
    assert "services on core 0, clients on core 1" in text


def test_the_summary_names_what_was_missed() -> None:
    assert (
        summary_of_sections(results_of()["sections"]) == "1 targets met, 1 missed (Lookup of one context: lookup: p99)."
    )


def test_what_must_be_known_is_said_before_any_number() -> None:
    config = {**results_of()["config"], "is_quick": True}
    text = report_of(results_of(config=config, interrupted=True, failures={"ring": "WorkerError: gone"})).to_markdown()
    for note in (QUICK_NOTE, "parts are missing", "ring could not be measured: WorkerError: gone"):
        assert 0 <= text.index(note) < text.index("| measured |")


def test_a_table_fits_into_an_ordinary_terminal() -> None:
    console = Console(width=118, force_terminal=False)
    with console.capture() as capture:
        report_of(results_of()).print(console)
    text = capture.get()
    assert "…" not in text
    assert "missed" in text
    assert "Made-up tokens." in text


def test_numbers_report_and_picture_are_written(tmp_path: Path) -> None:
    paths = DatastoreSuite.write(results_of(), tmp_path / "new")
    assert [path.name for path in paths] == ["results.json", "report.md", "lookup_of_one_context.png"]
    [section] = json.loads(paths[0].read_text())["sections"]
    assert [number["verdict"] for number in section["measurements"]] == [MET, MISSED, ""]
    assert "![lookup of one context](lookup_of_one_context.png)" in paths[1].read_text()
    with Image.open(paths[2]) as image:
        assert min(image.size) >= 300
        assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 10


@pytest.mark.timeout(420)
@pytest.mark.suite
def test_the_suite_measures_everything_in_small_sizes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outrider_cli", "bench", "datastore", "--quick", "--repeats", "1"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failures"] == {}
    assert not results["interrupted"]
    numbers = {
        (section["title"], number["name"]): number["value"]
        for section in results["sections"]
        for number in section["measurements"]
    }
    assert numbers["The datastore is killed (SIGKILL) with records under way", "acknowledged tokens lost"] == 0
    assert numbers["The datastore is killed (SIGKILL) with records under way", "acknowledged tokens"] > 0
    assert (
        numbers["Lookup of one context", "lookup, back to back: p50"]
        > numbers["Lookup of one context", "echo, back to back: p50"]
    )
    assert numbers["Lookups while Redis is away (SIGKILL), or hangs (SIGSTOP)", "Redis killed, contexts found"] > 50
    titles = " ".join(title for title, _ in numbers)
    for word in ("prior", "generation", "batches", "Local tiers", "Ring", "replica", "sessions", "Replay"):
        assert word in titles
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.json",
        "report.md",
        "lookup_of_one_context.png",
        "ring_in_process.png",
    }
