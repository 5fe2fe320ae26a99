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
    of_part,
    origins_table,
    summary_of_claims,
)

TITLES = {
    "methods": "Methods",
    "saguaro": "SAGUARO: outcomes drafted for beforehand",
    "card": "CARD: query and correct",
    "double": "DOUBLE: beyond the speed ratio",
    "spacelike": "Spacelike: faster with use",
    "rows": "Rows: a sub-tree instead of a chain",
    "noise": "Shared noise",
    "auto": "Auto: a safe default",
}
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
        chapters.append(Chapter("How to read the tables", sentences=[EXPERIMENT_CAPTION]))
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
    sentences = []
    for experiment in experiments:
        sizes = (
            f"{experiment['title']}: {experiment['draft']}, {experiment['num_prompts']} prompts, "
            f"{experiment['max_tokens']} tokens each, {experiment['repeats']} repeats."
        )
        sentences.append(f"{sizes} {experiment['note']}".strip())
    return Chapter(TITLES[part], tables, sentences, pictures=[part])


def tables_of(experiment: Mapping[str, Any]) -> list[Table]:
    """Make all tables of an experiment."""
    found = (experiment_table(experiment), origins_table(experiment), decisions_table(experiment))
    return [table for table in found if table is not None]
