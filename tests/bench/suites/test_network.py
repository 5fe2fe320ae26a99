"""The network's suite: its flags, its plan, who takes turns at which distance; and once all of it, for real."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from outrider.v1 import types_pb2
from outrider_bench.config import NETWORK_PARTS
from outrider_bench.drivers import GenerationFailed, to_proto
from outrider_bench.experiment import OFF, PLAIN, Experiment, contender, label_of
from outrider_bench.samples import Block, Condition, GenerationSample, Request, Sample, generation_from_json
from outrider_bench.simulation import Odds
from outrider_bench.suites.network import traffic as traffic_module
from outrider_bench.suites.network.bound import MeasuredCosts, bound_of
from outrider_bench.suites.network.experiments import EDGE, QUICK, NetworkSizes, experiments_of, rtt_name
from outrider_bench.suites.network.round_trips import run_round_trips
from outrider_bench.suites.network.traffic import CountingDriver, TrafficCount
from outrider_bench.workers.wan import generation_to_json
from outrider_cli.links.control import LinkReport
from outrider_cli.links.direction import LinkSettings
from outrider_cli.prompts import Prompt
from tests.bench.samples import generation


class FakeLink:
    """Notes what it is told; answers with a little more traffic each time."""

    def __init__(self, bytes_per_report: int = 0) -> None:
        self.delay_ms = 0.0
        self._step = bytes_per_report
        self.num_bytes = 0

    def change(self, **changes: Any) -> LinkReport:
        self.delay_ms = changes.get("delay_ms", self.delay_ms)
        return self.report()

    def report(self) -> LinkReport:
        self.num_bytes += self._step
        return LinkReport(LinkSettings(), "up", self.num_bytes, 2 * self.num_bytes, 0)


class FakeDriver:
    """Notes who generated at which distance."""

    def __init__(self, link: FakeLink, refused: str = "") -> None:
        self.asked: list[tuple[float, str, int]] = []
        self._link, self._refused = link, refused

    async def generate(self, request: Request, options: Mapping[str, Any]) -> GenerationSample:
        if options["method"] == self._refused:
            raise GenerationFailed("no")
        self.asked.append((self._link.delay_ms, options["method"], request.max_tokens))
        self._link.num_bytes += 100
        return generation(4, 1 if options["method"] == OFF else 2)


def at_distances(*rtts_ms: float, repeats: int = 2) -> list[Experiment]:
    return [
        Experiment(
            rtt_name(rtt_ms, 0.0),
            "rtt",
            "t",
            (PLAIN, contender("pearl"), contender("auto")),
            (0.0,),
            (Prompt("a"), Prompt("b")),
            200,
            repeats,
            rtt_ms=rtt_ms,
        )
        for rtt_ms in rtts_ms
    ]


async def run_fakes(refused: str = "", **how: Any) -> tuple[FakeDriver, dict[str, list[Block]], Any]:
    link, kept = FakeLink(), dict[str, list[Block]]()
    driver = FakeDriver(link, refused)
    failures = await run_round_trips(
        at_distances(0.0, 10.0, 40.0, **how),
        0,
        (),
        driver,
        link,  # type: ignore[arg-type]
        lambda _: None,
        lambda name, block: kept.setdefault(name, []).append(block),
    )
    return driver, kept, failures


async def test_every_block_is_measured_at_its_own_distance() -> None:
    driver, kept, failures = await run_fakes()
    assert failures == {"rtt-0-T0": {}, "rtt-10-T0": {}, "rtt-40-T0": {}}
    for name, blocks in kept.items():
        assert len(blocks) == 3 * 2 * 2, name
        assert {f"rtt-{block.condition.rtt_ms:g}-T0" for block in blocks} == {name}
    measured = [delay_ms for delay_ms, _, tokens in driver.asked if tokens == 200]
    assert {delay_ms: measured.count(delay_ms) for delay_ms in measured} == {0.0: 12, 5.0: 12, 20.0: 12}


async def test_distances_take_turns_and_none_is_always_first() -> None:
    driver, *_ = await run_fakes(repeats=3)
    visits = [delay_ms for delay_ms, _, tokens in driver.asked if tokens == 200]
    order = [delay_ms for index, delay_ms in enumerate(visits) if index == 0 or visits[index - 1] != delay_ms]
    assert order == [0.0, 5.0, 20.0, 5.0, 20.0, 0.0, 20.0, 0.0, 5.0]


async def test_those_who_live_on_the_distance_learn_it_anew_after_each_change_and_the_others_warm_up_once() -> None:
    driver, *_ = await run_fakes()
    warm_ups = [(delay_ms, method) for delay_ms, method, tokens in driver.asked if tokens < 200]
    assert [delay_ms for delay_ms, method in warm_ups if method == "pearl"] == [0.0]
    assert {delay_ms for delay_ms, method in warm_ups if method == "auto"} == {0.0, 5.0, 20.0}
    assert sum(method == "auto" for _, method in warm_ups) == 3 * 6


async def test_a_refused_contender_is_reported_at_every_distance_and_the_others_are_measured() -> None:
    _, kept, failures = await run_fakes(refused="pearl")
    assert failures == {name: {"pearl": "no"} for name in ("rtt-0-T0", "rtt-10-T0", "rtt-40-T0")}
    assert all({block.condition.method for block in blocks} == {"off", "auto"} for blocks in kept.values())


async def test_bytes_are_those_of_the_generation_once_nothing_more_comes() -> None:
    link = FakeLink()
    driver = CountingDriver(FakeDriver(link), link)  # type: ignore[arg-type]
    traffic = TrafficCount()
    for number in range(2):
        made = await driver.generate(Request("a", 0.0, 0, 8), {"method": "pearl"})
        condition = Condition("pearl", "ratio rule", 1.0)
        traffic.add(Block(condition, 0, 1.0, (Sample(condition, 0, number, "code", made),)), driver)
    failed = Sample(condition, 0, 2, "code", None, "no")
    traffic.add(Block(condition, 0, 1.0, (failed,)), driver)
    found = traffic.of("pearl ratio rule", 1.0)
    assert found is not None
    assert (found.bytes_up, found.bytes_down) == (200, 400)
    assert found.per_round == 600 / found.num_rounds
    assert found.per_accepted == 600 / found.num_accepted
    assert traffic.of("pearl", 1.0) is None


async def test_a_link_that_never_falls_silent_does_not_hold_the_count_up_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traffic_module, "MAX_SETTLING_S", 0.1)
    link = FakeLink(bytes_per_report=1)
    driver = CountingDriver(FakeDriver(link), link)  # type: ignore[arg-type]
    await driver.generate(Request("a", 0.0, 0, 8), {"method": "pearl"})
    assert driver.bytes_up >= 100


def test_a_generation_comes_back_from_a_worker_as_it_was() -> None:
    made = generation(4, 2)
    assert generation_from_json(json.loads(json.dumps(generation_to_json(made)))) == made


def test_an_experiment_has_a_name_of_its_own_and_a_quick_run_has_all_parts() -> None:
    for sizes in (NetworkSizes(), QUICK):
        experiments = experiments_of(NETWORK_PARTS, sizes, 3)
        names = [experiment.name for experiment in experiments]
        assert len(set(names)) == len(names)
        assert {experiment.part for experiment in experiments} == set(NETWORK_PARTS) - {"simulation"}
        for experiment in experiments:
            labels = [label_of(one) for one in experiment.contenders]
            assert len(set(labels)) == len(labels), experiment.name
            assert experiment.config(0, ()).target == experiment.target
        assert sizes.rtts_ms[0] == sizes.sampled_rtts_ms[0] == 0.0


def test_what_a_contender_asks_for_is_what_the_server_hears() -> None:
    sent = {
        (experiment.name, label_of(one)): to_proto(Request("p", 1.0, 0, 8), one.options).speculation
        for experiment in experiments_of(NETWORK_PARTS, NetworkSizes(), 3)
        for one in experiment.contenders
    }
    assert sent["bytes-T0", "card K = 50"].card.beam_width == 50
    assert sent["bytes-T1", "saguaro ratio rule"].acceptance_rule == types_pb2.ACCEPTANCE_RULE_RATIO
    assert ("bytes-T0", "pearl ratio rule") not in sent  # greedy, both rules say the same
    assert sent["edge-64", label_of(EDGE)].method == types_pb2.METHOD_UNSPECIFIED


async def test_a_bound_is_of_the_fastest_tree_and_never_below_plain_decoding() -> None:
    costs = MeasuredCosts({1: 20.0, 32: 40.0}, {1: 1.0, 32: 2.0}, 1.0, 1.0)
    bound = await bound_of(0.0, Odds(((0.7, 0.1),)), costs, (0.0, 40.0), QUICK)
    assert bound.off_tokens_per_s == pytest.approx(1e3 / 21)
    assert bound.tokens_per_s[0.0] > bound.off_tokens_per_s
    kept = bound.kept(40.0)
    assert kept is not None
    assert kept <= 1.0
    assert bound.kept(2.0) is None
    assert [point["rtt_ms"] for point in bound.to_json()["points"]] == [0.0, 40.0]


@pytest.mark.timeout(600)
@pytest.mark.suite
def test_the_suite_measures_everything_in_small_sizes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outrider_cli", "bench", "network", "--quick", "--repeats", "1"]
    command += ["--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=570, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failures"] == {}
    assert not results["interrupted"]
    for experiment in results["experiments"]:
        assert experiment["failures"] == {}
        assert all(row["completed"] == experiment["num_prompts"] for row in experiment["rows"])
    [texts] = [each["rows"] for each in results["experiments"] if each["name"] == "wan-texts"]
    assert {row["identical_to_off"] for row in texts} == {1.0}
    assert "1 Mbit/s from the speculator to the verifier" in results["links"]["wan"]
    # `auto` may go plainly, and then nothing is sent.
    drafted = [each for each in results["traffic"] if each["label"] != "auto"]
    assert all(each["bytes_up"] > 300 and each["bytes_down"] > 100 for each in drafted)
    assert [bound["temperature"] for bound in results["bounds"]] == [0.0, 1.0]
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "results.md", "rtt.png", "bytes.png"}
