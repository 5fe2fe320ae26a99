"""What is left behind: tables on the terminal, results.json, results.md and the pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outrider_bench.experiment import OFF
from outrider_bench.report import write_results
from outrider_bench.tables import (
    TextTable,
    category_tables,
    latency_tables,
    machine_table,
    notes,
    round_tables,
    speed_tables,
)


def tables_of(results: Mapping[str, Any]) -> list[TextTable]:
    """All tables, in the order in which they are read."""
    rows = results["rows"]
    machine = machine_table(results["machine"])
    speed = speed_tables(rows, _target_dtype(results))
    latency = latency_tables(rows)
    return [*speed, *category_tables(rows), *latency, *round_tables(rows), *([machine] if machine else [])]


def print_report(results: Mapping[str, Any], console: Console) -> None:
    """Tables on the terminal."""
    for note in notes(results):
        console.print(Text(f"Note: {note}", style="yellow"))
    for table in tables_of(results):
        console.print(Text(f"{table.title[0].upper()}{table.title[1:]}", style="bold"))
        console.print(_rich_table(table))
        if table.caption:
            console.print(Padding(Text(table.caption, style="dim"), (0, 0, 1, 0)))


def write_report(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """results.json, results.md and, if matplotlib is there, the pictures. Returns what was written."""
    return write_results(results, folder, "results.md", to_markdown, "outrider_bench.suites.generation.plots")


def to_markdown(results: Mapping[str, Any], pictures: Sequence[Path] = ()) -> str:
    """The report as Markdown."""
    parts = ["# Benchmark", _where(results), *(f"> **Note.** {note}" for note in notes(results))]
    for table in tables_of(results):
        parts.append(f"## {table.title[0].upper()}{table.title[1:]}")
        parts.append(_markdown_table(table))
        if table.caption:
            parts.append(table.caption)
    parts.extend(f"![{picture.stem.replace('_', ' ')}]({picture.name})" for picture in pictures)
    return "\n\n".join(parts) + "\n"


def _target_dtype(results: Mapping[str, Any]) -> str:
    """What the target computed in; what was asked for where it never said so."""
    target = results["environment"]["models"].get("target", {})
    return str(target.get("dtype") or results["config"]["dtype"] or "")


def _where(results: Mapping[str, Any]) -> str:
    environment, config = results["environment"], results["config"]
    pinning = environment["pinning"]
    cores = "not pinned"
    if pinning:
        cores = f"target on core {pinning['target']}, all others on core {pinning['everything_else']}, one thread each"
    lines = [
        f"{environment['cpu']}, {environment['num_cores']} cores, {environment['memory_gib']} GiB; {cores}",
        ", ".join(f"{name} {number}" for name, number in environment["versions"].items() if number),
        f"{config['num_prompts']} prompts, {config['max_tokens']} tokens each, {config['repeats']} repeats, "
        f"seed {config['seed']}",
    ]
    for role, model in environment["models"].items():
        size = f", {model['num_parameters'] / 1e6:.1f} M parameters" if model.get("num_parameters") else ""
        inflated = ", cost inflated" if model.get("inflated") else ""
        lines.append(f"{role} model: {model['model_id']}{size}, {model.get('dtype', 'dtype unknown')}{inflated}")
    return "\n".join(f"* {line}" for line in lines)


def _markdown_table(table: TextTable) -> str:
    escaped = [[cell.replace("|", "\\|").replace("*", "\\*") for cell in row] for row in table.rows]
    rule = ["---", *("---:" for _ in table.columns[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [table.columns, rule, *escaped])


def _rich_table(table: TextTable) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD)
    for index, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if index else "left", no_wrap=index == 0)
    for cells in table.rows:
        best = cells[0].endswith(" *")
        drawn.add_row(*(Text(cell) for cell in cells), style="dim" if cells[0] == OFF else "bold" if best else "")
    return drawn
