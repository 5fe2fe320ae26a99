"""What the reports of the suites have in common: tables on the terminal and in Markdown, claims, the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from outrider_client.bench.claims import MET, MISSED, NOT_MEASURED, counts_of
from outrider_client.bench.tables import TextTable

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
