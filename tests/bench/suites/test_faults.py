"""The faults' suite: its flags, its plan, its wire, its numbers and its report; and once all of it, in small sizes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from outrider_bench.config import FaultsConfig
from outrider_bench.report import QUICK_NOTE
from outrider_bench.result import MET, MISSED
from outrider_bench.suites.faults.claims import sections_of
from outrider_bench.suites.faults.experiments import (
    CHOICES,
    GARBAGE,
    KILL,
    REDIS,
    SLOW,
    SPECULATOR,
    Fault,
    faults_of,
    sizes_of,
)
from outrider_bench.suites.faults.fault_stack import FaultProxy
from outrider_bench.suites.faults.observed import Holdings, Observed, Outcome, Process, Suffered, num_client_tasks
from outrider_bench.suites.faults.report import report_of
from outrider_bench.suites.faults.sessions import DRAFTING, OTHERS, cases_of
from outrider_bench.suites.faults.suite import FaultsSuite


def test_faults_are_decided_by_the_seed_and_evenly_spaced() -> None:
    config = FaultsConfig(minutes=10, num_faults=120, seed=5)
    faults = faults_of(config)
    assert faults == faults_of(config)
    assert faults != faults_of(FaultsConfig(minutes=10, num_faults=120, seed=6))
    assert [fault.due_s for fault in faults] == pytest.approx([5.0 * number for number in range(120)])
    assert all(0.3 <= fault.lasting_s <= 4 for fault in faults)


def test_every_fault_of_every_part_happens_about_equally_often() -> None:
    faults = faults_of(FaultsConfig(num_faults=200))
    counts = [sum((fault.part, fault.kind) == choice for fault in faults) for choice in CHOICES]
    assert max(counts) - min(counts) <= 1
    assert {fault.replica for fault in faults} == {0, 1}


def test_cases_and_methods_are_mixed() -> None:
    cases = cases_of(sizes_of(FaultsConfig()), 3)
    assert len({case.prompt for case in cases}) == len(cases)
    assert {case.options["temperature"] for case in cases} == {0.0, 0.7, 1.0}
    assert {"pearl", "auto", "double"} <= {method.name for method in DRAFTING}
    assert {"off", "retrieval", "spacelike"} == {method.name for method in OTHERS}


@asynccontextmanager
async def echoing() -> AsyncIterator[FaultProxy]:
    """A wire to something that says what it hears."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1024):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with FaultProxy(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", seed=1) as proxy:
        yield proxy
    server.close()


async def connect(proxy: FaultProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = proxy.address.partition(":")
    return await asyncio.open_connection(host, int(port))


async def test_a_garbled_wire_changes_some_bytes_and_loses_none() -> None:
    async with echoing() as proxy:
        reader, writer = await connect(proxy)
        proxy.garble()
        heard = b""
        for _ in range(100):
            writer.write(bytes(64))
            heard += await asyncio.wait_for(reader.readexactly(64), 10)
        assert 5 < sum(byte != 0 for byte in heard) < 80
        await proxy.heal()
        writer.write(bytes(64))
        assert await asyncio.wait_for(reader.readexactly(64), 10) == bytes(64)
        writer.close()


async def test_a_connection_through_the_proxy_is_no_client_task() -> None:
    async with echoing() as proxy:
        num_before, num_all_before = num_client_tasks(), len(asyncio.all_tasks())
        reader, writer = await connect(proxy)
        writer.write(b"x")
        assert await asyncio.wait_for(reader.readexactly(1), 10) == b"x"
        # The sixth task is that of the echoing server behind the proxy.
        assert len(asyncio.all_tasks()) == num_all_before + 6
        assert num_client_tasks() == num_before + 1
        writer.close()


def fault(kind: str, part: str = SPECULATOR, number: int = 0) -> Fault:
    return Fault(number, 0.0, part, kind, 1.0, 0, 50.0)


def outcome(**changes: Any) -> Outcome:
    values = {
        "method": "pearl",
        "error": "",
        "is_equal": True,
        "first_difference": None,
        "num_tokens": 100,
        "num_resumes": 0,
        "longest_pause_s": 0.5,
    }
    return Outcome(**(values | changes))


def observed() -> Observed:
    """Five faults of ten seconds each, and drafted tokens between some of them."""
    seen = Observed(time.monotonic())
    kinds = [(KILL, SPECULATOR), (SLOW, SPECULATOR), (KILL, REDIS), (GARBAGE, SPECULATOR), (KILL, SPECULATOR)]
    for number, (kind, part) in enumerate(kinds):
        seen.suffered.append(Suffered(fault(kind, part, number), 10.0 * number + 1, 10.0 * number + 4))
    for moment in (0.5, 5.5, 15.0, 25.0, 35.5):
        seen.count(seen.began + moment, 7, has_drafted=True)
    seen.count(seen.began + 5.0, 3, has_drafted=False)
    seen.add(outcome())
    seen.add(outcome(num_resumes=2, longest_pause_s=3.5))
    return seen


def test_recovery_is_the_time_until_a_drafted_token_is_accepted_again() -> None:
    seen = observed()
    found = [seen.recovery_s(suffered) for suffered in seen.suffered]
    assert found[0] == pytest.approx(1.5)
    # Slow is no loss; Redis drafts nothing; garbage at 34 s is over when the next fault has not begun; the last never.
    assert found[1:3] == [None, None]
    assert found[3] == pytest.approx(1.5)
    assert found[4] is None
    seen.suffered[4].began_s = 35.0
    assert seen.recovery_s(seen.suffered[3]) is None  # the next one came first


def test_tokens_are_counted_by_the_second() -> None:
    timeline = observed().timeline()
    assert (timeline[0], timeline[5], timeline[15], len(timeline), sum(timeline)) == (7, 10, 7, 36, 38)


def holdings(num_files: int, num_sessions: int = 0) -> Holdings:
    processes = {"verifier-0": Process(1, num_files, 20, 100_000_000)}
    return Holdings(processes, {"verifier-0": num_sessions}, 3)


def results_of(seen: Observed, *snapshots: Holdings, **changes: Any) -> dict[str, Any]:
    """A run that has come to its end."""
    return {
        "suite": "faults",
        "environment": {"cpu": "A CPU", "num_cores": 2, "memory_gib": 8.0, "versions": {"grpcio": "1.85"}},
        "config": {"minutes": 1.0, "num_faults": 5, "num_sessions": 8, "seed": 0, "is_quick": False},
        "interrupted": False,
        "failures": {},
        "sections": [section.to_json() for section in sections_of(seen, snapshots)],
        "holdings": [each.to_json() for each in snapshots],
        **seen.to_json(),
    } | changes


def verdicts_of(results: dict[str, Any]) -> dict[str, str]:
    return {number["name"]: number["verdict"] for section in results["sections"] for number in section["measurements"]}


def test_what_is_as_it_should_be_is_met() -> None:
    found = verdicts_of(results_of(observed(), holdings(10), holdings(12), holdings(12)))
    assert set(found.values()) == {MET, ""}
    assert found["kill: longest"] == found["garbage: longest"] == MET
    assert found["verifier-0: open files that grew in the calm after the faults"] == MET


def test_what_is_not_as_it_should_be_is_missed() -> None:
    seen = observed()
    seen.add(outcome(is_equal=False, first_difference=17))
    seen.add(outcome(is_equal=False, error="UNAVAILABLE: gone"))
    seen.suffered[0].returned_s = 3.0
    found = verdicts_of(results_of(seen, holdings(10), holdings(12), holdings(40, num_sessions=1)))
    missed = {name for name, verdict in found.items() if verdict == MISSED}
    assert missed == {
        "texts that differ from those without faults",
        "errors that reached a caller",
        "kill: longest",
        "sessions on all services",
        "verifier-0: open files that grew in the calm after the faults",
    }


def test_a_report_tells_of_every_generation_that_went_wrong() -> None:
    seen = observed()
    seen.add(outcome(is_equal=False, first_difference=17))
    seen.add(outcome(is_equal=False, error="UNAVAILABLE: gone", num_resumes=3))
    text = report_of(results_of(seen, holdings(10), holdings(12), holdings(12))).to_markdown()
    assert "pearl, 100 tokens, 0 resumed: differs from token 17 on" in text
    assert "pearl, 100 tokens, 3 resumed: UNAVAILABLE: gone" in text
    assert "| texts that differ from those without faults | 1 | texts | ≤ 0 | missed |" in text
    assert "5 faults in 1 minutes, 8 sessions, seed 0" in text
    assert "2 × kill of the speculator" in text


def test_what_must_be_known_is_said_before_any_number() -> None:
    config = {**results_of(observed())["config"], "is_quick": True}
    text = report_of(
        results_of(observed(), config=config, interrupted=True, failures={"run": "ProcessFailed: gone"})
    ).to_markdown()
    for note in (QUICK_NOTE, "faults and numbers are missing", "run failed: ProcessFailed: gone"):
        assert 0 <= text.index(note) < text.index("| seen |")


def test_a_table_fits_into_an_ordinary_terminal() -> None:
    console = Console(width=118, force_terminal=False)
    with console.capture() as capture:
        report_of(results_of(observed(), holdings(10), holdings(12), holdings(12))).print(console)
    assert "…" not in capture.get()


def test_numbers_report_and_picture_are_written(tmp_path: Path) -> None:
    paths = FaultsSuite.write(results_of(observed(), holdings(10), holdings(12), holdings(12)), tmp_path / "new")
    assert [path.name for path in paths] == ["results.json", "report.md", "tokens_over_time.png"]
    results = json.loads(paths[0].read_text())
    assert [one["recovery_s"] for one in results["faults"]][:3] == [pytest.approx(1.5), None, None]
    assert "![tokens over time](tokens_over_time.png)" in paths[1].read_text()
    with Image.open(paths[2]) as image:
        assert min(image.size) >= 300
        assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 10


@pytest.mark.timeout(920)
@pytest.mark.suite
def test_the_suite_hurts_everything_and_callers_notice_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outrider_cli", "bench", "faults", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["failures"], results["interrupted"], results["strange"]) == ({}, False, [])
    assert len(results["faults"]) == 6
    assert all(one["returned_s"] > one["began_s"] for one in results["faults"])
    found = verdicts_of(results)
    assert found["texts that differ from those without faults"] == MET
    assert found["errors that reached a caller"] == MET
    assert found["sessions on all services"] == MET
    assert sum(results["num_generations"].values()) >= 8
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "report.md", "tokens_over_time.png"}
