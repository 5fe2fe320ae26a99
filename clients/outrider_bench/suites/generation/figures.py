"""Pictures of the generation suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from outrider_bench.plotting import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    draw_by_temperature,
    draw_legend_below,
    draw_level,
    draw_line,
    draw_speedup,
    finish,
    new_figure,
)
from outrider_bench.statistics import Row, label_of
from outrider_cli.prompts import ALL_CATEGORIES

_SHARES = (
    ("forward", "target's forward", BLUE),
    ("wait", "waiting for a draft", ORANGE),
    ("overhead", "all the rest", GREY),
)


def figures_of(results: Mapping[str, Any]) -> dict[str, Figure | None]:
    """Draw every picture that there is something to draw for."""
    rows = [row for row in results["rows"] if row["category"] == ALL_CATEGORIES]
    # Load and distance are sweeps of their own; these pictures show one client next to its services.
    simple = [row for row in rows if row["concurrency"] == 1 and row["rtt_ms"] == 0] or rows
    return {
        "speedup": draw_speedup(simple),
        "acceptance_length": draw_acceptance(simple),
        "round_time": draw_rounds(simple),
        "forward_time": draw_forwards(results["machine"]),
    }


def draw_acceptance(rows: Sequence[Row]) -> Figure | None:
    """Draw the tokens that one forward of the target commits."""
    shown = [row for row in rows if row["num_draft_tokens"] and row["mean_acceptance_length"]]
    if not shown:
        return None
    figure, axes = draw_by_temperature(shown, "mean_acceptance_length")
    draw_level(axes)
    axes.set_ylabel("tokens per forward of the target")
    axes.set_title("Acceptance length (the target's own token included)")
    return figure


def draw_rounds(rows: Sequence[Row]) -> Figure | None:
    """Draw the medians of forward, wait and overhead on top of each other."""
    shown = [row for row in rows if row["forward_ms_p50"] is not None]
    if not shown:
        return None
    figure, (axes,) = new_figure(width=8, height=1.6 + 0.34 * len(shown))
    left = [0.0] * len(shown)
    for name, label, colour in _SHARES:
        values = [row[f"{name}_ms_p50"] or 0.0 for row in shown]
        axes.barh(range(len(shown)), values, left=left, label=label, color=colour, height=0.7)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(shown)), [f"{label_of(row)}, T = {row['temperature']:g}" for row in shown])
    axes.invert_yaxis()
    axes.set_xlabel("ms per round (medians)")
    figure.suptitle("Where the time of a round goes")
    finish(axes, "x")
    draw_legend_below(axes, 3)
    return figure


def draw_forwards(machine: Mapping[str, Any]) -> Figure | None:
    """Draw the cost of a forward by its rows, and the speed-up that perfect drafts would give at that cost."""
    target = {int(rows): time for rows, time in machine["target_forward_ms"].items()}
    ceilings = {int(k) + 1: value for k, value in machine["perfect_draft_ceiling"].items()}
    if not target:
        return None
    figure, (cost, ceiling) = new_figure(2, width=5, height=4)
    draft = {int(rows): time for rows, time in machine["draft_forward_ms"].items()}
    for name, times, colour in (("target", target, BLUE), ("draft", draft, ORANGE)):
        if times:
            draw_line(cost, list(times.items()), name, colour)
    cost.set_yscale("log")
    cost.yaxis.set_major_formatter("{x:g}")
    cost.set_ylabel("ms per forward (median, log scale)")
    cost.set_title("Cost of a forward")
    draw_legend_below(cost, 2)
    ceiling.plot(list(ceilings), list(ceilings.values()), color=GREEN)
    ceiling.set_ylabel("speed-up over one row a forward")
    ceiling.set_title("Ceiling: every drafted token accepted")
    ceiling.set_ylim(bottom=0)
    for axes in (cost, ceiling):
        axes.set_xlabel("rows in a forward (drafted tokens + 1)")
        axes.set_xticks([rows for rows in target if rows != 2])
        finish(axes, "both")
    return figure
