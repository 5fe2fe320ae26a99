"""The report of the pair suite for made-up results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider_bench.pair.acceptance import acceptances_of
from outrider_bench.pair.comparison import Claim, Comparison
from outrider_bench.pair.costs import DRAFT_ROWS, TARGET_ROWS, PairCosts
from outrider_bench.pair.report import NEEDS_MODELS, SPACELIKE_NOTE, report_of, summary_of
from outrider_bench.pair.settings import METHODS, Prediction, Setting, best_of
from outrider_bench.pair.suite import PairSuite

COSTS = PairCosts(
    target_ms={rows: 20.0 + rows for rows in TARGET_ROWS},
    draft_ms=dict.fromkeys(DRAFT_ROWS, 1.0),
    plain_ms=22.0,
    turn_slowdown=1.1,
    ahead_slowdown=1.0,
    step_ms=1.25,
    one_way_ms=0.75,
    plain_overhead_ms=1.0,
    turn_overhead_ms=1.5,
    ahead_overhead_ms=2.0,
)
GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8, 12)


def pair_of(title: str = "the pair", **changes: Any) -> dict[str, Any]:
    """A pair for which best-first with long chains is the best."""
    text = {"shared_noise": [1, 1, 0] * 8, "own_choice": [0] * 24, "kept": [0.9] * 24, "overlap": [0.9] * 24}
    predictions = [
        Prediction(Setting(method, gamma), 0.7, 1 + gamma / 4, 1 + place / 10 + gamma / 20, (1.0,))
        for place, method in enumerate(METHODS)
        for gamma in GAMMAS
    ]
    best = best_of(predictions, 0.7)
    assert best is not None
    comparisons = [
        Comparison("best-first", "gamma = 12", 0.7, 2.1, 2.0, (1.9, 2.0, 2.3)),
        Comparison("auto", "", 0.7, 2.1, 1.7, (1.7, 1.6, 1.8)),
    ]
    return {
        "title": title,
        "target": "demo/target-100m",
        "draft": "demo/draft",
        "stand_in": "",
        "models": {},
        "acceptances": [one.to_json() for one in acceptances_of([text], ["code"], 0.7, 12)],
        "costs": COSTS.to_json(),
        "later_costs": replace(COSTS, plain_ms=44.0).to_json(),
        "predictions": [one.to_json() for one in predictions],
        "later_predictions": [one.to_json() for one in predictions],
        "best": [{"temperature": 0.7, "flags": best.setting.flags, "speedup": best.speedup}],
        "failures": {},
        "rows": [],
        "comparisons": [one.to_json() for one in comparisons],
        "claims": [Claim(title, one).to_json() for one in comparisons],
    } | changes


def results_of(*pairs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    pairs = pairs or (pair_of(),)
    config = {"address": None, "is_family": len(pairs) > 1, "max_tokens": 48, "repeats": 3, "seed": 0}
    config |= {"prompt_set": "chats", "held_out": True, "num_prompts": 6}
    return {
        "environment": {"cpu": "a CPU", "num_cores": 2, "memory_gib": 8, "versions": {"torch": "2"}},
        "config": config | {"is_quick": False, "cores": [0, 1], "temperatures": [0.7]},
        "interrupted": False,
        "duration_s": 300.0,
        "failures": {},
        "pairs": list(pairs),
        "claims": [claim for pair in pairs for claim in pair["claims"]],
    } | changes


def test_a_report_answers_with_the_flags_to_type() -> None:
    text = report_of(results_of()).to_markdown()
    assert "2.10x expected with --method best-first --num-speculative-tokens 12 --temperature 0.7" in text
    assert "predictions within 15%: 1 met, 1 missed, 0 inconclusive" in text
    assert "| best-first gamma = 12 | 0.7 | 2.10 | 2.00 (1.90–2.30) | 5% | 4.00 | – |" in text
    assert "C = 21.0: forwards of the draft model" in text
    assert SPACELIKE_NOTE in text
    assert "A round of off took 45.0 ms in these turns, and 23.0 ms when costs were probed" in text


def test_a_report_has_a_row_for_each_rule_and_each_method() -> None:
    text = report_of(results_of()).to_markdown()
    for rule in ("match, shared noise", "match, own choice", "ratio rule, 1 - TV"):
        assert f"| 0.7 | {rule} |" in text
    for method in METHODS:
        assert f"| 0.7 | {method} |" in text
    assert "| 32 | 52.00 | 2.48 | 1.00 |" in text


def test_a_pair_that_is_worth_nothing_is_told_so() -> None:
    pair = pair_of(best=[{"temperature": 0.7, "flags": "--method off", "speedup": 1.0}])
    assert "1.00x expected with --method off" in summary_of(results_of(pair))


def test_several_pairs_have_chapters_of_their_own() -> None:
    titles = [chapter.title for chapter in report_of(results_of(pair_of("as is"), pair_of("slow draft"))).chapters]
    assert titles[0] == "Prediction and measurement"
    assert {"as is: costs", "slow draft: costs"} <= set(titles)


def test_an_address_leaves_out_what_needs_the_models_and_says_so() -> None:
    pair = pair_of(
        acceptances=[], costs=None, later_costs=None, predictions=[], later_predictions=[], best=[], claims=[]
    )
    pair["comparisons"] = [Comparison("pearl", "", 0.7, None, 1.5, (1.5,)).to_json()]
    results = results_of(pair)
    results["config"]["address"] = "host:50051"
    text = report_of(results).to_markdown()
    assert NEEDS_MODELS in text
    assert "| pearl | 0.7 | – | 1.50 (1.50–1.50) | – |" in text


def test_a_table_fits_into_an_ordinary_terminal() -> None:
    console = Console(width=118, force_terminal=False)
    with console.capture() as capture:
        report_of(results_of()).print(console)
    assert "…" not in capture.get()


def test_numbers_and_report_are_written(tmp_path: Path) -> None:
    paths = PairSuite.write(results_of(), tmp_path / "new")
    assert [path.name for path in paths] == ["results.json", "report.md"]
