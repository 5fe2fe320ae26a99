"""A `Table` drawn on the terminal and in Markdown, and the reports that suites make of tables.

A suite decides which tables belong to which chapter. This module has their looks, and the facts about the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from outrider_bench.experiment import OFF
from outrider_bench.statistics import Row, label_of
from outrider_cli.prompts import ALL_CATEGORIES

NONE = "–"
QUICK_NOTE = "Small sizes (--quick): this shows that everything works, not how fast it is."
_STYLES = {"met": "green", "missed": "red", "inconclusive": "yellow"}


@dataclass(frozen=True, slots=True)
class Table:
    """A title, column names, rows of cells, and remarks about them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    words: frozenset[str] = frozenset()
    """Columns besides the first one whose cells are words, aligned left; numbers are aligned right."""
    wrapped: frozenset[str] | None = None
    """Columns that may wrap a cell; None means all but the first."""

    def to_markdown(self) -> str:
        """Draws the table in Markdown."""
        # Both would end the cell, or begin emphasis.
        escaped = [[cell.replace("|", "\\|").replace("*", "\\*") for cell in row] for row in self.rows]
        rule = ["---" if self._is_left(index) else "---:" for index in range(len(self.columns))]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in [self.columns, rule, *escaped])

    def to_rich(self) -> RichTable:
        """Draws the table for the terminal: verdicts in colour, `off` pale, the best of several settings bold."""
        drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        wrapped = self.wrapped if self.wrapped is not None else frozenset(self.columns[1:])
        for index, column in enumerate(self.columns):
            justify = "left" if self._is_left(index) else "right"
            drawn.add_column(column, justify=justify, no_wrap=column not in wrapped)  # type: ignore[arg-type]
        for row in self.rows:
            style = "dim" if row[0] == OFF else "bold" if row[0].endswith(" *") else ""
            cells = zip(self.columns, row, strict=True)
            drawn.add_row(
                *(Text(cell, _STYLES.get(cell, "") if name == "verdict" else "") for name, cell in cells), style=style
            )
        return drawn

    def _is_left(self, index: int) -> bool:
        return index == 0 or self.columns[index] in self.words


@dataclass(frozen=True, slots=True)
class Chapter:
    """What a report says about one subject."""

    title: str
    tables: Sequence[Table] = ()
    sentences: Sequence[str] = ()
    """Sentences about the measurement, and how to read it."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a suite reports, in order."""

    title: str
    environment: Sequence[str]
    """Lines about the machine and the run."""
    notes: Sequence[str]
    """Sentences that must come before the numbers: about small sizes, failures, an interruption."""
    chapters: Sequence[Chapter]
    summary: str = ""

    def print(self, console: Console) -> None:
        """Prints notes, chapters and summary."""
        for note in self.notes:
            console.print(Text(f"Note: {note}", style="yellow"))
        for chapter in self.chapters:
            console.print(Text(chapter.title, style="bold"))
            for table in chapter.tables:
                if table.title:
                    console.print(Text(table.title))
                console.print(table.to_rich())
                if table.caption:
                    console.print(Padding(Text(table.caption, style="dim"), (0, 0, 1, 1)))
            for sentence in chapter.sentences:
                console.print(Padding(Text(sentence, style="dim"), (0, 0, 0, 1)))
            console.print()
        if self.summary:
            console.print(self.summary, markup=False, highlight=False)

    def to_markdown(self) -> str:
        """Draws the report in Markdown."""
        lines = [f"# {self.title}", _list(self.environment), *(f"> **Note.** {note}" for note in self.notes)]
        lines += [self.summary] if self.summary else []
        for chapter in self.chapters:
            lines.append(f"## {chapter.title}")
            for table in chapter.tables:
                lines += [f"### {table.title}"] if table.title else []
                lines.append(table.to_markdown())
                lines += [table.caption] if table.caption else []
            lines += chapter.sentences
        return "\n\n".join(lines) + "\n"


def environment_lines(results: Mapping[str, Any], *lines: str, pinning: str = "") -> list[str]:
    """Describes the machine and the versions, then adds the suite's own lines."""
    environment = results["environment"]
    machine = f"{environment['cpu']}, {environment['num_cores']} cores, {environment['memory_gib']} GiB"
    versions = ", ".join(f"{name} {number}" for name, number in environment["versions"].items() if number)
    return [f"{machine}; {pinning}" if pinning else machine, versions, *lines]


def run_line(config: Mapping[str, Any]) -> str:
    """Says what was generated, and if anything may have been tuned on these prompts."""
    part = "held out of tuning" if config["held_out"] else "not held out of tuning"
    return (
        f"{config['num_prompts']} prompts of {config['prompt_set']}, {part}, {config['max_tokens']} tokens each, "
        f"{config['repeats']} repeats, seed {config['seed']}"
    )


def notes_of(results: Mapping[str, Any], *, interrupted: str) -> list[str]:
    """Says what must be known before the numbers: small sizes, an interruption, what failed."""
    found = [QUICK_NOTE] if results["config"].get("is_quick") else []
    found += [interrupted] if results["interrupted"] else []
    return found + [f"{what} failed: {why}" for what, why in results["failures"].items()]


def number_cell(value: float | None, digits: int, unit: str = "") -> str:
    """Shows a number with `digits` decimals, and None as a dash."""
    return NONE if value is None else f"{value:.{digits}f}{unit}"


def percent_cell(value: float | None) -> str:
    """Shows a share in percent, and None as a dash."""
    return NONE if value is None else f"{value:.0%}"


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"* {line}" for line in lines)


EXPERIMENT_COLUMNS = (
    "method",
    "T",
    "tok/s",
    "x off",
    "tok/fwd",
    "accept",
    "kept",
    "hits",
    "ready",
    "empty",
    "wait",
    "same",
)
EXPERIMENT_CAPTION = (
    "tok/s: output tokens by wall time at the client, prefill included; median of the repeats. x off: median (lowest "
    "to highest) of the ratio to off in the same repeat. tok/fwd: tokens committed by one forward of the target, "
    "its own included. accept: drafted tokens kept, of those compared with the target's; kept: of all that were "
    "verified. hits: next tokens that the draft tree already had; ready: those behind which more was drafted. "
    "empty: rounds without a draft. wait: ms for a draft, median of the rounds. same: texts with the very token ids of "
    "off; under the ratio rule they part."
)


def experiment_table(title: str, rows: Sequence[Row]) -> Table:
    """Makes a row for each contender and temperature; prompts of several kinds have separate rows for each kind."""
    categories = {row["category"] for row in rows} - {ALL_CATEGORIES}
    # With several kinds, a row over all of them would average what is shown separately.
    shown = [row for row in rows if (row["category"] == ALL_CATEGORIES) == (not categories)]
    if not categories:
        return Table(title, EXPERIMENT_COLUMNS, [_experiment_cells(row) for row in shown])
    # Each kind with its temperatures.
    shown = sorted(shown, key=lambda row: (row["category"], row["temperature"]))
    columns = ("prompts", *EXPERIMENT_COLUMNS)
    return Table(title, columns, [[row["category"], *_experiment_cells(row)] for row in shown])


def _experiment_cells(row: Row) -> list[str]:
    speedups = row["speedup_runs"]
    spread = f" ({min(speedups):.2f}–{max(speedups):.2f})" if len(speedups) > 1 else ""
    is_off = row["method"] == OFF
    drafts = row["num_draft_tokens"] > 0
    return [
        label_of(row) + (" (partial)" if row["partial"] else ""),
        f"{row['temperature']:g}",
        number_cell(row["output_throughput"] or None, 1),
        NONE if is_off else number_cell(row["speedup_over_off"], 2) + spread,
        number_cell(row["mean_acceptance_length"], 2),
        percent_cell(row["acceptance"]) if drafts else NONE,
        percent_cell(row["draft_acceptance_rate"]) if drafts else NONE,
        percent_cell(row["hit_rate"]) if drafts else NONE,
        percent_cell(row["ready_hit_rate"]) if drafts else NONE,
        percent_cell(row["empty_chain_rate"]) if drafts else NONE,
        NONE if is_off else number_cell(row["wait_ms_p50"], 1),
        NONE if is_off else percent_cell(row["identical_to_off"]),
    ]
