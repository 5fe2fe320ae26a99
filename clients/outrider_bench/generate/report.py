"""The report of `generate`: speed, categories, latency, rounds, and the potential of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from outrider_bench.experiment import OFF
from outrider_bench.report import NONE, Chapter, Report, Table, environment_lines, number_cell, percent_cell, run_line
from outrider_bench.statistics import Row, label_of
from outrider_cli.prompts import ALL_CATEGORIES

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
    "Rows are not exact here: a forward of several rows rounds differently from one of a single row, so two texts may "
    "part where two tokens are equally probable up to rounding."
)
LATENCY_CAPTION = (
    "Milliseconds. TTFT: time to the first token, prefill included. TPOT: time per output token after the first "
    "arrival. ITL: time between two arrivals; a round's tokens arrive together. E2E: the whole generation; of an "
    "answer that comes whole nothing else is known."
)
ROUND_CAPTION = (
    "Milliseconds; medians over the rounds of each generation, then over the generations. They need not add up: the "
    "median of a sum is not the sum of the medians. draft latency: from a commit sent to the first draft that answers "
    "it; draft forward: the part of it that the draft model's own forwards took, as the speculator reports it."
)


def report_of(results: Mapping[str, Any]) -> Report:
    """Makes the report of what results.json keeps."""
    chapters = [
        Chapter(table.title[0].upper() + table.title[1:], [replace(table, title="")]) for table in tables_of(results)
    ]
    return Report("Benchmark", _environment(results), notes_of(results), chapters)


def tables_of(results: Mapping[str, Any]) -> list[Table]:
    """Makes all tables, in the order in which they are read."""
    rows = results["rows"]
    target = results["environment"]["models"].get("target", {})
    machine = machine_table(results["machine"])
    tables = [
        *speed_tables(rows, is_exact=not target.get("exact_off_reason")),
        *category_tables(rows),
        *latency_tables(rows),
        *round_tables(rows),
    ]
    return [*tables, *([machine] if machine else [])]


def _environment(results: Mapping[str, Any]) -> list[str]:
    environment, config = results["environment"], results["config"]
    pinning = environment["pinning"]
    cores = "not pinned"
    if pinning:
        cores = f"target on core {pinning['target']}, all others on core {pinning['everything_else']}, one thread each"
    lines = [run_line(config)]
    for role, model in environment["models"].items():
        size = f", {model['num_parameters'] / 1e6:.1f} M parameters" if model.get("num_parameters") else ""
        inflated = ", cost inflated" if model.get("inflated") else ""
        rows = f", rows NOT EXACT: {reason}" if (reason := model.get("exact_off_reason")) else ""
        lines.append(f"{role} model: {model['model_id']}{size}, {model.get('dtype', 'dtype unknown')}{inflated}{rows}")
    return environment_lines(results, *lines, pinning=cores)


def speed_tables(rows: Sequence[Row], *, is_exact: bool) -> list[Table]:
    """Makes a table of speeds for each temperature, concurrency and round-trip time."""
    columns = ("method", "tok/s", "x off", "tokens/forward", "kept", "hits", "empty", "same")
    tables = [Table(title, columns, [_speed_cells(row) for row in group]) for title, group in _groups(rows)]
    caption = SPEED_CAPTION if is_exact else f"{SPEED_CAPTION} {ROUNDING_CAPTION}"
    return _with_caption(tables, caption)


def latency_tables(rows: Sequence[Row]) -> list[Table]:
    """Makes tables of what a user waits for."""
    columns = ("method", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "ITL p50", "ITL p99", "E2E p50", "E2E p99")
    names = ("ttft", "tpot", "itl", "e2el")
    tables = []
    for title, group in _groups(rows):
        cells = [
            [label_of(row), *(number_cell(row[f"{part}_{name}_ms"], 1) for name in names for part in ("median", "p99"))]
            for row in group
        ]
        tables.append(Table(f"Latency in ms, {title}", columns, cells))
    return _with_caption(tables, LATENCY_CAPTION)


def round_tables(rows: Sequence[Row]) -> list[Table]:
    """Makes tables of how the time of a round is spent, for the methods that report it."""
    columns = ("method", "round", "forward", "wait", "overhead", "draft latency", "draft forward")
    names = ("round", "forward", "wait", "overhead", "draft_latency", "draft_forward")
    tables = []
    for title, group in _groups(rows):
        known = [row for row in group if row["round_ms_p50"] is not None]
        cells = [[label_of(row), *(number_cell(row[f"{name}_ms_p50"], 2) for name in names)] for row in known]
        if cells:
            tables.append(Table(f"A round, {title}", columns, cells))
    return _with_caption(tables, ROUND_CAPTION)


def category_tables(rows: Sequence[Row]) -> list[Table]:
    """Makes tables of the speed-up for each category."""
    categories = list(dict.fromkeys(row["category"] for row in rows if row["category"] != ALL_CATEGORIES))
    tables = []
    for title, group in _groups(rows):
        found = {(label_of(row), row["category"]): row["speedup_over_off"] for row in rows if _title(row) == title}
        labels = [label_of(row) for row in group if row["method"] != OFF]
        cells = [[label, *(number_cell(found.get((label, name)), 2, "x") for name in categories)] for label in labels]
        if any(_title(row) == title for row in rows if row["category"] != ALL_CATEGORIES):
            tables.append(Table(f"Speed-up by category, {title}", ("method", *categories), cells))
    return tables


def machine_table(machine: Mapping[str, Any]) -> Table | None:
    """Makes the table of the cost of one forward, and of what perfect drafts could win."""
    target, draft = machine.get("target_forward_ms", {}), machine.get("draft_forward_ms", {})
    if not target:
        return None
    ceilings = machine["perfect_draft_ceiling"]
    rows = sorted({int(key) for key in (*target, *draft)})
    cells = [
        [
            str(count),
            number_cell(target.get(str(count)), 2),
            number_cell(draft.get(str(count)), 3),
            number_cell(ceilings.get(str(count - 1)), 2, "x"),
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
    return Table("What the machine can do: one forward", columns, cells, " ".join(parts))


def notes_of(results: Mapping[str, Any]) -> list[str]:
    """Says what must be known before the numbers: inflated models, failures, an interruption."""
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


def _with_caption(tables: Sequence[Table], caption: str) -> list[Table]:
    """Puts a caption only below the last table."""
    return [*tables[:-1], *(replace(table, caption=caption) for table in tables[-1:])]


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Groups the rows over all categories that belong into one table, `off` first."""
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
        number_cell(row["output_throughput"], 1),
        NONE if row["method"] == OFF else number_cell(row["speedup_over_off"], 2, "x") + spread,
        number_cell(row["mean_acceptance_length"], 2),
        percent_cell(row["draft_acceptance_rate"]),
        percent_cell(row["hit_rate"]) if drafts else NONE,
        percent_cell(row["empty_chain_rate"]) if drafts else NONE,
        NONE if row["method"] == OFF else percent_cell(row["identical_to_off"]) + parting,
    ]
