"""Rows to tables: plain cells, which the terminal and Markdown draw each in their way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider_bench.experiment import OFF
from outrider_bench.statistics import Row, label_of
from outrider_cli.prompts import ALL_CATEGORIES

NONE = "–"


@dataclass(frozen=True, slots=True)
class TextTable:
    """A title, column names, rows of cells, and what must be said about them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


SPEED_CAPTION = (
    "tok/s: output tokens by wall time at the client, prefill included; median of the repeats. "
    "x off: median (lowest to highest) of the ratio to off in the same repeat. "
    "tokens/forward: tokens committed by one forward of the target, its own included. "
    "kept: accepted by drafted tokens. hits: next tokens that the draft tree already had. "
    "empty: rounds without a draft. "
    "same: texts with the very token ids of off (in brackets: the median output index where the others part from it). "
    "* marks the best of several settings."
)
ROUNDING_CAPTION = (
    "In bfloat16 a forward of several rows rounds differently from one of a single row, so two texts may part where "
    "two tokens are equally probable up to rounding; in float32 they do not."
)
LATENCY_CAPTION = (
    "Milliseconds. TTFT: time to the first token, prefill included. TPOT: time per output token after the first "
    "arrival. ITL: time between two arrivals; a round's tokens arrive together. E2E: the whole generation."
)
ROUND_CAPTION = (
    "Milliseconds; medians over the rounds of each generation, then over the generations. They need not add up: the "
    "median of a sum is not the sum of the medians. draft latency: from a commit sent to the first draft that answers "
    "it; draft forward: the part of it that the draft model's own forwards took, as the speculator reports it."
)


def speed_tables(rows: Sequence[Row], dtype: str) -> list[TextTable]:
    """One table for each temperature, concurrency and round-trip time."""
    columns = ("method", "tok/s", "x off", "tokens/forward", "kept", "hits", "empty", "same")
    tables = [TextTable(title, columns, [_speed_cells(row) for row in group]) for title, group in _groups(rows)]
    caption = f"{SPEED_CAPTION} {ROUNDING_CAPTION}" if dtype == "bfloat16" else SPEED_CAPTION
    return _with_caption(tables, caption)


def latency_tables(rows: Sequence[Row]) -> list[TextTable]:
    """What a user waits for."""
    columns = ("method", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "ITL p50", "ITL p99", "E2E p50", "E2E p99")
    names = ("ttft", "tpot", "itl", "e2el")
    tables = []
    for title, group in _groups(rows):
        cells = [
            [label_of(row), *(_number(row[f"{part}_{name}_ms"], 1) for name in names for part in ("median", "p99"))]
            for row in group
        ]
        tables.append(TextTable(f"Latency in ms, {title}", columns, cells))
    return _with_caption(tables, LATENCY_CAPTION)


def round_tables(rows: Sequence[Row]) -> list[TextTable]:
    """Where the time of a round goes, for the methods that know."""
    columns = ("method", "round", "forward", "wait", "overhead", "draft latency", "draft forward")
    names = ("round", "forward", "wait", "overhead", "draft_latency", "draft_forward")
    tables = []
    for title, group in _groups(rows):
        known = [row for row in group if row["round_ms_p50"] is not None]
        cells = [[label_of(row), *(_number(row[f"{name}_ms_p50"], 2) for name in names)] for row in known]
        if cells:
            tables.append(TextTable(f"A round, {title}", columns, cells))
    return _with_caption(tables, ROUND_CAPTION)


def category_tables(rows: Sequence[Row]) -> list[TextTable]:
    """The speed-up for each category."""
    categories = list(dict.fromkeys(row["category"] for row in rows if row["category"] != ALL_CATEGORIES))
    tables = []
    for title, group in _groups(rows):
        found = {(label_of(row), row["category"]): row["speedup_over_off"] for row in rows if _title(row) == title}
        labels = [label_of(row) for row in group if row["method"] != OFF]
        cells = [[label, *(_number(found.get((label, name)), 2, "x") for name in categories)] for label in labels]
        if any(_title(row) == title for row in rows if row["category"] != ALL_CATEGORIES):
            tables.append(TextTable(f"Speed-up by category, {title}", ("method", *categories), cells))
    return tables


def machine_table(machine: Mapping[str, Any]) -> TextTable | None:
    """What one forward costs, and how much perfect drafts could win."""
    target, draft = machine.get("target_forward_ms", {}), machine.get("draft_forward_ms", {})
    if not target:
        return None
    ceilings = machine["perfect_draft_ceiling"]
    rows = sorted({int(key) for key in (*target, *draft)})
    cells = [
        [
            str(count),
            _number(target.get(str(count)), 2),
            _number(draft.get(str(count)), 3),
            _number(ceilings.get(str(count - 1)), 2, "x"),
        ]
        for count in rows
    ]
    parts = []
    if ceilings:
        best = max(ceilings, key=lambda k: ceilings[k])
        parts.append(f"Perfect drafts: at most {ceilings[best]:.2f}x, with {best} a round.")
    if machine.get("speed_ratio_C"):
        parts.append(f"Speed ratio C (target forward by draft forward, one row): {machine['speed_ratio_C']:.1f}.")
    columns = ("rows", "target ms", "draft ms", "perfect drafts")
    return TextTable("What the machine can do: one forward", columns, cells, " ".join(parts))


def notes(results: Mapping[str, Any]) -> list[str]:
    """What must be said before the numbers: inflated models, failures, an interruption."""
    found = [model["note"] for model in results["environment"]["models"].values() if model.get("note")]
    if results["interrupted"]:
        found.append("The benchmark was interrupted: rows marked (partial) lack generations.")
    rows = [row for row in results["rows"] if row["category"] == ALL_CATEGORIES]
    for row in rows:
        where = f"{label_of(row)}, {_title(row)}"
        if row["failed"]:
            found.append(f"{where}: {row['failed']} generations failed: {'; '.join(row['errors'])}")
        if row["degraded"]:
            found.append(f"{where}: a peer was missing for a part of {row['degraded']} generations.")
    return found


def _with_caption(tables: Sequence[TextTable], caption: str) -> list[TextTable]:
    """Once is enough: the last table carries it for all."""
    return [*tables[:-1], *(replace(table, caption=caption) for table in tables[-1:])]


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows over all categories that belong into one table, `off` first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["category"] == ALL_CATEGORIES:
            groups.setdefault(_title(row), []).append(row)
    return [(title, sorted(group, key=lambda row: row["method"] != OFF)) for title, group in groups.items()]


def _title(row: Row) -> str:
    parts = [f"temperature {row['temperature']:g}"]
    if row["concurrency"] != 1:
        parts.append(f"{row['concurrency']} generations at once")
    if row["rtt_ms"]:
        parts.append(f"round trip {row['rtt_ms']:g} ms")
    return ", ".join(parts)


def _speed_cells(row: Row) -> list[str]:
    label = label_of(row) + (" *" if row["best_setting"] else "") + (" (partial)" if row["partial"] else "")
    speedups = row["speedup_runs"]
    spread = f" ({min(speedups):.2f}–{max(speedups):.2f})" if len(speedups) > 1 else ""
    drafts = row["num_draft_tokens"] > 0
    index = row["median_first_difference"]
    parting = "" if index is None else f" ({index:.0f})"
    return [
        label,
        _number(row["output_throughput"], 1),
        NONE if row["method"] == OFF else _number(row["speedup_over_off"], 2, "x") + spread,
        _number(row["mean_acceptance_length"], 2),
        _percent(row["draft_acceptance_rate"]),
        _percent(row["hit_rate"]) if drafts else NONE,
        _percent(row["empty_chain_rate"]) if drafts else NONE,
        NONE if row["method"] == OFF else _percent(row["identical_to_off"]) + parting,
    ]


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return NONE if value is None else f"{value:.{digits}f}{unit}"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"
