"""The report of the methods suite: a chapter for each part, its claims first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider_bench.report import (
    EXPERIMENT_CAPTION,
    Chapter,
    Report,
    Table,
    claims_tables,
    decisions_table,
    experiment_notes,
    experiment_table,
    experiments_environment,
    notes_of,
    number_cell,
    of_part,
    origins_table,
    summary_of_claims,
)
from outrider_bench.suites.methods import papers
from outrider_bench.suites.methods.simulated import published
from outrider_bench.suites.methods.simulated.parts import SIMULATED
from outrider_cli.prompts import ALL_CATEGORIES

TITLES = {
    "methods": "Methods",
    "saguaro": "SAGUARO: outcomes drafted for beforehand",
    "card": "CARD: query and correct",
    "double": "DOUBLE: beyond the speed ratio",
    "sources": "Sources that need no draft model",
    "spacelike": "Spacelike: faster with use",
    "rows": "Rows: a sub-tree instead of a chain",
    "noise": "Shared noise",
    "auto": "Auto: a safe default",
    "batch": "Generations at once",
    **{part: module.TITLE for part, module in SIMULATED.items()},
}
CLAIMS_CAPTION = (
    "Claims. 95 %: where the value lies with 95 % confidence, from prompts drawn anew (with repetition, for both sides "
    "of a ratio; 1000 draws), or repeats where generations share the machine; a claim whose target lies within is "
    "inconclusive. paper: the paper's own figure, of its models, hardware and prompts."
)
PAPERS_CAPTION = (
    "Speed-ups over plain decoding. the paper: with its models, hardware and prompts. What each method is worth as "
    "published, without what this project adds, is measured in simulated time (--parts simulated-published)."
)
INFLATION_NOTE = (
    "The target's cost is inflated: it says what its 5 M trained parameters say, at the price of 100 M; the others "
    "change nothing. So is that of the draft models whose names have a c."
)


def report_of(results: Mapping[str, Any]) -> Report:
    """Make the report of what results.json keeps."""
    experiments = results["experiments"]
    interrupted = "The run did not come to its end: experiments are missing, and rows marked (partial) lack some."
    notes = notes_of(results, interrupted=interrupted, failed="{what}: {why}")
    chapters = [_chapter(results, part) for part in results["config"]["parts"]]
    if experiments:
        chapters.append(Chapter("How to read the tables", sentences=[CLAIMS_CAPTION, EXPERIMENT_CAPTION]))
    return Report(
        "The methods, measured",
        experiments_environment(results),
        [*([INFLATION_NOTE] if experiments else []), *notes, *experiment_notes(experiments)],
        chapters,
        summary_of_claims(results["claims"]),
        results["checks"],
    )


def _chapter(results: Mapping[str, Any], part: str) -> Chapter:
    experiments = of_part(results["experiments"], part)
    tables = [*claims_tables(results, part), *(table for one in experiments for table in tables_of(one))]
    tables += [papers_table(one) for one in experiments if one["name"] == "methods"]
    tables += [published.table(one) for one in experiments if part == published.PART]
    sentences = []
    for experiment in experiments:
        sizes = (
            f"{experiment['title']}: {experiment['draft']}, {experiment['num_prompts']} prompts, "
            f"{experiment['max_tokens']} tokens each, {experiment['repeats']} repeats."
        )
        sentences.append(f"{sizes} {experiment['note']}".strip())
    return Chapter(TITLES[part], tables, sentences, pictures=[part, f"{part}_sweeps"])


def papers_table(experiment: Mapping[str, Any]) -> Table:
    """Put each method beside the paper's own figure."""
    rows = [
        [
            row["method"],
            f"{row['temperature']:g}",
            number_cell(row["speedup_over_off"], 2, "x" if row["speedup_over_off"] else ""),
            papers.SPEEDUPS[row["method"]].get(row["temperature"], papers.NONE),
        ]
        for row in experiment["rows"]
        if row["category"] == ALL_CATEGORIES and not row["setting"] and row["method"] in papers.SPEEDUPS
    ]
    columns = ("method", "T", "ours", "the paper")
    title = "Ours, and the papers' own figures"
    return Table(title, columns, rows, PAPERS_CAPTION, frozenset({"the paper"}), frozenset({"the paper"}))


def tables_of(experiment: Mapping[str, Any]) -> list[Table]:
    """Make all tables of an experiment."""
    found = (experiment_table(experiment), origins_table(experiment), decisions_table(experiment))
    return [table for table in found if table is not None]
