"""What the reports of the suites have in common: tables on the terminal and in Markdown, claims, the machine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outrider_bench.claims import MET, MISSED, NOT_MEASURED, counts_of
from outrider_bench.result import counts_of as section_counts_of
from outrider_bench.tables import TextTable

QUICK_NOTE = "Small sizes (--quick): this shows that everything works, not how fast it is."
_STYLES = {MET: "green", MISSED: "red", NOT_MEASURED: "yellow", "": ""}
_VERDICT_COLUMN = 3


def summary_of(claims: Sequence[Mapping[str, Any]]) -> str:
    """Met, missed and not measured in one line, and in which parts claims were missed."""
    counts = counts_of(claims)
    parts = Counter(claim["part"] for claim in claims if claim["verdict"] == MISSED)
    named = f" ({', '.join(f'{part}: {count}' for part, count in parts.items())})" if parts else ""
    return f"{counts[MET]} claims met, {counts[MISSED]} missed{named}, {counts[NOT_MEASURED]} not measured."


def where(results: Mapping[str, Any]) -> str:
    """The machine, the versions, the models: a list in Markdown."""
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


def markdown_table(table: TextTable) -> str:
    """A table in Markdown."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in table.rows]
    rule = ["---", *("---:" for _ in table.columns[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [table.columns, rule, *escaped])


def rich_table(table: TextTable) -> Table:
    """A table on the terminal."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if index else "left", no_wrap=index == 0)
    for cells in table.rows:
        drawn.add_row(*map(Text, cells))
    return drawn


def rich_claims(table: TextTable) -> Table:
    """A table of claims on the terminal, their verdicts in colour."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if index in (1, 2) else "left", no_wrap=index in (1, 2, 3))
    for cells in table.rows:
        styles = [_STYLES[cells[_VERDICT_COLUMN]] if index == _VERDICT_COLUMN else "" for index in range(len(cells))]
        drawn.add_row(*(Text(cell, style=style) for cell, style in zip(cells, styles, strict=True)))
    return drawn


_SECTION_STYLES = {MET: "green", MISSED: "red", "": ""}
_COMPARISONS = {"<=": "≤", ">=": "≥"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Of the tables of a suite."""

    columns: tuple[str, ...]
    """The last is the verdict."""
    left: frozenset[str]
    """Columns whose cells stand at the left; all others have numbers."""
    cells_of: Callable[[Mapping[str, Any]], list[str]]
    """A row, from a number as results.json has it."""

    def print(self, sections: Sequence[Mapping[str, Any]], console: Console) -> None:
        """On the terminal."""
        for section in sections:
            console.print(Text(section["title"], style="bold"))
            console.print(self._rich_table(section["numbers"]))
            for note in section["notes"]:
                console.print(Padding(Text(note, style="dim"), (0, 0, 0, 1)))
            console.print()

    def to_markdown(self, sections: Sequence[Mapping[str, Any]]) -> list[str]:
        """Paragraphs of Markdown."""
        found: list[str] = []
        for section in sections:
            found += [f"## {section['title']}", self._markdown_table(section["numbers"]), *section["notes"]]
        return found

    def _markdown_table(self, numbers: Sequence[Mapping[str, Any]]) -> str:
        rule = ["---" if column in self.left else "---:" for column in self.columns]
        rows = [[cell.replace("|", "\\|") for cell in self.cells_of(number)] for number in numbers]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in [self.columns, rule, *rows])

    def _rich_table(self, numbers: Sequence[Mapping[str, Any]]) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if column in self.left else "right", no_wrap=index > 0)
        for number in numbers:
            *cells, verdict = self.cells_of(number)
            table.add_row(*map(Text, cells), Text(verdict, style=_SECTION_STYLES[verdict]))
        return table


def print_notes(notes: Sequence[str], console: Console) -> None:
    """What must be said before the numbers."""
    for note in notes:
        console.print(Text(f"Note: {note}", style="yellow"))


def drawn(pictures: Sequence[Path]) -> list[str]:
    """Pictures, as Markdown."""
    return [f"![{picture.stem.replace('_', ' ')}]({picture.name})" for picture in pictures]


def section_summary_of(results: Mapping[str, Any]) -> str:
    """Met and missed in one line, and in which sections the missed ones are."""
    counts = section_counts_of(results["sections"])
    missed = [
        f"{section['title']}: {number['name']}"
        for section in results["sections"]
        for number in section["numbers"]
        if number["verdict"] == MISSED
    ]
    named = f" ({'; '.join(missed)})" if missed else ""
    return f"{counts[MET]} targets met, {counts[MISSED]} missed{named}."


def wanted(number: Mapping[str, Any]) -> str:
    """The target of a number; empty = it has none."""
    target = number["target"]
    return f"{_COMPARISONS[target['comparison']]} {shown(target['value'])}" if target else ""


def shown(value: float) -> str:
    """A number in as many digits as mean something."""
    size = abs(value)
    if size >= 100 or value == round(value):
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.{1 if size >= 10 else 2 if size >= 0.1 else 4}f}"


def write_results(
    results: Mapping[str, Any],
    folder: Path,
    report_name: str,
    to_markdown: Callable[[Mapping[str, Any], Sequence[Path]], str],
    plots: str,
) -> list[Path]:
    """Writes results.json, the report and, if matplotlib is there, what `write_plots` of the module `plots` draws.

    Returns what was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / "results.json", folder / report_name
    # First of all the numbers: whatever goes wrong with the rest, they are kept.
    data.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    try:
        pictures: list[Path] = import_module(plots).write_plots(results, folder)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        pictures = []
    text.write_text(to_markdown(results, pictures), encoding="utf-8")
    return [data, text, *pictures]
