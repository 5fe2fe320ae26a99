"""The report of the methods' suite: tables, Markdown, results.json and pictures, from made-up measurements."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt
from PIL import Image
from rich.console import Console

from outrider_bench.config import PARTS, MethodsConfig
from outrider_bench.drivers import StackError
from outrider_bench.experiment import OFF, Experiment, label_of
from outrider_bench.report import QUICK_NOTE, shown, summary_of_claims
from outrider_bench.samples import Block, Condition, Sample
from outrider_bench.suites.methods import suite as suite_module
from outrider_bench.suites.methods.figures import figures_of
from outrider_bench.suites.methods.report import papers_table, report_of
from outrider_bench.suites.methods.suite import MethodsSuite
from outrider_cli.failures import FAILED, INTERRUPTED
from tests.bench.samples import generation

PICTURES = (*PARTS, "double_sweeps")


def blocks_of(experiment: Experiment) -> list[Block]:
    """Everybody has done everything; off slowly, the others three tokens a round."""
    blocks = []
    for one in experiment.contenders:
        made = generation(12, 1) if one.method == OFF else generation(4, 3)
        rounds = replace(
            made.rounds,
            num_judged=10,
            accepted_by_source={"draft": 6, "ring": 2},
            decisions={"best-first tree": 3, "off": 1} if one.method == "auto" else {},
        )
        made = replace(made, rounds=rounds)
        for temperature in experiment.temperatures:
            condition = Condition(one.method, one.setting, temperature)
            for repeat in range(experiment.repeats):
                for index, prompt in enumerate(experiment.prompts):
                    if one.method == OFF and experiment.off_at is not None and index not in experiment.off_at:
                        continue
                    sample = Sample(condition, repeat, index, prompt.category, made)
                    blocks.append(Block(condition, repeat, made.duration_s, (sample,)))
                for count in experiment.concurrencies[experiment.concurrencies[0] == 1 :]:
                    many = replace(condition, concurrency=count)
                    samples = tuple(
                        Sample(many, repeat, index, prompt.category, made)
                        for index, prompt in enumerate(experiment.prompts)
                    )
                    blocks.append(Block(many, repeat, made.duration_s * count, samples))
    if experiment.concurrencies[0] != 1:
        return [block for block in blocks if block.condition.concurrency > 1]
    return blocks


def suite_of(parts: tuple[str, ...] = PARTS) -> MethodsSuite:
    """A suite that has measured everything, in small sizes."""
    suite = MethodsSuite(MethodsConfig(parts=parts, repeats=1, cores=(0, 1), is_quick=True))
    for experiment in suite.experiments:
        suite.keep(experiment.name, blocks_of(experiment))
    return suite


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    found = suite_of().results()
    found["interrupted"] = False
    found["failures"] = {"everything with demo/draft-c5": "StackError: the speculator ended"}
    found["checks"] = ["Prompts: 0 of 3 end in text that the models were trained on."]
    found["speed_ratios"] = {"demo/draft-c2.5": 2.5}
    return found


def test_every_part_has_its_claims_and_its_tables(results: dict[str, Any]) -> None:
    text = report_of(results).to_markdown()
    assert text.count("\n## ") == len(PARTS) + 1
    assert "| measured | value | target | verdict | paper | remark |" in text
    assert "| T = 0: saguaro by speculative | 1.000 | ≥ 1.12 | missed | up to 2x (SAGUARO, abstract);" in text
    assert "| T = 0: saguaro by off | 3.000 | ≥ 4.60 | missed | up to 5x (SAGUARO, abstract) |  |" in text
    assert "| T = 1: acceptance, shared noise | 0.800 |  |  | 70-80 %, LLaMA-2 7B for 70B" in text
    assert "| 4 | pearl | 0.7 |" in text
    assert "| pearl | 0 | 30.0 | 3.00 | 3.00 | 80% | 50% | 50% | 50% | 25% | 30.0 | 100% |" in text
    assert "| off | 0 | 10.0 | – | 1.00 | – | – | – | – | – | – |" in text
    assert "| prose | auto | 0.7 |" in text
    assert "| all | auto |" not in text
    assert "| auto | 0 | 75% | 25% |" in text
    assert "what auto chose" in text
    assert "0 of 3 end in text" in text
    assert "llama.cpp" not in text


def test_llama_cpp_has_its_rows_in_the_table_of_methods_and_its_best_one_in_the_picture() -> None:
    config = MethodsConfig(parts=("methods",), repeats=1, is_quick=True, llama_server=sys.executable)
    suite = MethodsSuite(config)
    [experiment] = suite.experiments
    suite.keep("methods", blocks_of(experiment))
    results = suite.results()
    text = report_of(results).to_markdown()
    # Texts are compared with ours where nothing is drawn.
    assert "| llama.cpp plain | 0 | 30.0 | 3.00 | 3.00 |" in text
    assert "| llama.cpp 10 drafted, p >= 0.4 | 0 | 30.0 |" in text
    assert text.count("auto by llama.cpp's best setting") == 3
    [drawn] = figures_of(results).values()
    assert drawn is not None
    [legend] = drawn.legends
    assert [one.get_text() for one in legend.get_texts() if "llama" in one.get_text()] == ["llama.cpp (best setting)"]
    plt.close(drawn)


def test_what_must_be_known_is_said_before_any_number(results: dict[str, Any]) -> None:
    text = report_of({**results, "interrupted": True}).to_markdown()
    for note in (QUICK_NOTE, "cost is inflated", "did not come to its end", "c5: StackError: the speculator ended"):
        assert 0 <= text.index(note) < text.index("| measured |")


def test_a_contender_that_failed_is_told_with_its_reason(results: dict[str, Any]) -> None:
    experiments = [{**one, "failures": {"card": "INVALID_ARGUMENT: no"}} for one in results["experiments"]]
    assert (
        "All methods, card: failed: INVALID_ARGUMENT: no"
        in report_of({**results, "experiments": experiments}).to_markdown()
    )


def test_a_peer_that_was_missing_is_told(results: dict[str, Any]) -> None:
    suite = suite_of(("noise",))
    [experiment] = suite.experiments
    blocks = blocks_of(experiment)
    made = blocks[0].samples[0].generation
    assert made is not None
    lame = replace(made, rounds=replace(made.rounds, degraded=True))
    suite.keep(experiment.name, [replace(blocks[0], samples=(replace(blocks[0].samples[0], generation=lame),))])
    assert (
        "shared noise, T = 1: a peer was missing for a part of 1 generations"
        in report_of(suite.results()).to_markdown()
    )


def test_the_summary_counts_and_names_the_parts(results: dict[str, Any]) -> None:
    claims = [
        {"part": "card", "verdict": "missed"},
        {"part": "card", "verdict": "missed"},
        {"part": "rows", "verdict": "met"},
        {"part": "rows", "verdict": ""},
        {"part": "auto", "verdict": "not measured"},
    ]
    assert summary_of_claims(claims) == "1 claims met, 2 missed (card: 2), 1 not measured."


def test_a_table_fits_into_an_ordinary_terminal(results: dict[str, Any]) -> None:
    console = Console(width=118, force_terminal=False)
    with console.capture() as capture:
        report_of(results).print(console)
    text = capture.get()
    assert "…" not in text
    assert "best-first chain" in text
    assert "missed" in text
    assert max(map(len, text.splitlines())) <= 118


@pytest.mark.slow
def test_numbers_report_and_a_picture_for_each_part_are_written(results: dict[str, Any], tmp_path: Path) -> None:
    paths = MethodsSuite.write(results, tmp_path / "new")
    assert [path.name for path in paths] == ["results.json", "results.md", *(f"{name}.png" for name in PICTURES)]
    written = json.loads(paths[0].read_text())
    assert [experiment["name"] for experiment in written["experiments"]][:2] == ["methods", "saguaro-fan-out"]
    text = paths[1].read_text()
    for path in paths[2:]:
        assert f"![{path.stem.replace('_', ' ')}]({path.name})" in text
        with Image.open(path) as image:
            assert min(image.size) >= 300
            assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 10


def test_every_picture_stands_in_the_chapter_of_its_part(results: dict[str, Any], tmp_path: Path) -> None:
    text = report_of(results).to_markdown([tmp_path / f"{name}.png" for name in PICTURES])
    chapter = text[text.index("## DOUBLE") : text.index("## Spacelike")]
    assert "![double](double.png)" in chapter
    assert "![double sweeps](double_sweeps.png)" in chapter


def test_intervals_come_from_all_prompts_and_decide_what_is_inconclusive() -> None:
    config = MethodsConfig(parts=("rows",), repeats=1, cores=(0, 1))
    suite = MethodsSuite(config)
    [experiment] = suite.experiments
    blocks = []
    for one in experiment.contenders:
        for index in range(len(experiment.prompts)):
            # Sub-trees keep much in one prompt of three and nothing more than a chain in the others.
            num_accepted = 14 if one.setting != "chain" and index % 3 == 0 else 6
            made = generation(4, 3)
            made = replace(made, rounds=replace(made.rounds, num_accepted=num_accepted))
            condition = Condition(one.method, one.setting, 1.0)
            blocks.append(Block(condition, 0, made.duration_s, (Sample(condition, 0, index, "code", made),)))
    suite.keep(experiment.name, blocks)
    results = suite.results()
    found = {one["name"]: one for one in results["claims"]}["T = 1: tokens per forward, sub-tree of 16 rows by chain"]
    assert found["value"] == pytest.approx((1 + 26 / 12) / 2.5)
    low, high = found["interval"]
    assert 1.0 <= low < 1.15 < found["value"] < high
    assert found["verdict"] == "inconclusive"
    text = report_of(results).to_markdown()
    assert "| measured | value | 95 % | target | verdict | paper |" in text
    assert f"| 1.267 | {shown(low)}–{shown(high)} | ≥ 1.15 | inconclusive | none |" in text
    assert "0 claims met, 0 missed, 1 inconclusive, 0 not measured." in text
    assert suite.results()["claims"] == results["claims"]


def test_each_method_stands_beside_its_papers_figure(results: dict[str, Any]) -> None:
    [experiment] = [one for one in results["experiments"] if one["name"] == "methods"]
    text = papers_table(experiment).to_markdown()
    assert "| card | 0 | 3.00x | 4.72x (CARD, Table 1, GSM8K, Llama 3 70B/1B); at most 4.83x" in text
    assert "| card | 0.7 | 3.00x | none |" in text
    assert text.count("| card |") == 3
    assert "auto" not in text


def test_an_interrupted_run_gives_the_pictures_that_there_is_something_for(tmp_path: Path) -> None:
    suite = MethodsSuite(MethodsConfig(repeats=1, is_quick=True))
    [experiment] = [one for one in suite.experiments if one.name == "card"]
    suite.keep(experiment.name, blocks_of(experiment)[:3])
    paths = MethodsSuite.write(suite.results(), tmp_path)
    assert [path.name for path in paths] == ["results.json", "results.md"]
    assert "card query only (partial)" not in paths[1].read_text()
    assert "(partial)" in paths[1].read_text()


def test_a_run_in_which_nothing_could_be_measured_is_a_failure_with_a_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> Any:
        raise StackError("the verifier ended")

    monkeypatch.setattr(suite_module, "running_stack", broken)
    status = MethodsSuite(MethodsConfig(parts=("rows",), repeats=1, is_quick=True)).run(tmp_path, Console(quiet=True))
    assert status == FAILED
    text = (tmp_path / "results.md").read_text()
    assert "everything with demo/draft: StackError: the verifier ended" in text
    assert "0 claims met, 0 missed, 2 not measured." in text


def test_ctrl_c_ends_the_run_and_not_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite_module, "running_stack", interrupted)
    status = MethodsSuite(MethodsConfig(parts=("rows",), repeats=1, is_quick=True)).run(tmp_path, Console(quiet=True))
    assert status == INTERRUPTED
    assert "did not come to its end" in (tmp_path / "results.md").read_text()


def test_one_failure_does_not_take_other_models_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def broken(config: Any, _: float) -> Any:
        started.append(config.draft)
        raise StackError("no")

    monkeypatch.setattr(suite_module, "running_stack", broken)
    MethodsSuite(MethodsConfig(parts=("auto",), repeats=1, is_quick=True)).run(None, Console(quiet=True))
    assert started == ["demo/draft", "demo/draft-untrained", "demo/draft-c2.2"]


def test_labels_of_contenders_are_those_of_their_rows(results: dict[str, Any]) -> None:
    suite = suite_of(("card",))
    for experiment, found in zip(suite.experiments, suite.results()["experiments"], strict=True):
        labels = {f"{row['method']} {row['setting']}".strip() for row in found["rows"]}
        assert labels == {label_of(one) for one in experiment.contenders}
