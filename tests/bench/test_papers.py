"""The papers' claims: a row each, measured in simulated time, and two counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider_bench.config import PapersConfig
from outrider_bench.papers.claims import ACCEPTANCE, CLAIMS, HITS, PAPERS, TOKENS, Claim
from outrider_bench.papers.experiments import QUICK, experiments_of
from outrider_bench.papers.measured import Measured
from outrider_bench.papers.report import counts
from outrider_bench.papers.suite import Found, PapersSuite, found_of
from outrider_bench.samples import Block, Condition, GenerationSample, Rounds, Sample

BY_OFF = Claim("a paper", "by off", "Table 1", "some", 0.0, "card", figure=3.0)


def ran(label: str, seconds: float, *, prompt: int = 0, category: str = "code", **rounds: int) -> Block:
    """A generation of 10 tokens."""
    made = GenerationSample(3, tuple(range(10)), (), seconds, Rounds(**{"num_rounds": 10} | rounds))
    method, _, setting = label.partition(" ")
    condition = Condition(method, setting, 0.0)
    return Block(condition, 0, seconds, (Sample(condition, 0, prompt, category, made),))


def together(label: str, seconds: float, repeat: int) -> Block:
    """Four generations of 10 tokens at once."""
    condition = Condition(label, "", 0.0, 4)
    made = GenerationSample(3, tuple(range(10)), (), seconds, Rounds())
    return Block(
        condition, repeat, seconds, tuple(Sample(condition, repeat, index, "code", made) for index in range(4))
    )


def test_every_claim_is_of_contenders_that_its_experiment_has() -> None:
    experiments = {one.name: one for one in experiments_of(PAPERS, QUICK)}
    for claim in CLAIMS:
        experiment = experiments[claim.experiment]
        labels = {f"{one.method} {one.setting}".strip() for one in experiment.contenders}
        assert {claim.contender, claim.base or "off"} <= labels, claim
        assert claim.temperature in experiment.temperatures, claim
        assert claim.concurrency in experiment.concurrencies, claim
    keys = [(one.paper, one.what, one.experiment, one.temperature, one.metric, one.contender) for one in CLAIMS]
    assert len(set(keys)) == len(keys)


def test_only_what_a_claim_is_about_is_run() -> None:
    assert {one.name for one in experiments_of(["Takeoff"], QUICK)} == {"spacelike-replay"}


def test_a_speed_is_divided_by_that_of_the_base_on_the_prompts_of_both() -> None:
    blocks = [ran("off", 8.0), ran("off", 40.0, prompt=1), ran("card", 2.0)]
    measured = Measured({"some": blocks})
    assert measured.value_of(BY_OFF) == pytest.approx(4.0)
    assert Measured({}).value_of(BY_OFF) is None


def test_rates_of_rounds_are_sums_by_sums() -> None:
    rounds = {"num_hits": 8, "num_accepted": 15, "num_judged": 20}
    measured = Measured({"some": [ran("card", 1.0, **rounds), ran("off", 1.0, num_hits=4, num_accepted=0)]})

    def value(metric: str, base: str) -> float | None:
        return measured.value_of(Claim("p", "w", "s", "some", 0.0, "card", base, metric=metric))

    assert value(HITS, "") == pytest.approx(0.8)
    assert value(HITS, "off") == pytest.approx(2.0)
    assert value(TOKENS, "") == pytest.approx(2.5)
    assert value(ACCEPTANCE, "") == pytest.approx(0.75)


def test_generations_at_once_have_the_time_of_their_turn() -> None:
    blocks = [together("off", 6.0, 0), together("card", 2.0, 0), together("off", 4.0, 1), together("card", 2.0, 1)]
    claim = Claim("p", "w", "s", "some", 0.0, "card", concurrency=4)
    assert Measured({"some": blocks}).value_of(claim) == pytest.approx(2.5)
    assert Measured({"some": blocks}).value_of(BY_OFF) is None


def test_an_interval_is_of_other_prompts() -> None:
    seconds = [(8.0, 2.0), (8.0, 4.0), (9.0, 3.0), (7.0, 2.5)]
    blocks = [
        ran(label, pair[side], prompt=index)
        for index, pair in enumerate(seconds)
        for side, label in enumerate(("off", "card"))
    ]
    [found] = found_of([BY_OFF], Measured({"some": blocks}), 0)
    assert found.value == pytest.approx(32 / 11.5)
    assert found.interval is not None
    assert 2.0 <= found.interval[0] < found.value < found.interval[1] <= 4.0


def test_two_counts_say_how_many_figures_are_reached_and_how_many_signs_are_right() -> None:
    falls = Claim("p", "falls", "in words", "some", 0.0, "card", relation="<")
    found = [
        Found(BY_OFF, 3.0, (2.5, 3.5)),
        Found(BY_OFF, 2.9, (0.9, 3.5)),
        Found(BY_OFF, None, None),
        Found(falls, 0.9, (0.8, 0.95)),
        Found(falls, 1.1, (0.8, 1.3)),
    ]
    assert counts([one.to_json() for one in found]) == (
        "The paper's own figure reached: 1 of 2. Effect of the right sign: 3 of 4, 2 of them with the whole interval."
    )


@pytest.mark.suite
def test_a_paper_is_measured_from_beginning_to_end(tmp_path: Path) -> None:
    suite = PapersSuite(PapersConfig(("Takeoff",), is_quick=True))
    assert suite.run(tmp_path, Console(quiet=True)) == 0
    results: dict[str, Any] = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [one["paper"] for one in results["claims"]] == ["Takeoff"] * 3
    assert all(one["value"] > 0 for one in results["claims"])
    assert "The paper's own figure reached" in (tmp_path / "report.md").read_text(encoding="utf-8")
