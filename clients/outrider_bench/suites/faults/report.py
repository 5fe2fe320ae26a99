"""The faults' numbers: on the terminal, in results.json and report.md, and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider_bench.report import Layout, drawn, print_notes, section_summary_of, shown, wanted, write_results

QUICK_NOTE = "Few faults (--quick): this shows that everything works, not how often."
_MAX_STRANGE = 20


def cells_of(number: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    return [number["name"], shown(number["median"]), number["unit"], wanted(number), number["verdict"]]


LAYOUT = Layout(("seen", "value", "unit", "target", "verdict"), frozenset({"seen", "unit", "verdict"}), cells_of)


def print_report(results: Mapping[str, Any], console: Console) -> None:
    """Tables on the terminal."""
    print_notes(notes_of(results), console)
    LAYOUT.print(results["sections"], console)
    for sentence in strange_of(results):
        console.print(sentence, markup=False, highlight=False)
    console.print(section_summary_of(results), markup=False, highlight=False)


def write_report(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """results.json, report.md and, if matplotlib is there, the picture. Returns what was written."""
    return write_results(results, folder, "report.md", to_markdown, "outrider_bench.suites.faults.plots")


def to_markdown(results: Mapping[str, Any], pictures: Sequence[Path] = ()) -> str:
    """The report as Markdown."""
    parts = ["# Faults, and what callers notice", _where(results), *(f"> **Note.** {n}" for n in notes_of(results))]
    parts += [section_summary_of(results), *LAYOUT.to_markdown(results["sections"])]
    if strange := strange_of(results):
        parts += ["## Generations with something to tell", "\n".join(f"* {sentence}" for sentence in strange)]
    return "\n\n".join([*parts, *drawn(pictures)]) + "\n"


def notes_of(results: Mapping[str, Any]) -> list[str]:
    """What must be said before the numbers."""
    found = [QUICK_NOTE] if results["config"]["is_quick"] else []
    if results["interrupted"]:
        found.append("The run did not come to its end: faults and numbers are missing.")
    return found + [f"{what} failed: {why}" for what, why in results["failures"].items()]


def strange_of(results: Mapping[str, Any]) -> list[str]:
    """Generations that failed, or whose text is another one."""
    found = []
    for outcome in results["strange"][:_MAX_STRANGE]:
        place = outcome["first_difference"]
        what = outcome["error"] or (f"differs from token {place} on" if place is not None else "has another length")
        found.append(f"{outcome['method']}, {outcome['num_tokens']} tokens, {outcome['num_resumes']} resumed: {what}")
    left_out = len(results["strange"]) - len(found)
    return [*found, f"and {left_out} more"] if left_out else found


def _where(results: Mapping[str, Any]) -> str:
    environment, config = results["environment"], results["config"]
    kinds = Counter(f"{fault['kind']} of the {fault['part']}" for fault in results["faults"])
    lines = [
        f"{environment['cpu']}, {environment['num_cores']} cores, {environment['memory_gib']} GiB",
        ", ".join(f"{name} {number}" for name, number in environment["versions"].items() if number),
        f"{config['num_faults']} faults in {config['minutes']:g} minutes, {config['num_sessions']} sessions, seed "
        f"{config['seed']}; demo/target and demo/draft in float32, two verifiers",
    ]
    if kinds:
        lines.append(", ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items())))
    return "\n".join(f"* {line}" for line in lines)
