"""The methods' numbers: on the terminal, in results.json and results.md, and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from outrider_bench.experiment_tables import (
    CAPTION,
    claims_table,
    decisions_table,
    degraded_notes,
    experiment_table,
    origins_table,
)
from outrider_bench.report import QUICK_NOTE, markdown_table, rich_claims, rich_table, summary_of, where, write_results
from outrider_bench.suites.methods.peers import SOURCE
from outrider_bench.tables import TextTable

TITLES = {
    "methods": "Methods",
    "saguaro": "SAGUARO: outcomes drafted for beforehand",
    "card": "CARD: query and correct",
    "double": "DOUBLE: beyond the speed ratio",
    "spacelike": "Spacelike: faster with use",
    "rows": "Rows: a sub-tree instead of a chain",
    "noise": "Shared noise",
    "auto": "Auto: a safe default",
    "peers": "A peer",
}
INFLATION_NOTE = (
    "The target's cost is inflated: it says what its 5 M trained parameters say, at the price of 100 M; the others "
    "change nothing. So is that of the draft models whose names have a c."
)


def print_report(results: Mapping[str, Any], console: Console) -> None:
    """Tables on the terminal."""
    for note in notes_of(results):
        console.print(Text(f"Note: {note}", style="yellow"))
    for part in results["config"]["parts"]:
        console.print(Text(TITLES[part], style="bold"))
        for experiment in _experiments_of(results, part):
            for table in tables_of(experiment):
                console.print(Text(table.title))
                console.print(rich_table(table))
        for sentence in sentences_of(results, part):
            console.print(Padding(Text(sentence, style="dim"), (0, 0, 1, 1)))
        if claims := _claims_of(results, part):
            console.print(rich_claims(claims_table(claims)))
    if results["experiments"]:
        console.print(Padding(Text(CAPTION, style="dim"), (0, 0, 1, 0)))
    console.print(summary_of(results["claims"]), markup=False, highlight=False)


def write_report(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """results.json, results.md and, if matplotlib is there, the pictures. Returns what was written."""
    return write_results(results, folder, "results.md", to_markdown, "outrider_bench.suites.methods.plots")


def to_markdown(results: Mapping[str, Any], pictures: Sequence[Path] = ()) -> str:
    """The report as Markdown."""
    lines = ["# The methods, measured", where(results), *(f"> **Note.** {note}" for note in notes_of(results))]
    lines.append(summary_of(results["claims"]))
    if results["checks"]:
        lines.append("* " + "\n* ".join(results["checks"]))
    for part in results["config"]["parts"]:
        lines.append(f"## {TITLES[part]}")
        if claims := _claims_of(results, part):
            lines.append(markdown_table(claims_table(claims)))
        lines += sentences_of(results, part)
        for experiment in _experiments_of(results, part):
            for table in tables_of(experiment):
                lines += [f"### {table.title}", markdown_table(table)]
        lines += [f"![{picture.stem}]({picture.name})" for picture in pictures if picture.stem == part]
    if results["experiments"]:
        lines += ["## How to read the tables", CAPTION]
    return "\n\n".join(lines) + "\n"


def tables_of(experiment: Mapping[str, Any]) -> list[TextTable]:
    """All tables of an experiment."""
    found = (experiment_table(experiment), origins_table(experiment), decisions_table(experiment))
    return [table for table in found if table is not None]


def notes_of(results: Mapping[str, Any]) -> list[str]:
    """What must be said before the numbers."""
    found = [QUICK_NOTE] if results["config"]["is_quick"] else []
    if results["experiments"]:
        found.append(INFLATION_NOTE)
    if results["interrupted"]:
        found.append("The run did not come to its end: experiments are missing, and rows marked (partial) lack some.")
    found += [f"{what}: {why}" for what, why in results["failures"].items()]
    for experiment in results["experiments"]:
        found += [f"{experiment['title']}, {label}: failed: {why}" for label, why in experiment["failures"].items()]
        found += degraded_notes(experiment)
    return found


def sentences_of(results: Mapping[str, Any], part: str) -> list[str]:
    """How a part was measured."""
    found = [SOURCE] if part == "peers" else []
    for experiment in _experiments_of(results, part):
        sizes = (
            f"{experiment['title']}: {experiment['draft']}, {experiment['num_prompts']} prompts, "
            f"{experiment['max_tokens']} tokens each, {experiment['repeats']} repeats."
        )
        found.append(f"{sizes} {experiment['note']}".strip())
    return found


def _experiments_of(results: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    return [experiment for experiment in results["experiments"] if experiment["part"] == part]


def _claims_of(results: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    return [claim for claim in results["claims"] if claim["part"] == part]
