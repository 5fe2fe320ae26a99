"""One table, one report: a `Table` drawn on the terminal and in Markdown, and the reports that suites make of them.

A suite says which tables stand in which chapter; how they look, and what every report says about the machine, is here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from outrider_bench.experiment import OFF
from outrider_bench.result import INCONCLUSIVE, MET, MISSED, NOT_MEASURED, counts_of
from outrider_bench.statistics import Row, label_of
from outrider_cli.prompts import ALL_CATEGORIES

NONE = "–"
QUICK_NOTE = "Small sizes (--quick): this shows that everything works, not how fast it is."
_STYLES = {MET: "green", MISSED: "red", INCONCLUSIVE: "yellow", NOT_MEASURED: "yellow"}
_SYMBOLS = {">=": "≥", "<=": "≤"}


@dataclass(frozen=True, slots=True)
class Table:
    """Holds a title, column names, rows of cells, and what must be said about them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    words: frozenset[str] = frozenset()
    """Columns, beside the first one, whose cells are words and stand at the left; numbers stand at the right."""
    wrapped: frozenset[str] | None = None
    """Columns that may break a cell into lines; None means all but the first."""

    def to_markdown(self) -> str:
        """Draw the table in Markdown."""
        # Both would end the cell, or begin emphasis.
        escaped = [[cell.replace("|", "\\|").replace("*", "\\*") for cell in row] for row in self.rows]
        rule = ["---" if self._is_left(index) else "---:" for index in range(len(self.columns))]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in [self.columns, rule, *escaped])

    def to_rich(self) -> RichTable:
        """Draw the table for the terminal: verdicts in colour, `off` pale, the best of several settings bold."""
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
    """Holds what a report says about one thing."""

    title: str
    tables: Sequence[Table] = ()
    sentences: Sequence[str] = ()
    """Sentences about how it was measured, and how to read it."""
    items: Sequence[str] = ()
    """Entries of a list."""
    pictures: Sequence[str] = ()
    """Names of the pictures that belong here, without `.png`."""


@dataclass(frozen=True, slots=True)
class Report:
    """Holds everything that a suite says, in order."""

    title: str
    environment: Sequence[str]
    """Lines about the machine and the run."""
    notes: Sequence[str]
    """Sentences that belong before the numbers: about small sizes, failures, an interruption."""
    chapters: Sequence[Chapter]
    summary: str = ""
    checks: Sequence[str] = field(default_factory=list)
    """Sentences about what was made sure of before measuring."""

    def print(self, console: Console) -> None:
        """Print notes, chapters and summary."""
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
            for sentence in (*chapter.sentences, *chapter.items):
                console.print(Padding(Text(sentence, style="dim"), (0, 0, 0, 1)))
            console.print()
        if self.summary:
            console.print(self.summary, markup=False, highlight=False)

    def to_markdown(self, pictures: Sequence[Path] = ()) -> str:
        """Draw the report in Markdown; pictures that no chapter names stand at the end."""
        lines = [f"# {self.title}", _list(self.environment), *(f"> **Note.** {note}" for note in self.notes)]
        lines += [self.summary] if self.summary else []
        lines += [_list(self.checks)] if self.checks else []
        left = {picture.stem: picture for picture in pictures}
        for chapter in self.chapters:
            lines.append(f"## {chapter.title}")
            for table in chapter.tables:
                lines += [f"### {table.title}"] if table.title else []
                lines.append(table.to_markdown())
                lines += [table.caption] if table.caption else []
            lines += chapter.sentences
            lines += [_list(chapter.items)] if chapter.items else []
            lines += [_picture(left.pop(name)) for name in chapter.pictures if name in left]
        lines += [_picture(picture) for picture in left.values()]
        return "\n\n".join(lines) + "\n"


def write_results(
    results: Mapping[str, Any],
    folder: Path,
    report_of: Callable[[Mapping[str, Any]], Report],
    report_name: str,
    figures: str,
) -> list[Path]:
    """Write results.json, the report and, if matplotlib is installed, pictures.

    Args:
        results: What results.json shall keep.
        folder: Where everything is written.
        report_of: Makes the report.
        report_name: Name of the report's file.
        figures: Module whose `figures_of` draws the pictures; imported only here.

    Returns:
        The paths that were written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / "results.json", folder / report_name
    # First of all the numbers: whatever goes wrong with the rest, they are kept.
    # `allow_nan`: Python would write NaN and Infinity, which no other reader of JSON takes.
    data.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    try:
        from outrider_bench.plotting import write_figures

        pictures = write_figures(import_module(figures).figures_of(results), folder)
    except ModuleNotFoundError as error:
        # Pictures are a bonus, but a module of ours that cannot be found is a mistake.
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        pictures = []
    text.write_text(report_of(results).to_markdown(pictures), encoding="utf-8")
    return [data, text, *pictures]


def environment_lines(results: Mapping[str, Any], *lines: str, pinning: str = "") -> list[str]:
    """Describe the machine and the versions, then what a suite adds."""
    environment = results["environment"]
    machine = f"{environment['cpu']}, {environment['num_cores']} cores, {environment['memory_gib']} GiB"
    versions = ", ".join(f"{name} {number}" for name, number in environment["versions"].items() if number)
    return [f"{machine}; {pinning}" if pinning else machine, versions, *lines]


def notes_of(results: Mapping[str, Any], *, interrupted: str, failed: str = "{what} failed: {why}") -> list[str]:
    """Say what must be known before the numbers: small sizes, an interruption, what failed."""
    found = [QUICK_NOTE] if results["config"].get("is_quick") else []
    found += [interrupted] if results["interrupted"] else []
    return found + [failed.format(what=what, why=why) for what, why in results["failures"].items()]


def measurements_table(
    measurements: Sequence[Mapping[str, Any]],
    *,
    title: str = "",
    first: str = "measured",
    spread: str = "",
    spread_of: Callable[[Mapping[str, Any]], str] | None = None,
    digits: int | None = None,
) -> Table:
    """Make a table of measurements as results.json keeps them: value, unit, target, verdict.

    An interval and the paper's figure have columns of their own where a measurement has them.

    Args:
        measurements: One row each.
        title: Of the table; empty where the chapter's is enough.
        first: Heading of the names.
        spread: Heading of the column that says how far the repeats lie apart; empty means no such column.
        spread_of: Makes that column's cell.
        digits: Decimals of values below 100; None means as many as mean something.
    """
    shows_units = any(one["unit"] for one in measurements)
    shows_remarks = any(one["remark"] for one in measurements)
    # Results of older releases have neither.
    shows_intervals = any(one.get("interval") for one in measurements)
    shows_papers = any(one.get("paper") for one in measurements)
    columns = [first, "value", *([spread] if spread else []), *(["95 %"] if shows_intervals else [])]
    columns += [*(["unit"] if shows_units else []), "target", "verdict"]
    columns += [*(["paper"] if shows_papers else []), *(["remark"] if shows_remarks else [])]
    rows = []
    for one in measurements:
        cells = [one["name"], _value_cell(one["value"], digits)]
        cells += [spread_of(one)] if spread_of is not None else []
        cells += [_interval_cell(one.get("interval"))] if shows_intervals else []
        cells += [one["unit"]] if shows_units else []
        cells += [target_of(one), one["verdict"]]
        cells += [one.get("paper", "")] if shows_papers else []
        rows.append(cells + ([one["remark"]] if shows_remarks else []))
    words = frozenset({"unit", "verdict", "paper", "remark"})
    return Table(title, columns, rows, "", words, frozenset({first, "paper", "remark"}))


def section_chapters(
    sections: Sequence[Mapping[str, Any]],
    first: str = "measured",
    spread: str = "",
    spread_of: Callable[[Mapping[str, Any]], str] | None = None,
) -> list[Chapter]:
    """Make a chapter of each section."""
    return [
        Chapter(
            section["title"],
            [measurements_table(section["measurements"], first=first, spread=spread, spread_of=spread_of)],
            section["notes"],
        )
        for section in sections
    ]


def summary_of_sections(sections: Sequence[Mapping[str, Any]]) -> str:
    """Count targets that were met and missed in one line, and name the missed ones."""
    counts = counts_of(one for section in sections for one in section["measurements"])
    missed = [
        f"{section['title']}: {one['name']}"
        for section in sections
        for one in section["measurements"]
        if one["verdict"] == MISSED
    ]
    named = f" ({'; '.join(missed)})" if missed else ""
    return f"{counts[MET]} targets met, {counts[MISSED]} missed{named}."


def summary_of_claims(claims: Sequence[Mapping[str, Any]]) -> str:
    """Count claims by their verdicts in one line, and name the parts of the missed ones."""
    counts = counts_of(claims)
    parts = Counter(one["part"] for one in claims if one["verdict"] == MISSED)
    named = f" ({', '.join(f'{part}: {count}' for part, count in parts.items())})" if parts else ""
    found = f"{counts[MET]} claims met, {counts[MISSED]} missed{named}"
    # Without intervals nothing can be inconclusive, and that there is no such claim says nothing.
    if any(one.get("interval") for one in claims):
        found += f", {counts[INCONCLUSIVE]} inconclusive"
    return f"{found}, {counts[NOT_MEASURED]} not measured."


def target_of(measurement: Mapping[str, Any]) -> str:
    """Show the target of a measurement; empty if it has none, or the limit is not known."""
    target = measurement["target"]
    if target is None or target["value"] is None:
        return ""
    return f"{_SYMBOLS.get(target['comparison'], target['comparison'])} {shown(target['value'])}"


def shown(value: float) -> str:
    """Show a number in as many digits as mean something."""
    size = abs(value)
    if size >= 100 or value == round(value):
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.{1 if size >= 10 else 2 if size >= 0.1 else 4}f}"


def _value_cell(value: float | None, digits: int | None) -> str:
    if value is not None and (digits is None or abs(value) >= 100):
        return shown(value)
    # Of a claim that is just missed, the digits must show that it is.
    return number_cell(value, digits or 0)


def _interval_cell(interval: Sequence[float] | None) -> str:
    return NONE if interval is None else f"{shown(interval[0])}–{shown(interval[1])}"


def number_cell(value: float | None, digits: int, unit: str = "") -> str:
    """Show a number with `digits` decimals; None shows as a dash."""
    return NONE if value is None else f"{value:.{digits}f}{unit}"


def percent_cell(value: float | None) -> str:
    """Show a share in percent; None shows as a dash."""
    return NONE if value is None else f"{value:.0%}"


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"* {line}" for line in lines)


def _picture(path: Path) -> str:
    return f"![{path.stem.replace('_', ' ')}]({path.name})"


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


def experiment_table(experiment: Mapping[str, Any]) -> Table:
    """Make a row for each contender and temperature; prompts of several kinds have rows of their own for each kind."""
    rows: Sequence[Row] = experiment["rows"]
    categories = {row["category"] for row in rows} - {ALL_CATEGORIES}
    # With several kinds, a row over all of them would be a mean of what is shown apart.
    shown = [row for row in rows if (row["category"] == ALL_CATEGORIES) == (not categories)]
    if not categories:
        columns, cells = _with_concurrency(EXPERIMENT_COLUMNS, [_experiment_cells(row) for row in shown], shown)
        return Table(experiment["title"], columns, cells)
    # Kinds apart, each with its temperatures.
    shown = sorted(shown, key=lambda row: (row["category"], row["temperature"]))
    columns = ("prompts", *EXPERIMENT_COLUMNS)
    return Table(experiment["title"], columns, [[row["category"], *_experiment_cells(row)] for row in shown])


def origins_table(experiment: Mapping[str, Any]) -> Table | None:
    """Show where accepted tokens came from; None means that all came from the draft model."""
    if {name for row in experiment["rows"] for name in row["accepted_by_source"]} <= {"draft"}:
        return None
    return _shares_table(experiment, "accepted_by_source", "where accepted tokens came from")


def decisions_table(experiment: Mapping[str, Any]) -> Table | None:
    """Show what auto chose, in shares of its rounds; None means that it chose nothing, or took no part."""
    return _shares_table(experiment, "decisions", "what auto chose, in rounds")


def _shares_table(experiment: Mapping[str, Any], field: str, title: str) -> Table | None:
    rows = [row for row in experiment["rows"] if row["category"] == ALL_CATEGORIES and sum(row[field].values())]
    names = list(dict.fromkeys(name for row in rows for name in row[field]))
    if not names:
        return None
    cells = []
    for row in rows:
        total = sum(row[field].values())
        shares = [percent_cell(row[field][name] / total) if name in row[field] else NONE for name in names]
        cells.append([label_of(row), f"{row['temperature']:g}", *shares])
    columns, lines = _with_concurrency(("method", "T", *names), cells, rows)
    return Table(f"{experiment['title']}: {title}", columns, lines)


def _with_concurrency(
    columns: Sequence[str], cells: Sequence[Sequence[str]], rows: Sequence[Row]
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Put the number of generations at once in front of each row where it varies."""
    if len({row["concurrency"] for row in rows}) < 2:
        return columns, cells
    return (
        ("at once", *columns),
        [[str(row["concurrency"]), *line] for row, line in zip(rows, cells, strict=True)],
    )


def degraded_notes(experiment: Mapping[str, Any]) -> list[str]:
    """Name the contenders that lacked a peer."""
    return [
        f"{experiment['title']}, {label_of(row)}, T = {row['temperature']:g}: a peer was missing for a part of "
        f"{row['degraded']} generations"
        for row in experiment["rows"]
        if row["category"] == ALL_CATEGORIES and row["degraded"]
    ]


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


def experiment_notes(experiments: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the contenders that failed, and those that lacked a peer."""
    found: list[str] = []
    for experiment in experiments:
        found += [f"{experiment['title']}, {label}: failed: {why}" for label, why in experiment["failures"].items()]
        found += degraded_notes(experiment)
    return found


def of_part(things: Sequence[Mapping[str, Any]], part: str) -> list[Mapping[str, Any]]:
    """Select the experiments, or the claims, of a part."""
    return [one for one in things if one["part"] == part]


def claims_tables(results: Mapping[str, Any], part: str) -> list[Table]:
    """Make the table of a part's claims, if it has any."""
    claims = of_part(results["claims"], part)
    return [measurements_table(claims, digits=3)] if claims else []


def experiments_environment(results: Mapping[str, Any]) -> list[str]:
    """Describe the machine and the run of a suite of experiments."""
    config, target = results["config"], results["environment"]["models"].get("target", {})
    cores = config["cores"]
    pinning = f"target on core {cores[0]}, all others on core {cores[-1]}, one thread each" if cores else "not pinned"
    return environment_lines(
        results,
        f"target {config['target']}, {target.get('dtype', 'dtype unknown')}"
        + (f", rows NOT EXACT: {reason}" if (reason := target.get("exact_off_reason")) else ""),
        f"seed {config['seed']}; {results['duration_s'] / 60:.1f} minutes",
        pinning=pinning,
    )
