"""Tables, Markdown, results.json."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from outrider_bench.generate.report import report_of
from outrider_bench.generate.suite import GenerateSuite
from tests.bench.samples import block, full_run, generation, results


def test_markdown_shows_speed_and_its_spread_and_marks_the_best_setting() -> None:
    text = report_of(results(full_run())).to_markdown()
    assert "| method | tok/s | x off | tokens/forward | kept | hits | empty | same |" in text
    assert "| off | 9.5 | – | 1.00 | – | – | – | – |" in text
    assert "| pearl | 28.6 | 3.00x (3.00–3.00) | 3.00 | 50% | 50% | 25% | 100% |" in text
    assert "| hf-assisted constant 5 \\* |" in text
    assert "| hf-assisted constant 3 |" in text


def test_markdown_says_that_the_model_is_inflated_before_any_number() -> None:
    text = report_of(results(full_run())).to_markdown()
    assert text.index("is inflated") < text.index("tok/s")


def test_the_report_says_loudly_where_rows_are_not_exact() -> None:
    exact = results(full_run())
    target = {**exact["environment"]["models"]["target"], "exact_off_reason": "chains of 3: other bits"}
    inexact = {**exact, "environment": {**exact["environment"], "models": {"target": target}}}
    assert "not exact" not in report_of(exact).to_markdown().lower()
    text = report_of(inexact).to_markdown()
    assert "rows NOT EXACT: chains of 3: other bits" in text
    assert "Rows are not exact here" in text


def test_the_machine_stands_beside_the_rounds() -> None:
    text = report_of(results(full_run())).to_markdown()
    assert "| 8 | 14.00 | – | 5.71x |" in text
    assert "Perfect drafts: at most 8.89x, with 15 a round." in text
    assert "one row): 20.0." in text
    assert "| off | 10.00 | 20.00 | 30.00 | 40.00 | 50.00 | 60.00 |" in text


def test_failures_are_told_with_their_reason() -> None:
    blocks = full_run()
    failed = block(blocks[2].samples[0].condition, None, repeat=0)
    text = report_of(results([*blocks[:2], failed, *blocks[3:]])).to_markdown()
    assert "pearl, temperature 0: 1 generations failed: UNAVAILABLE: gone" in text


def test_a_table_fits_into_an_ordinary_terminal() -> None:
    console = Console(width=118, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        report_of(results(full_run())).print(console)
    text = capture.get()
    assert "…" not in text
    assert "hf-assisted constant 5 *" in text


def test_an_interrupted_run_is_written_with_its_rows_marked(tmp_path: Path) -> None:
    found = results(full_run()[:3]) | {"interrupted": True}
    GenerateSuite.write(found, tmp_path)
    read = json.loads((tmp_path / "results.json").read_text())
    assert all(row["partial"] for row in read["rows"])
    text = (tmp_path / "report.md").read_text()
    assert "(partial)" in text
    assert "was interrupted" in text


def test_a_run_of_off_alone_still_gives_a_report(tmp_path: Path) -> None:
    condition = full_run()[0].condition
    found = results([block(condition, generation(12, 1))], repeats=1)
    found["machine"] = {"target_forward_ms": {}, "draft_forward_ms": {}, "perfect_draft_ceiling": {}}
    paths = GenerateSuite.write(found, tmp_path)
    assert [path.name for path in paths] == ["results.json", "report.md"]
