"""The datastore's numbers as tables: on the terminal, in results.json and report.md, and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outrider_client.bench.datastore.numbers import MET, MISSED, counts_of
from outrider_client.bench.files import write_results

COLUMNS = ("measured", "median", "lowest–highest", "unit", "target", "verdict")
_STYLES = {MET: "green", MISSED: "red", "": ""}
_COMPARISONS = {"<=": "≤", ">=": "≥"}
QUICK_NOTE = "Small sizes (--quick): this shows that everything works, not how fast it is."


def print_report(results: Mapping[str, Any], console: Console) -> None:
    """Tables on the terminal."""
    for note in notes_of(results):
        console.print(Text(f"Note: {note}", style="yellow"))
    for section in results["sections"]:
        console.print(Text(section["title"], style="bold"))
        console.print(_rich_table(section["numbers"]))
        for note in section["notes"]:
            console.print(Padding(Text(note, style="dim"), (0, 0, 0, 1)))
        console.print()
    console.print(summary_of(results), markup=False, highlight=False)


def write_report(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """results.json, report.md and, if matplotlib is there, the pictures. Returns what was written."""
    return write_results(results, folder, "report.md", to_markdown, "outrider_client.bench.datastore.plots")


def to_markdown(results: Mapping[str, Any], pictures: Sequence[Path] = ()) -> str:
    """The report as Markdown."""
    parts = ["# The datastore, measured", _where(results), *(f"> **Note.** {note}" for note in notes_of(results))]
    parts.append(summary_of(results))
    for section in results["sections"]:
        parts += [f"## {section['title']}", _markdown_table(section["numbers"]), *section["notes"]]
    parts.extend(f"![{picture.stem.replace('_', ' ')}]({picture.name})" for picture in pictures)
    return "\n\n".join(parts) + "\n"


def notes_of(results: Mapping[str, Any]) -> list[str]:
    """What must be said before the numbers."""
    found = [QUICK_NOTE] if results["config"]["is_quick"] else []
    if results["interrupted"]:
        found.append("The run did not come to its end: parts are missing.")
    return found + [f"{part} could not be measured: {why}" for part, why in results["failures"].items()]


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


def cells_of(number: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    runs, target = number["runs"], number["target"]
    spread = f"{shown(min(runs))}–{shown(max(runs))}" if len(runs) > 1 else ""
    wanted = f"{_COMPARISONS[target['comparison']]} {shown(target['value'])}" if target else ""
    return [number["name"], shown(number["median"]), spread, number["unit"], wanted, number["verdict"]]


def shown(value: float) -> str:
    """A number in as many digits as mean something."""
    size = abs(value)
    if size >= 100 or value == round(value):
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.{1 if size >= 10 else 2 if size >= 0.1 else 4}f}"


def _where(results: Mapping[str, Any]) -> str:
    environment, config = results["environment"], results["config"]
    cores = config["cores"]
    pinning = f"services on core {cores[0]}, who asks on core {cores[-1]}" if cores else "not pinned"
    lines = [
        f"{environment['cpu']}, {environment['num_cores']} cores, {environment['memory_gib']} GiB; {pinning}",
        ", ".join(f"{name} {number}" for name, number in environment["versions"].items() if number),
        f"repeats: {config['repeats']}, of which the median counts; seed: {config['seed']}",
    ]
    return "\n".join(f"* {line}" for line in lines)


def _markdown_table(numbers: Sequence[Mapping[str, Any]]) -> str:
    rule = ["---", *("---:" for _ in COLUMNS[1:])]
    rows = [list(COLUMNS), rule, *([cell.replace("|", "\\|") for cell in cells_of(number)] for number in numbers)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _rich_table(numbers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index in (1, 2, 4) else "left", no_wrap=index > 0)
    for number in numbers:
        *cells, verdict = cells_of(number)
        table.add_row(*map(Text, cells), Text(verdict, style=_STYLES[verdict]))
    return table
