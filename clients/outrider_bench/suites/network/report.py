"""The network's numbers: on the terminal, in results.json and results.md, and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from outrider_bench.experiment_tables import CAPTION, claims_table, degraded_notes, experiment_table
from outrider_bench.report import QUICK_NOTE, markdown_table, rich_claims, rich_table, summary_of, where, write_results
from outrider_bench.suites.network.tables import (
    BOUND_CAPTION,
    RTT_CAPTION,
    TRAFFIC_CAPTION,
    bound_table,
    rtt_tables,
    traffic_table,
)
from outrider_bench.tables import TextTable

TITLES = {
    "rtt": "Round trips",
    "simulation": "What could be kept",
    "bytes": "Bytes",
    "wan": "A network that loses packets",
    "edge": "An application at the edge",
}
_CAPTIONS = {"rtt": RTT_CAPTION, "simulation": BOUND_CAPTION, "bytes": TRAFFIC_CAPTION, "wan": CAPTION, "edge": CAPTION}


def print_report(results: Mapping[str, Any], console: Console) -> None:
    """Tables on the terminal."""
    for note in notes_of(results):
        console.print(Text(f"Note: {note}", style="yellow"))
    for part in results["config"]["parts"]:
        console.print(Text(TITLES[part], style="bold"))
        tables = tables_of(results, part)
        for table in tables:
            console.print(Text(table.title))
            console.print(rich_table(table))
        for sentence in sentences_of(results, part) if tables else ():
            console.print(Padding(Text(sentence, style="dim"), (0, 0, 1, 1)))
        if claims := _claims_of(results, part):
            console.print(rich_claims(claims_table(claims)))
    console.print(summary_of(results["claims"]), markup=False, highlight=False)


def write_report(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """results.json, results.md and, if matplotlib is there, the pictures. Returns what was written."""
    return write_results(results, folder, "results.md", to_markdown, "outrider_bench.suites.network.plots")


def to_markdown(results: Mapping[str, Any], pictures: Sequence[Path] = ()) -> str:
    """The report as Markdown."""
    lines = ["# Over a network, measured", where(results), *(f"> **Note.** {note}" for note in notes_of(results))]
    lines.append(summary_of(results["claims"]))
    for part in results["config"]["parts"]:
        lines.append(f"## {TITLES[part]}")
        if claims := _claims_of(results, part):
            lines.append(markdown_table(claims_table(claims)))
        tables = tables_of(results, part)
        for table in tables:
            lines += [f"### {table.title}", markdown_table(table)]
        lines += sentences_of(results, part) if tables else []
        lines += [f"![{picture.stem}]({picture.name})" for picture in pictures if picture.stem == part]
    return "\n\n".join(lines) + "\n"


def tables_of(results: Mapping[str, Any], part: str) -> list[TextTable]:
    """All tables of a part."""
    if part == "rtt":
        return rtt_tables(_experiments_of(results, part))
    if part == "bytes":
        found = traffic_table(results["traffic"])
    elif part == "simulation":
        found = bound_table(results["bounds"])
    else:
        return [experiment_table(experiment) for experiment in _experiments_of(results, part)]
    return [found] if found is not None else []


def sentences_of(results: Mapping[str, Any], part: str) -> list[str]:
    """How a part was measured, and how to read it."""
    found = [results["links"][part]] if part in results["links"] else []
    found += [experiment["note"] for experiment in _experiments_of(results, part) if experiment["note"]]
    return list(dict.fromkeys([*found, _CAPTIONS[part]]))


def notes_of(results: Mapping[str, Any]) -> list[str]:
    """What must be said before the numbers."""
    found = [QUICK_NOTE] if results["config"]["is_quick"] else []
    if results["interrupted"]:
        found.append("The run did not come to its end: parts are missing.")
    found += [f"{what}: {why}" for what, why in results["failures"].items()]
    for experiment in results["experiments"]:
        found += [f"{experiment['title']}, {label}: failed: {why}" for label, why in experiment["failures"].items()]
        found += degraded_notes(experiment)
    return found


def _experiments_of(results: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    return [experiment for experiment in results["experiments"] if experiment["part"] == part]


def _claims_of(results: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    return [claim for claim in results["claims"] if claim["part"] == part]
