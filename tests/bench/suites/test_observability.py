"""The suite of metrics and traces: its order, its numbers, its report; and once all of it, in small sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from outrider_bench.report import QUICK_NOTE
from outrider_bench.result import MET, MISSED
from outrider_bench.suites.observability.claims import sections_of
from outrider_bench.suites.observability.experiments import (
    AGAIN,
    ALL_TRACES,
    CPU_TIME,
    METHODS,
    METRICS,
    NOTHING,
    SOME_TRACES,
    SPEED,
    VARIANTS,
    order_of,
)
from outrider_bench.suites.observability.report import report_of
from outrider_bench.suites.observability.suite import ObservabilitySuite


def rounds(**losses: float) -> dict[str, list[dict[str, dict[str, float]]]]:
    """Three rounds on a machine that is three times as fast in the last one. Losses in percent, by variant; CPU time
    is what the services take while they are slower."""
    by_name = {"metrics": METRICS, "some": SOME_TRACES, "all": ALL_TRACES, "again": AGAIN}
    shares = {NOTHING: 1.0} | {variant: 1 - losses.get(name, 0.0) / 100 for name, variant in by_name.items()}
    speeds = (100.0, 120.0, 300.0)
    return {"off": [{name: {SPEED: speed * s, CPU_TIME: 5 / s} for name, s in shares.items()} for speed in speeds]}


def results_of(measured: dict[str, list[dict[str, dict[str, float]]]], **changes: Any) -> dict[str, Any]:
    environment = {"cpu": "a CPU", "num_cores": 2, "memory_gib": 8, "versions": {"torch": "2"}}
    config = {"target": "demo/target", "concurrency": 4, "max_tokens": 48, "num_rounds": 3, "seed": 0}
    return {
        "environment": environment,
        "config": config | {"cores": [0, 1], "is_quick": False},
        "interrupted": False,
        "failures": {},
        "sections": [section.to_json() for section in sections_of(measured)],
        "rounds": measured,
    } | changes


def test_nobody_is_always_first_and_nobody_always_behind_the_same_one() -> None:
    orders = [order_of(VARIANTS, number) for number in range(2 * len(VARIANTS))]
    assert all(sorted(order) == sorted(VARIANTS) for order in orders)
    assert set(Counter(order[0] for order in orders).values()) == {2}
    for variant in VARIANTS:
        places = [order.index(variant) for order in orders]
        before = {order[place - 1] for order, place in zip(orders, places, strict=True) if place}
        assert len(before) >= 2


def test_a_loss_is_that_of_pairs_whatever_the_machine_does_meanwhile() -> None:
    [section] = sections_of(rounds(again=0.0, metrics=0.5, some=3.0, all=5.0))
    found = {number.name: number for number in section.measurements}
    assert found[f"{METRICS}: slower by"].values == pytest.approx((0.5, 0.5, 0.5))
    assert found[f"{METRICS}: slower by"].verdict == MET
    assert found[f"{SOME_TRACES}: slower by"].value == pytest.approx(3.0)
    assert found[f"{SOME_TRACES}: slower by"].verdict == MISSED
    assert found[f"{ALL_TRACES}: slower by"].verdict == ""
    assert found[f"{ALL_TRACES}: more CPU time by"].value == pytest.approx(100 / 19)
    assert [(number.value, number.unit) for number in section.measurements[:2]] == [(120, SPEED), (5, CPU_TIME)]


def test_what_went_wrong_is_said_before_the_numbers() -> None:
    results = results_of(rounds(some=1.0), failures={"turns": "GenerationFailed: UNAVAILABLE: gone"})
    text = report_of({**results, "interrupted": True, "config": {**results["config"], "is_quick": True}}).to_markdown()
    for note in (QUICK_NOTE, "rounds are missing", "turns failed: GenerationFailed: UNAVAILABLE: gone"):
        assert 0 <= text.index(note) < text.index("| what |")
    assert f"| {SOME_TRACES}: slower by | 1 |" in text


def test_a_table_fits_into_an_ordinary_terminal() -> None:
    console = Console(width=118, force_terminal=False)
    with console.capture() as capture:
        report_of(results_of(rounds(again=0.1, metrics=0.5, some=3.0, all=5.0))).print(console)
    assert "…" not in capture.get()


def test_numbers_report_and_picture_are_written(tmp_path: Path) -> None:
    paths = ObservabilitySuite.write(results_of(rounds(again=0.1, metrics=0.5, some=3.0, all=5.0)), tmp_path / "new")
    assert [path.name for path in paths] == ["results.json", "report.md", "losses.png"]
    assert "![losses](losses.png)" in paths[1].read_text()
    with Image.open(paths[2]) as image:
        assert min(image.size) >= 300


@pytest.mark.timeout(620)
@pytest.mark.suite
def test_the_suite_compares_services_that_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outrider_cli", "bench", "observability", "--quick"]
    done = subprocess.run(
        [*command, "--repeats", "2", "--out", str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failures"] == {}, done.stdout + done.stderr
    assert done.returncode == 0
    assert results["interrupted"] is False
    for method in METHODS:
        assert [set(speeds) for speeds in results["rounds"][method]] == [set(VARIANTS), set(VARIANTS)]
        turns = [turn for round_ in results["rounds"][method] for turn in round_.values()]
        assert all(turn[SPEED] > 0 and turn[CPU_TIME] > 0 for turn in turns)
