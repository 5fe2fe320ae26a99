"""The faults' numbers: on the terminal, in results.json and report.md, and as a picture."""

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

from outrider_client.bench.datastore.numbers import MET, MISSED
from outrider_client.bench.datastore.report import shown, summary_of
from outrider_client.bench.files import write_results

COLUMNS = ("seen", "value", "unit", "target", "verdict")
QUICK_NOTE = "Few faults (--quick): this shows that everything works, not how often."
_STYLES = {MET: "green", MISSED: "red", "": ""}
_COMPARISONS = {"<=": "≤", ">=": "≥"}
_MAX_STRANGE = 20


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
    for sentence in strange_of(results):
        console.print(sentence, markup=False, highlight=False)
    console.print(summary_of(results), markup=False, highlight=False)


def write_report(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """results.json, report.md and, if matplotlib is there, the picture. Returns what was written."""
    return write_results(results, folder, "report.md", to_markdown, "outrider_client.bench.faults.plots")


def to_markdown(results: Mapping[str, Any], pictures: Sequence[Path] = ()) -> str:
    """The report as Markdown."""
    parts = ["# Faults, and what callers notice", _where(results), *(f"> **Note.** {n}" for n in notes_of(results))]
    parts.append(summary_of(results))
    for section in results["sections"]:
        parts += [f"## {section['title']}", _markdown_table(section["numbers"]), *section["notes"]]
    if strange := strange_of(results):
        parts += ["## Generations with something to tell", "\n".join(f"* {sentence}" for sentence in strange)]
    parts.extend(f"![{picture.stem.replace('_', ' ')}]({picture.name})" for picture in pictures)
    return "\n\n".join(parts) + "\n"


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


def cells_of(number: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    target = number["target"]
    wanted = f"{_COMPARISONS[target['comparison']]} {shown(target['value'])}" if target else ""
    return [number["name"], shown(number["median"]), number["unit"], wanted, number["verdict"]]


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


def _markdown_table(numbers: Sequence[Mapping[str, Any]]) -> str:
    rule = ["---", "---:", "---", "---:", "---"]
    rows = [list(COLUMNS), rule, *([cell.replace("|", "\\|") for cell in cells_of(number)] for number in numbers)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _rich_table(numbers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index in (1, 3) else "left", no_wrap=index > 0)
    for number in numbers:
        *cells, verdict = cells_of(number)
        table.add_row(*map(Text, cells), Text(verdict, style=_STYLES[verdict]))
    return table
