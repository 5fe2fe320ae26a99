"""Tables, Markdown, results.json."""

from __future__ import annotations

import json
from pathlib import Path

from outrider_bench.generate.report import report_of
from outrider_bench.generate.suite import GenerateSuite
from tests.bench.samples import block, full_run, generation, results


def test_the_report_says_loudly_where_rows_are_not_exact() -> None:
    exact = results(full_run())
    target = {**exact["environment"]["models"]["target"], "exact_off_reason": "chains of 3: other bits"}
    inexact = {**exact, "environment": {**exact["environment"], "models": {"target": target}}}
    assert "not exact" not in report_of(exact).to_markdown().lower()
    text = report_of(inexact).to_markdown()
    assert "rows NOT EXACT: chains of 3: other bits" in text
    assert "Rows are not exact here" in text


def test_failures_are_told_with_their_reason() -> None:
    blocks = full_run()
    failed = block(blocks[2].samples[0].condition, None, repeat=0)
    text = report_of(results([*blocks[:2], failed, *blocks[3:]])).to_markdown()
    assert "pearl, temperature 0: 1 generations failed: UNAVAILABLE: gone" in text


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
