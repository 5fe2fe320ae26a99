"""What the network's suite says about measurements: claims, tables, Markdown and pictures, from made-up ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from outrider_bench.config import NETWORK_PARTS, NetworkConfig
from outrider_bench.drivers import StackError
from outrider_bench.experiment import Experiment, label_of
from outrider_bench.result import MET, MISSED, NOT_MEASURED
from outrider_bench.samples import Block, Condition, Sample
from outrider_bench.simulation import Odds
from outrider_bench.suites.network import suite as suite_module
from outrider_bench.suites.network.bound import Bound
from outrider_bench.suites.network.report import report_of
from outrider_bench.suites.network.suite import NetworkSuite
from outrider_bench.suites.network.traffic import CountingDriver
from outrider_cli.failures import FAILED
from tests.bench.experiment_samples import made


class Counted(CountingDriver):
    """What a driver would have counted."""

    def __init__(self, bytes_up: int, bytes_down: int) -> None:
        self.bytes_up, self.bytes_down = bytes_up, bytes_down


def seconds_of(experiment: Experiment, label: str) -> float:
    """off takes 10 s; the others 2 s, and at a distance longer."""
    if label == "off":
        return 10.0
    return 2.0 / {0.0: 1.0, 2.0: 0.98, 10.0: 0.92, 40.0: 0.65, 100.0: 0.5}[experiment.rtt_ms]


def a_suite(parts: tuple[str, ...] = NETWORK_PARTS) -> NetworkSuite:
    """A suite that has measured everything: every method keeps the same share, rounds are of 5 tokens."""
    suite = NetworkSuite(NetworkConfig(parts=parts, repeats=1, cores=(0, 1)))
    for experiment in suite.experiments:
        for one in experiment.contenders:
            for temperature in experiment.temperatures:
                generation = made(seconds_of(experiment, label_of(one)), num_rounds=20, num_accepted=80)
                condition = Condition(one.method, one.setting, temperature, rtt_ms=experiment.rtt_ms)
                sample = Sample(condition, 0, 0, "code", generation)
                block = Block(condition, 0, generation.duration_s, (sample,))
                suite.keep(experiment.name, [block])
                if experiment.part == "bytes":
                    suite.traffic.add(block, Counted(1600, 8000))
    if "simulation" in parts:
        suite.bounds[0.0] = Bound(0.0, {0.0: 100.0, 40.0: 91.0, 100.0: 80.0}, 25.0, Odds(((0.9,),)))
    suite.links["wan"] = "Some link."
    return suite


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return a_suite().results()


def claim(results: dict[str, Any], what: str) -> dict[str, Any]:
    [found] = [each for each in results["claims"] if each["name"] == what]
    return dict(found)


@pytest.mark.parametrize(("rtt", "share", "verdict"), [("10", 0.92, MET), ("40", 0.65, MISSED), ("100", 0.5, MET)])
def test_auto_is_held_against_itself_without_a_round_trip(
    results: dict[str, Any], rtt: str, share: float, verdict: str
) -> None:
    found = claim(results, f"T = 0: auto at {rtt} ms by itself at 0")
    assert found["value"] == pytest.approx(share)
    assert found["verdict"] == verdict


def test_auto_is_held_against_off_at_every_distance(results: dict[str, Any]) -> None:
    speedups = [each["value"] for each in results["claims"] if each["name"].startswith("T = 0: auto by off at")]
    assert speedups == pytest.approx([5.0, 4.9, 4.6, 3.25, 2.5])


def test_sampled_methods_are_held_against_themselves(results: dict[str, Any]) -> None:
    for method in ("best-first", "auto"):
        found = claim(results, f"T = 1: {method} at 40 ms by itself at 0")
        assert (found["value"], found["verdict"]) == (pytest.approx(0.65), MET)


def test_what_is_kept_stands_beside_what_could_be(results: dict[str, Any]) -> None:
    found = claim(results, "T = 0: best-first's share at 40 ms by the simulated one")
    assert found["value"] == pytest.approx(0.65 / 0.91)
    assert found["remark"] == "measured 0.65, simulated 0.91"
    assert found["target"] is None


def test_bytes_are_asked_for_by_accepted_token_and_by_round(results: dict[str, Any]) -> None:
    assert claim(results, "T = 0: bytes for each accepted token of pearl")["value"] == 120.0
    assert claim(results, "T = 0: bytes for each accepted token of pearl")["verdict"] == MET
    assert claim(results, "T = 0: bytes for each accepted token of card K = 50")["verdict"] == MET
    rounds = [each for each in results["claims"] if each["name"].startswith("T = 1: bytes for each round of")]
    assert len(rounds) == 10
    assert {each["value"] for each in rounds} == {480.0}


def test_texts_over_the_wan_must_be_those_of_off(results: dict[str, Any]) -> None:
    for temperature in ("0", "1"):
        found = claim(results, f"T = {temperature}, float32: texts of auto that are those of off")
        assert (found["value"], found["verdict"]) == (1.0, MET)
    assert claim(results, "T = 0: auto by off")["value"] == 5.0


def test_an_application_at_the_edge_is_held_against_plain_decoding_in_the_cloud(results: dict[str, Any]) -> None:
    for num_tokens in (64, 128, 256):
        found = claim(
            results, f"T = 0: an application beside the edge by plain decoding in the cloud, {num_tokens} tokens"
        )
        assert (found["value"], found["target"]["value"]) == (5.0, 2.5)
        assert found["remark"] == "until the first token off: 10.00 s, edge: 2.00 s"


def test_what_was_never_run_is_not_measured() -> None:
    results = NetworkSuite(NetworkConfig()).results()
    assert {each["verdict"] for each in results["claims"]} == {NOT_MEASURED}
    assert report_of(results).to_markdown().count("##") == len(NETWORK_PARTS)


def test_the_report_has_shares_bounds_bytes_and_the_link(results: dict[str, Any]) -> None:
    text = report_of(results).to_markdown()
    assert "| auto | 50.0, 5.00x (1.00) | 49.0, 4.90x (0.98) | 46.0, 4.60x (0.92) | 32.5, 3.25x (0.65) |" in text
    assert "| off | 10.0 (1.00) | 10.0 (1.00) |" in text
    assert "| T = 0 | 100.0, 4.00x (1.00) | 91.0, 3.64x (0.91) | 80.0, 3.20x (0.80) |" in text
    assert "| card K = 50 | 0 | 20 | 80 | 1600 | 8000 | 120 | 480 |" in text
    assert "Some link." in text


def test_a_table_fits_into_an_ordinary_terminal(results: dict[str, Any]) -> None:
    console = Console(width=118, force_terminal=False, record=True, quiet=True)
    report_of(results).print(console)
    for line in console.export_text().splitlines():
        assert len(line) <= 118
        assert "…" not in line


def test_everything_is_written(results: dict[str, Any], tmp_path: Path) -> None:
    paths = NetworkSuite.write(results, tmp_path)
    assert [path.name for path in paths] == ["results.json", "results.md", "rtt.png", "bytes.png"]
    assert json.loads(paths[0].read_text())["suite"] == "network"
    for path in paths[2:]:
        with Image.open(path) as picture:
            assert min(picture.size) > 300


def test_a_part_that_fails_is_told_and_the_others_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object) -> None:
        raise StackError("the verifier did not get ready")

    monkeypatch.setattr(suite_module, "running_services", broken)
    monkeypatch.setattr(suite_module, "drivers_at_edge", broken)
    config = NetworkConfig(parts=("bytes", "edge"), repeats=1, is_quick=True)
    assert NetworkSuite(config).run(tmp_path, Console(quiet=True)) == FAILED
    text = (tmp_path / "results.md").read_text()
    assert "services: StackError: the verifier did not get ready" in text
    assert "edge: StackError: the verifier did not get ready" in text
