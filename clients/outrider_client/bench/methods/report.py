"""The methods' numbers: on the terminal, in results.json and results.md, and as pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outrider_client.bench.files import write_results
from outrider_client.bench.methods.claims import MET, MISSED, NOT_MEASURED, counts_of
from outrider_client.bench.methods.peers import SOURCE
from outrider_client.bench.methods.tables import (
    CAPTION,
    claims_table,
    decisions_table,
    degraded_notes,
    experiment_table,
    origins_table,
)
from outrider_client.bench.tables import TextTable

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
QUICK_NOTE = "Small sizes (--quick): this shows that everything works, not how fast it is."
INFLATION_NOTE = (
    "The target's cost is inflated: it says what its 5 M trained parameters say, at the price of 100 M; the others "
    "change nothing. So is that of the draft models whose names have a c."
)
_STYLES = {MET: "green", MISSED: "red", NOT_MEASURED: "yellow", "": ""}
_VERDICT_COLUMN = 3


def print_report(results: Mapping[str, Any], console: Console) -> None:
    """Tables on the terminal."""
    for note in notes_of(results):
        console.print(Text(f"Note: {note}", style="yellow"))
    for part in results["config"]["parts"]:
        console.print(Text(TITLES[part], style="bold"))
        for experiment in _experiments_of(results, part):
            for table in tables_of(experiment):
                console.print(Text(table.title))
                console.print(_rich_table(table))
        for sentence in sentences_of(results, part):
            console.print(Padding(Text(sentence, style="dim"), (0, 0, 1, 1)))
        if claims := _claims_of(results, part):
            console.print(_rich_claims(claims_table(claims)))
    if results["experiments"]:
        console.print(Padding(Text(CAPTION, style="dim"), (0, 0, 1, 0)))
    console.print(summary_of(results), markup=False, highlight=False)


def write_report(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """results.json, results.md and, if matplotlib is there, the pictures. Returns what was written."""
    return write_results(results, folder, "results.md", to_markdown, "outrider_client.bench.methods.plots")


def to_markdown(results: Mapping[str, Any], pictures: Sequence[Path] = ()) -> str:
    """The report as Markdown."""
    lines = ["# The methods, measured", _where(results), *(f"> **Note.** {note}" for note in notes_of(results))]
    lines += (
        [summary_of(results), "* " + "\n* ".join(results["checks"])] if results["checks"] else [summary_of(results)]
    )
    for part in results["config"]["parts"]:
        lines.append(f"## {TITLES[part]}")
        if claims := _claims_of(results, part):
            lines.append(_markdown_table(claims_table(claims)))
        lines += sentences_of(results, part)
        for experiment in _experiments_of(results, part):
            for table in tables_of(experiment):
                lines += [f"### {table.title}", _markdown_table(table)]
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


def summary_of(results: Mapping[str, Any]) -> str:
    """Met, missed and not measured in one line, and in which parts claims were missed."""
    counts = counts_of(results["claims"])
    parts = Counter(claim["part"] for claim in results["claims"] if claim["verdict"] == MISSED)
    named = f" ({', '.join(f'{part}: {count}' for part, count in parts.items())})" if parts else ""
    return f"{counts[MET]} claims met, {counts[MISSED]} missed{named}, {counts[NOT_MEASURED]} not measured."


def _experiments_of(results: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    return [experiment for experiment in results["experiments"] if experiment["part"] == part]


def _claims_of(results: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    return [claim for claim in results["claims"] if claim["part"] == part]


def _where(results: Mapping[str, Any]) -> str:
    environment, config = results["environment"], results["config"]
    cores, target = config["cores"], environment["models"].get("target", {})
    pinning = f"target on core {cores[0]}, all others on core {cores[-1]}, one thread each" if cores else "not pinned"
    lines = [
        f"{environment['cpu']}, {environment['num_cores']} cores, {environment['memory_gib']} GiB; {pinning}",
        ", ".join(f"{name} {number}" for name, number in environment["versions"].items() if number),
        f"target {config['target']}, {target.get('dtype', 'dtype unknown')}",
        f"seed {config['seed']}; {results['duration_s'] / 60:.1f} minutes",
    ]
    return "\n".join(f"* {line}" for line in lines)


def _markdown_table(table: TextTable) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in table.rows]
    rule = ["---", *("---:" for _ in table.columns[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [table.columns, rule, *escaped])


def _rich_table(table: TextTable) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if index else "left", no_wrap=index == 0)
    for cells in table.rows:
        drawn.add_row(*map(Text, cells))
    return drawn


def _rich_claims(table: TextTable) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if index in (1, 2) else "left", no_wrap=index in (1, 2, 3))
    for cells in table.rows:
        styles = [_STYLES[cells[_VERDICT_COLUMN]] if index == _VERDICT_COLUMN else "" for index in range(len(cells))]
        drawn.add_row(*(Text(cell, style=style) for cell, style in zip(cells, styles, strict=True)))
    return drawn
