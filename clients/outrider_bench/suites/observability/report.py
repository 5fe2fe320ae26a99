"""The numbers of metrics and traces: on the terminal, in results.json and report.md, and as a picture."""

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
from outrider_bench.suites.observability.verdicts import quartiles_of


def cells_of(number: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    low, high = quartiles_of(number)
    spread = f"{shown(low)} to {shown(high)}"
    return [number["name"], shown(number["median"]), spread, number["unit"], wanted(number), number["verdict"]]


LAYOUT = Layout(
    ("what", "median", "quartiles", "unit", "target", "verdict"), frozenset({"what", "unit", "verdict"}), cells_of
)


def print_report(results: Mapping[str, Any], console: Console) -> None:
    """Tables on the terminal."""
    print_notes(notes_of(results), console)
    LAYOUT.print(results["sections"], console)
    console.print(section_summary_of(results), markup=False, highlight=False)


def write_report(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """results.json, report.md and, if matplotlib is there, the picture. Returns what was written."""
    return write_results(results, folder, "report.md", to_markdown, "outrider_bench.suites.observability.plots")


def to_markdown(results: Mapping[str, Any], pictures: Sequence[Path] = ()) -> str:
    """The report as Markdown."""
    parts = ["# What metrics and traces cost", _where(results), *(f"> **Note.** {n}" for n in notes_of(results))]
    parts += [section_summary_of(results), *LAYOUT.to_markdown(results["sections"])]
    return "\n\n".join([*parts, *drawn(pictures)]) + "\n"


def notes_of(results: Mapping[str, Any]) -> list[str]:
    """What must be said before the numbers."""
    found = [QUICK_NOTE] if results["config"]["is_quick"] else []
    if results["interrupted"]:
        found.append("The run did not come to its end: rounds are missing.")
    return found + [f"{what} failed: {why}" for what, why in results["failures"].items()]


def _where(results: Mapping[str, Any]) -> str:
    environment, config = results["environment"], results["config"]
    lines = [
        f"{environment['cpu']}, {environment['num_cores']} cores, {environment['memory_gib']} GiB",
        ", ".join(f"{name} {number}" for name, number in environment["versions"].items() if number),
        f"{config['target']}, {config['concurrency']} generations at once of {config['max_tokens']} tokens at "
        f"temperature 0.7, {config['num_rounds']} rounds, seed {config['seed']}; the variants are turns of "
        "the same services",
    ]
    return "\n".join(f"* {line}" for line in lines)
