"""Experiments to tables: one line for each contender and temperature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider_bench.experiment import OFF
from outrider_bench.statistics import Row, label_of
from outrider_bench.tables import NONE, TextTable
from outrider_cli.prompts import ALL_CATEGORIES

COLUMNS = ("method", "T", "tok/s", "x off", "tok/forward", "accepted", "kept", "hits", "empty", "wait ms", "same")
CAPTION = (
    "tok/s: output tokens by wall time at the client, prefill included; median of the repeats. x off: median (lowest "
    "to highest) of the ratio to off in the same repeat. tok/forward: tokens committed by one forward of the target, "
    "its own included. accepted: drafted tokens kept, of those compared with the target's; kept: of all that were "
    "verified. hits: next tokens that the draft tree already had. empty: rounds without a draft. wait: for a draft, "
    "median of the rounds. same: texts with the very token ids of off; in bfloat16 two texts may part where two tokens "
    "are equally probable up to rounding, and under the ratio rule they do."
)
CLAIM_COLUMNS = ("measured", "value", "asked", "verdict", "remark")
_COMPARISONS = {">=": "≥", "<=": "≤", ">": ">", "<": "<", "": ""}


def experiment_table(experiment: Mapping[str, Any]) -> TextTable:
    """An experiment; where its prompts are of several kinds, each kind by itself and not all together."""
    rows: Sequence[Row] = experiment["rows"]
    categories = {row["category"] for row in rows} - {ALL_CATEGORIES}
    shown = [row for row in rows if (row["category"] == ALL_CATEGORIES) == (not categories)]
    if not categories:
        return TextTable(experiment["title"], COLUMNS, [_cells(row) for row in shown])
    # Kinds apart, each with its temperatures.
    shown = sorted(shown, key=lambda row: (row["category"], row["temperature"]))
    columns = ("prompts", *COLUMNS)
    return TextTable(experiment["title"], columns, [[row["category"], *_cells(row)] for row in shown])


def origins_table(experiment: Mapping[str, Any]) -> TextTable | None:
    """Where the accepted tokens came from; None = all from the draft model."""
    if {name for row in experiment["rows"] for name in row["accepted_by_source"]} <= {"draft"}:
        return None
    return _shares_table(experiment, "accepted_by_source", "where accepted tokens came from")


def decisions_table(experiment: Mapping[str, Any]) -> TextTable | None:
    """What auto chose, in shares of its rounds; None = it chose nothing, or took no part."""
    return _shares_table(experiment, "decisions", "what auto chose, in rounds")


def _shares_table(experiment: Mapping[str, Any], field: str, title: str) -> TextTable | None:
    rows = [row for row in experiment["rows"] if row["category"] == ALL_CATEGORIES and sum(row[field].values())]
    names = list(dict.fromkeys(name for row in rows for name in row[field]))
    if not names:
        return None
    cells = []
    for row in rows:
        total = sum(row[field].values())
        shares = [_percent(row[field][name] / total) if name in row[field] else NONE for name in names]
        cells.append([label_of(row), f"{row['temperature']:g}", *shares])
    return TextTable(f"{experiment['title']}: {title}", ("method", "T", *names), cells)


def claims_table(claims: Sequence[Mapping[str, Any]]) -> TextTable:
    """Claims beside what was asked."""
    return TextTable("", CLAIM_COLUMNS, [_claim_cells(claim) for claim in claims])


def degraded_notes(experiment: Mapping[str, Any]) -> list[str]:
    """Which contenders lacked a peer."""
    return [
        f"{experiment['title']}, {label_of(row)}, T = {row['temperature']:g}: a peer was missing for a part of "
        f"{row['degraded']} generations"
        for row in experiment["rows"]
        if row["category"] == ALL_CATEGORIES and row["degraded"]
    ]


def _cells(row: Row) -> list[str]:
    speedups = row["speedup_runs"]
    spread = f" ({min(speedups):.2f}–{max(speedups):.2f})" if len(speedups) > 1 else ""
    is_off = row["method"] == OFF
    drafts = row["num_draft_tokens"] > 0
    return [
        label_of(row) + (" (partial)" if row["partial"] else ""),
        f"{row['temperature']:g}",
        _number(row["output_throughput"] or None, 1),
        NONE if is_off else _number(row["speedup_over_off"], 2) + spread,
        _number(row["mean_acceptance_length"], 2),
        _percent(row["acceptance"]) if drafts else NONE,
        _percent(row["draft_acceptance_rate"]) if drafts else NONE,
        _percent(row["hit_rate"]) if drafts else NONE,
        _percent(row["empty_chain_rate"]) if drafts else NONE,
        NONE if is_off else _number(row["wait_ms_p50"], 1),
        NONE if is_off else _percent(row["identical_to_off"]),
    ]


def _claim_cells(claim: Mapping[str, Any]) -> list[str]:
    asked = claim["asked"]
    wanted = f"{_COMPARISONS[claim['comparison']]} {asked:.2f}" if asked is not None else ""
    return [claim["what"], _number(claim["measured"], 3), wanted, claim["verdict"], claim["remark"]]


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"
