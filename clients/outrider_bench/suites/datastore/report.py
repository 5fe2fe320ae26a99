"""The datastore's numbers as tables: on the terminal, in results.json and report.md, and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider_bench.report import (
    QUICK_NOTE,
    Layout,
    drawn,
    print_notes,
    section_summary_of,
    shown,
    wanted,
    write_results,
)


def cells_of(number: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    runs = number["runs"]
    spread = f"{shown(min(runs))}–{shown(max(runs))}" if len(runs) > 1 else ""
    return [number["name"], shown(number["median"]), spread, number["unit"], wanted(number), number["verdict"]]


LAYOUT = Layout(
    ("measured", "median", "lowest–highest", "unit", "target", "verdict"),
    frozenset({"measured", "unit", "verdict"}),
    cells_of,
)


def print_report(results: Mapping[str, Any], console: Console) -> None:
    """Tables on the terminal."""
    print_notes(notes_of(results), console)
    LAYOUT.print(results["sections"], console)
    console.print(section_summary_of(results), markup=False, highlight=False)


def write_report(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """results.json, report.md and, if matplotlib is there, the pictures. Returns what was written."""
    return write_results(results, folder, "report.md", to_markdown, "outrider_bench.suites.datastore.plots")


def to_markdown(results: Mapping[str, Any], pictures: Sequence[Path] = ()) -> str:
    """The report as Markdown."""
    parts = ["# The datastore, measured", _where(results), *(f"> **Note.** {note}" for note in notes_of(results))]
    parts += [section_summary_of(results), *LAYOUT.to_markdown(results["sections"]), *drawn(pictures)]
    return "\n\n".join(parts) + "\n"


def notes_of(results: Mapping[str, Any]) -> list[str]:
    """What must be said before the numbers."""
    found = [QUICK_NOTE] if results["config"]["is_quick"] else []
    if results["interrupted"]:
        found.append("The run did not come to its end: parts are missing.")
    return found + [f"{part} could not be measured: {why}" for part, why in results["failures"].items()]


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
