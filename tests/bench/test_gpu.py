"""The GPU suite: its cells and their results; and a full run, in small sizes, on a CPU."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from outrider_bench.config import GpuConfig
from outrider_bench.gpu import suite
from outrider_bench.gpu.cells import PEERS, Cell, Kept, cells_of, room_in, tokens_of
from outrider_bench.gpu.generations import NUM_ALONE, options_of, requests_of, value_of
from outrider_bench.gpu.report import report_of
from outrider_bench.gpu.suite import GpuSuite
from outrider_bench.samples import Chunk, GenerationSample, Request, Rounds
from outrider_bench.workers.gpu import GpuWorker

CONFIG = GpuConfig(methods=("off", "pearl"), sessions=(1, 8), temperatures=(0.0, 0.7), contexts=(64,), repeats=2)


def sample(token_ids: list[int], seconds_a_token: float = 0.1, num_rounds: int = 0) -> GenerationSample:
    rounds = Rounds(
        num_rounds=num_rounds or len(token_ids),
        num_accepted=len(token_ids) - num_rounds if num_rounds else 0,
        times_p50={"round_ms": 1e3 * seconds_a_token},
    )
    chunks = tuple(Chunk(0.5 + index * seconds_a_token, 1) for index in range(len(token_ids)))
    return GenerationSample(5, tuple(token_ids), chunks, chunks[-1].at_s, rounds)


def test_repeats_come_round_about_and_what_all_is_compared_with_comes_first() -> None:
    cells = [cell for cell in cells_of(CONFIG) if cell.part == "services"]
    assert cells[0] == Cell("services", "off", 0.0, 1, 64, 0)
    assert [cell.repeat for cell in cells] == [0] * 8 + [1] * 8
    assert len({cell.key for cell in cells_of(CONFIG)}) == len(cells_of(CONFIG))


def test_off_alone_is_measured_even_where_nobody_asks_for_it() -> None:
    config = GpuConfig(
        methods=("pearl",), sessions=(8,), temperatures=(0.7,), contexts=(64,), repeats=2, parts=("services",)
    )
    off, *others = cells_of(config)
    assert (off.label, off.sessions, off.temperature) == ("off", 1, 0.7)
    assert [(cell.label, cell.sessions) for cell in others] == [("pearl", 8)] * 2


def test_other_programs_decode_one_text_at_a_time_at_the_first_context() -> None:
    cells = [cell for cell in cells_of(GpuConfig(contexts=(64, 128), repeats=1)) if cell.part == "peers"]
    assert [cell.label for cell in cells] == [*PEERS]
    assert {(cell.sessions, cell.temperature, cell.context) for cell in cells} == {(1, 0.0, 64)}


def test_all_methods_and_repeats_are_asked_for_the_same_texts() -> None:
    prompts = [f"prompt {index}" for index in range(8)]
    one, eight = (requests_of(Cell("services", "off", 0.7, count, 64), prompts, CONFIG) for count in (1, 8))
    assert len(one) == NUM_ALONE
    assert eight[:NUM_ALONE] == one
    assert len({(request.prompt, request.seed) for request in eight}) == 8


def test_what_retrieves_asks_the_session_itself_since_a_datastore_would_remember_the_cells_before() -> None:
    for method in ("retrieval", "auto", "pearl+retrieval"):
        assert len(options_of(method)["retrieval_params"].sources) == 2
    assert options_of("pearl+retrieval")["method"] == "pearl"
    assert options_of("pearl") == {"method": "pearl"}


def test_a_rate_is_that_of_all_sessions_together_without_their_prompts() -> None:
    alone = [[1, 2, 3], [4, 5, 6]]
    samples = [sample([1, 2, 3], 0.1), sample([4, 5, 9], 0.2)]
    value = value_of(Cell("services", "off", 0.0, 2, 64), samples, alone)
    # Four tokens in 0.2 and 0.4 seconds: on average 6.7 a second per session.
    assert value["tokens_per_s"] == pytest.approx(2 * 4 / 0.6)
    assert value["ttft_ms"] == pytest.approx(500)
    assert (value["num_equal"], value["num_compared"]) == (1, 2)
    assert value["times_ms"] == {"round_ms": pytest.approx(150)}


def test_tokens_of_a_round_count_the_targets_own() -> None:
    value = value_of(Cell("services", "pearl"), [sample([1, 2, 3, 4, 5, 6], num_rounds=2)], None)
    assert value["tokens_per_round"] == 3
    assert value["num_equal"] is None


def test_an_h100_has_no_room_for_32_long_sessions_of_the_pair_and_an_h200_has() -> None:
    config = GpuConfig()
    # 8.8 billion weights, 144 and 112 KiB per token.
    rooms = {memory: room_in(memory, 2 * 8_800_000_000, 256 * 1024) for memory in (79.6, 140.4)}
    wanted = max(tokens_of(cell, config) for cell in cells_of(config))
    assert 32 * (8192 + 128) < wanted < 32 * (8192 + 640)
    assert rooms[79.6] < wanted < rooms[140.4]
    assert all(room % 64 == 0 for room in rooms.values())
    assert room_in(10, 2 * 8_800_000_000, 256 * 1024) == 0


def test_cells_of_another_machine_or_cut_short_are_measured_anew(tmp_path: Path) -> None:
    cell = Cell("services", "off")
    Kept(tmp_path, {"device": "A"}).keep(cell, {"tokens_per_s": 3.0})
    assert not Kept(tmp_path, {"device": "B"}).find(cell)
    path = tmp_path / f"{cell.key}.json"
    path.write_text(path.read_text()[:-20])
    assert not Kept(tmp_path, {"device": "A"}).find(cell)


def test_what_belongs_to_no_cell_is_kept_too(tmp_path: Path) -> None:
    kept = Kept(tmp_path, {"device": "A"})
    kept.keep_anchor({"at_s": 1.0, "tokens_per_s": 200.0})
    kept.keep_exact_off_reason("a row's bits depend on others")
    again, other = Kept(tmp_path, {"device": "A"}), Kept(tmp_path, {"device": "B"})
    assert (again.anchors, again.exact_off_reason) == (kept.anchors, "a row's bits depend on others")
    assert (other.anchors, other.exact_off_reason) == ([], "")


def test_no_cell_begins_that_would_end_beyond_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(suite.time, "perf_counter", lambda: now[0])

    async def take(seconds: float) -> None:
        now[0] += seconds

    bench = GpuSuite(GpuConfig(minutes=10))
    cell = Cell("micro", "target", context=64)
    for at_s, is_over in ((500.0, False), (569.0, False), (571.0, True)):
        now[0] = at_s
        assert bench._is_over(cell) == is_over
    now[0] = 500.0
    asyncio.run(bench._attempt_cell(cell, partial(take, 45.0)))
    assert not bench._is_over(cell)
    now[0] = 556.0
    assert bench._is_over(cell)
    assert bench.found()["left_out"] == [cell.key] * 2


def test_loops_of_steps_are_measured_of_the_draft_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, bool] = {}

    class Worker:
        async def call(self, name: str, *, model: str, is_draft: bool, **_arguments: Any) -> dict[str, Any]:
            assert name == "measure"
            asked[model] = is_draft
            return {}

    bench = GpuSuite(GpuConfig())
    monkeypatch.setattr(bench, "_worker", lambda: nullcontext(Worker()))
    bench._folders = {"target": "T", "draft": "D"}
    bench._began = time.perf_counter()
    cells = [Cell("micro", role, context=64) for role in ("target", "draft")]
    asyncio.run(bench._run_micro(cells, lambda _line: None))
    assert (asked, bench.failures) == ({"T": False, "D": True}, {})


def test_another_program_that_compiles_for_too_long_is_given_up_and_the_rest_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Worker:
        def __init__(self) -> None:
            self.num_begun = 0

        async def call(self, name: str, **_arguments: Any) -> dict[str, Any]:
            assert name == "open"
            return {}

        async def generate(self, request: Request, options: dict[str, Any]) -> GenerationSample:
            self.num_begun += 1
            if "cache_implementation" in options:
                await asyncio.wait_for(asyncio.Event().wait(), 5)  # wasted: without a limit the run would wait, too
            return sample([1, 2, 3])

    worker, bench = Worker(), GpuSuite(GpuConfig(contexts=(64,), repeats=2))
    monkeypatch.setattr(bench, "_worker", lambda: nullcontext(worker))
    monkeypatch.setattr(bench, "_is_over", lambda _cell: False)
    monkeypatch.setattr(suite, "SHARES", {"peers": 0.0})  # anything that does not answer at once exceeds it
    bench._prompts = {64: ["a prompt"] * NUM_ALONE}
    cells = [cell for cell in cells_of(bench.config) if cell.part == "peers"]
    bench._began = time.perf_counter()
    asyncio.run(bench._run_peers(cells, lambda _line: None))
    is_static = [cell.label == "transformers, static cache" for cell in cells]
    first = is_static.index(True)
    assert [*bench._kept.values] == cells[:first]
    assert bench.found()["left_out"] == [cell.key for cell in cells[first:]]
    assert worker.num_begun == first * (1 + NUM_ALONE) + 1
    assert bench.failures == {}


def test_texts_with_a_static_cache_have_one_of_the_same_length() -> None:
    class Generating:
        def generate(self, _request: object, options: dict[str, Any]) -> dict[str, Any]:
            return options

    worker: Any = GpuWorker("cpu")
    worker._hf, worker._max_len = Generating(), 1216
    static = PEERS["transformers, static cache"]
    assert worker.generate({}, static) == {"cache_implementation": "static", "max_cache_len": 1216}
    assert worker.generate({}, PEERS["transformers"]) == {}


def results_of(cells: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    environment = {"cpu": "C", "num_cores": 2, "memory_gib": 8, "versions": {}}
    config = {
        "size": "8b",
        "weights": "widened",
        "drafter": "speculator",
        "max_tokens": 16,
        "repeats": 2,
        "minutes": 10,
    }
    return {
        "environment": environment,
        "device": "H200",
        "memory_gib": 139.0,
        "dtype": "bfloat16",
        "exact_off_reason": "",
        "config": {**config, "seed": 0},
        "cells": cells,
        "anchors": [],
        "left_out": [],
        "failures": {},
        "interrupted": False,
        "duration_s": 60.0,
        **more,
    }


def cell_of(label: str, rate: float, repeat: int, sessions: int = 1) -> dict[str, Any]:
    value = value_of(Cell("services", label, 0.0, sessions, 64), [sample([1, 2, 3])], [[1, 2, 3]])
    place = {"part": "services", "label": label, "temperature": 0.0, "sessions": sessions, "context": 64}
    return {**place, "repeat": repeat, "value": value | {"tokens_per_s": rate}}


def test_a_method_stands_beside_off_with_as_many_sessions() -> None:
    rates = {("off", 1): (10.0, 20.0), ("pearl", 1): (30.0, 30.0), ("off", 8): (60.0, 60.0), ("pearl", 8): (30.0, 90.0)}
    cells = [
        cell_of(label, rate, repeat, sessions)
        for (label, sessions), found in rates.items()
        for repeat, rate in enumerate(found)
    ]
    (chapter,) = report_of(results_of(cells)).chapters
    (table,) = chapter.tables
    found = {(row[0], row[1]): (row[3], row[4], row[-1]) for row in table.rows}
    assert found["pearl", "1"] == ("30.0", "2.00", "2/2")
    assert found["pearl", "8"] == ("60.0", "1.00", "2/2")


def run(*flags: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider_cli", "bench", "gpu", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
def test_without_such_a_device_it_says_so_in_one_line() -> None:
    found = run("--device", "cuda:99")
    assert found.returncode == 2
    assert found.stderr.startswith("error: --device cuda:99: ")
    assert found.stderr.endswith("; --device cpu --size tiny shows without one that all of it works\n")
    assert found.stderr.count("\n") == 1


@pytest.mark.suite
@pytest.mark.timeout(500)
def test_a_small_run_on_a_cpu_measures_everything_and_a_second_one_finds_it(tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--size", "tiny", "--models", str(tmp_path / "models"), "--out", str(tmp_path / "out")]
    found = run(*flags)
    assert found.returncode == 0, found.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (results["interrupted"], results["failures"], results["left_out"]) == (False, {}, [])
    assert {cell["part"] for cell in results["cells"]} == {"services", "peers", "micro"}
    # In float32 every text equals that of `off` alone: with any method, next to others, and by another program.
    compared = [cell["value"] for cell in results["cells"] if cell["part"] != "micro"]
    assert all(value["num_equal"] == value["num_compared"] == NUM_ALONE for value in compared)
    drafted = [cell for cell in results["cells"] if cell["label"] in ("speculative", "transformers, assisted")]
    # The pair agrees as often as the demo pair, in our services and elsewhere.
    assert all(cell["value"]["tokens_per_round"] > 2 for cell in drafted)
    # `auto`'s choices are reported for all of its rounds.
    choices = [cell["value"]["decisions"] for cell in results["cells"] if cell["label"] == "auto"]
    assert choices
    assert all(sum(each.values()) > 0 for each in choices)
    assert "`auto`, 4 at once, T = 0.7, chose, in rounds: " in (tmp_path / "out" / "report.md").read_text()
    again = run(*flags, "--minutes", "0.001")
    assert again.returncode == 0, again.stderr
    later = json.loads((tmp_path / "out" / "results.json").read_text())
    assert later["cells"] == results["cells"]
    assert later["anchors"] == results["anchors"]
    assert later["left_out"] == []
