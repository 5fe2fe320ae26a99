"""Pictures: speed-up, acceptance length, where a round's time goes, and what a forward costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; a benchmark often runs where there is no screen

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outrider_bench.experiment import OFF
from outrider_bench.statistics import Row, label_of
from outrider_cli.prompts import ALL_CATEGORIES

# Okabe and Ito, then Tol: to be told apart by everybody, in print as well. A method has its colour in every picture.
_COLOURS = {
    "speculative": "#0072B2",
    "pearl": "#E69F00",
    "retrieval": "#009E73",
    "speculative+retrieval": "#56B4E9",
    "pearl+retrieval": "#D55E00",
    "card": "#882255",
    "saguaro": "#44AA99",
    "double": "#AA4499",
    "spacelike": "#DDCC77",
    "best-first": "#332288",
    "best-first chain": "#8888CC",
    "auto": "#000000",
    "bare": "#999999",
    "hf-generate": "#CCCCCC",
    "hf-assisted": "#CC79A7",
    "hf-prompt-lookup": "#F0E442",
}
_PARTS = (
    ("forward", "target's forward", "#0072B2"),
    ("wait", "waiting for a draft", "#E69F00"),
    ("overhead", "all the rest", "#999999"),
)
_DPI = 130


def write_plots(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes every picture that there is something to draw for."""
    rows = [row for row in results["rows"] if row["category"] == ALL_CATEGORIES]
    # Load and distance are sweeps of their own; these pictures show one client next to its services.
    simple = [row for row in rows if row["concurrency"] == 1 and row["rtt_ms"] == 0] or rows
    figures = {
        "speedup": draw_speedup(simple),
        "acceptance_length": draw_acceptance(simple),
        "round_time": draw_rounds(simple),
        "forward_time": draw_forwards(results["machine"]),
    }
    written = []
    for name, figure in figures.items():
        if figure is not None:
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=_DPI)
            plt.close(figure)
            written.append(path)
    return written


def draw_speedup(rows: Sequence[Row]) -> Figure | None:
    """Speed-up over `off`, lines from the lowest to the highest repeat."""
    shown = [row for row in rows if row["method"] != OFF and row["speedup_over_off"]]
    if not shown:
        return None
    figure, axes = _bars(shown, "speedup_over_off", "{:.2f}", spread="speedup_runs")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("speed-up over off (1 = no gain)")
    axes.set_title("Output tokens a second, relative to off")
    return figure


def draw_acceptance(rows: Sequence[Row]) -> Figure | None:
    """Tokens a forward of the target commits."""
    shown = [row for row in rows if row["num_draft_tokens"] and row["mean_acceptance_length"]]
    if not shown:
        return None
    figure, axes = _bars(shown, "mean_acceptance_length", "{:.2f}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("tokens per forward of the target")
    axes.set_title("Acceptance length (the target's own token included)")
    return figure


def draw_rounds(rows: Sequence[Row]) -> Figure | None:
    """The medians of forward, wait and overhead on top of each other."""
    shown = [row for row in rows if row["forward_ms_p50"] is not None]
    if not shown:
        return None
    figure, axes = plt.subplots(figsize=(8, 1.6 + 0.34 * len(shown)), layout="constrained")
    left = [0.0] * len(shown)
    for name, label, colour in _PARTS:
        values = [row[f"{name}_ms_p50"] or 0.0 for row in shown]
        axes.barh(range(len(shown)), values, left=left, label=label, color=colour, height=0.7)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(shown)), [f"{label_of(row)}, T = {row['temperature']:g}" for row in shown])
    axes.invert_yaxis()
    axes.set_xlabel("ms per round (medians)")
    figure.suptitle("Where the time of a round goes")
    _finish(axes, axis="x", columns=3)
    return figure


def draw_forwards(machine: Mapping[str, Any]) -> Figure | None:
    """The cost of a forward by its rows, and the speed-up that perfect drafts would give at that cost."""
    target = {int(rows): time for rows, time in machine["target_forward_ms"].items()}
    ceilings = {int(k) + 1: value for k, value in machine["perfect_draft_ceiling"].items()}
    if not target:
        return None
    figure, (cost, ceiling) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    draft = {int(rows): time for rows, time in machine["draft_forward_ms"].items()}
    for name, times, colour in (("target", target, "#0072B2"), ("draft", draft, "#E69F00")):
        if times:
            cost.plot(list(times), list(times.values()), marker="o", label=name, color=colour)
    cost.set_yscale("log")
    cost.yaxis.set_major_formatter("{x:g}")
    cost.set_ylabel("ms per forward (median, log scale)")
    cost.set_title("Cost of a forward")
    _finish(cost, axis="both", columns=2)
    ceiling.plot(list(ceilings), list(ceilings.values()), color="#009E73")
    ceiling.set_ylabel("speed-up over one row a forward")
    ceiling.set_title("Ceiling: every drafted token accepted")
    ceiling.set_ylim(bottom=0)
    ceiling.grid(alpha=0.3)
    for axes in (cost, ceiling):
        axes.set_xlabel("rows in a forward (drafted tokens + 1)")
        axes.set_xticks([rows for rows in target if rows != 2])
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _bars(rows: Sequence[Row], field: str, text: str, spread: str = "") -> tuple[Figure, Axes]:
    """Groups of bars: a group for each temperature, a bar for each method, in its best setting."""
    temperatures = sorted({row["temperature"] for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows))
    found = {(row["method"], row["temperature"]): row for row in sorted(rows, key=lambda row: row["best_setting"])}
    several = {row["method"] for row in rows if row["best_setting"]}
    width = 0.84 / len(methods)
    size = (max(6.4, 0.42 * len(methods) * len(temperatures)), 4.6)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    for index, method in enumerate(methods):
        group = [(place, found[method, t]) for place, t in enumerate(temperatures) if (method, t) in found]
        places = [place + (index - (len(methods) - 1) / 2) * width for place, _ in group]
        values = [row[field] for _, row in group]
        label = f"{method} (best setting)" if method in several else method
        axes.bar(places, values, width * 0.92, label=label, color=_COLOURS.get(method, "#666666"))
        tops = values
        if spread:
            tops = [max(row[spread], default=row[field]) for _, row in group]
            below = [value - min(row[spread], default=value) for value, (_, row) in zip(values, group, strict=True)]
            above = [top - value for top, value in zip(tops, values, strict=True)]
            axes.errorbar(places, values, [below, above], fmt="none", ecolor="black", elinewidth=0.8)
        for place, top, value in zip(places, tops, values, strict=True):
            axes.text(place, top, text.format(value), ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(temperatures)), [f"T = {t:g}" for t in temperatures])
    axes.set_xlabel("sampling temperature")
    axes.margins(y=0.1)
    _finish(axes, axis="y", columns=min(4, len(methods)))
    return figure, axes


def _finish(axes: Axes, *, axis: Any, columns: int) -> None:
    """Grid, frame, and a legend below, where it covers nothing."""
    axes.set_axisbelow(True)
    axes.grid(axis=axis, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure = axes.get_figure(root=True)
    assert figure is not None
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
