"""Sections of numbers beside their targets, as tables: on the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outrider_client.bench.numbers import MET, MISSED, counts_of

_STYLES = {MET: "green", MISSED: "red", "": ""}
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
            table.add_row(*map(Text, cells), Text(verdict, style=_STYLES[verdict]))
        return table


def print_notes(notes: Sequence[str], console: Console) -> None:
    """What must be said before the numbers."""
    for note in notes:
        console.print(Text(f"Note: {note}", style="yellow"))


def drawn(pictures: Sequence[Path]) -> list[str]:
    """Pictures, as Markdown."""
    return [f"![{picture.stem.replace('_', ' ')}]({picture.name})" for picture in pictures]


def summary_of(results: Mapping[str, Any]) -> str:
    """Met and missed in one line, and in which sections the missed ones are."""
    counts = counts_of(results["sections"])
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
