"""Pictures of what the papers vary: fan-out and C, the beam's width, the prior's size, use, rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from outrider_bench.plotting import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    draw_bars,
    draw_groups,
    draw_line,
    finish,
    new_figure,
    points_of,
    rows_by_label,
    two_axes,
)
from outrider_bench.suites.methods.plan import DRAFT_C2_5
from outrider_bench.suites.methods.replay import NEAR, NEW

Experiments = Mapping[str, Mapping[str, Any]]
_FAN_OUT_COLOURS = (BLUE, GREY, GREEN, ORANGE, "#8cc5a2", "#f2bf8c")
"""Pairs of shapes: with shared noise, and paler without."""


def draw_saguaro(experiments: Experiments, _: Mapping[str, Any]) -> Figure | None:
    """Hit rates by fan-out, and what SAGUARO sampling trades for them."""
    if "saguaro-fan-out" not in experiments:
        return None
    figure, (bars, curve) = new_figure(2)
    experiment = experiments["saguaro-fan-out"]
    temperatures = sorted({row["temperature"] for row in experiment["rows"]})
    by_temperature = [rows_by_label(experiment, t) for t in temperatures]
    labels = dict.fromkeys(label for rows in by_temperature for label in rows)
    rates = {
        label.removeprefix("saguaro "): [rows[label]["hit_rate"] if label in rows else None for rows in by_temperature]
        for label in labels
    }
    draw_groups(bars, [f"T = {t:g}" for t in temperatures], rates, dict(zip(rates, _FAN_OUT_COLOURS, strict=False)))
    bars.set_ylabel("hit rate")
    bars.set_title("Fan-out, at the same budget")
    rows = rows_by_label(experiments["saguaro-bias"], 1.0) if "saguaro-bias" in experiments else {}
    for field, label, colour in (("hit_rate", "hit rate", BLUE), ("acceptance", "acceptance", ORANGE)):
        if points := points_of(rows, "saguaro C = ", field):
            draw_line(curve, points, label, colour)
    finish(curve)
    curve.set_xlabel("C: factor of the likeliest draft tokens' probabilities")
    curve.set_ylabel("share")
    curve.set_ylim(0, 1)
    curve.set_title("SAGUARO sampling, ratio rule, T = 1")
    if rows:
        curve.legend(frameon=False, fontsize=8)
    return figure


def draw_card(experiments: Experiments, _: Mapping[str, Any]) -> Figure | None:
    """The ablation, and the width of the beam: hit rate on one side, speed on the other."""
    if "card-width" not in experiments or "card" not in experiments:
        return None
    figure, (bars, curve) = new_figure(2)
    temperatures = sorted({row["temperature"] for row in experiments["card"]["rows"]})
    by_temperature = [rows_by_label(experiments["card"], t) for t in temperatures]
    labels = {"off": "off", "card query only": "query only", "card": "query and correct"}
    speeds = {
        name: [rows[label]["output_throughput"] if label in rows else None for rows in by_temperature]
        for label, name in labels.items()
    }
    draw_groups(
        bars, [f"T = {t:g}" for t in temperatures], speeds, dict(zip(speeds, (GREY, ORANGE, BLUE), strict=True))
    )
    bars.set_ylabel("tokens a second")
    bars.set_title("Cache and correction")
    rows = rows_by_label(experiments["card-width"], 0.0)
    hits = points_of(rows, "card K = ", "hit_rate")
    if hits:
        left = draw_line(curve, hits, "hit rate", BLUE)
        right_axes = curve.twinx()
        right = draw_line(right_axes, points_of(rows, "card K = ", "output_throughput"), "tokens a second", ORANGE)
        right_axes.set_ylabel("tokens a second")
        two_axes(curve, left, right_axes, right)
    curve.set_xlabel("K: candidates of a layer")
    curve.set_ylabel("hit rate")
    curve.set_title("Width of the beam, T = 0")
    return figure


def draw_double(experiments: Experiments, results: Mapping[str, Any]) -> Figure | None:
    """Double and its ablations over the ceiling C, and what more prior brings."""
    if "double" not in experiments:
        return None
    figure, (bars, curve) = new_figure(2, width=7)
    rows = rows_by_label(experiments["double"], 0.0)
    values = {
        label.removeprefix("double ").replace(" ", "\n", 1): row["speedup_over_off"]
        for label, row in rows.items()
        if row["speedup_over_off"] and label != "off"
    }
    draw_bars(bars, values, {"pearl": ORANGE, "double": BLUE})
    ceiling = results["speed_ratios"].get(DRAFT_C2_5)
    if ceiling:
        bars.axhline(ceiling, color=RED, linestyle="--", label=f"C = {ceiling:.2f}")
        bars.legend(frameon=False, fontsize=8)
    bars.set_ylabel("speed-up over off")
    bars.set_title("Double, and double without one of its parts, T = 0")
    sizes = [(0.0, rows, "double no prior"), (100.0, rows, "double")]
    for name, one in experiments.items():
        if name.startswith("double-prior-"):
            sizes.append((100 * one["prior_share"], rows_by_label(one, 0.0), "double"))
    speeds = [
        (share, those[label]["output_throughput"] / those["pearl"]["output_throughput"])
        for share, those, label in sizes
        if label in those and "pearl" in those
    ]
    if speeds:
        draw_line(curve, sorted(speeds), "double", BLUE)
    finish(curve)
    curve.set_xlabel("% of the prior")
    curve.set_ylabel("tokens a second by those of pearl")
    curve.set_title("Size of the prior")
    return figure


def draw_spacelike(_: Experiments, results: Mapping[str, Any]) -> Figure | None:
    """Speed-up over the requests."""
    replay = results["replay"]
    if replay is None:
        return None
    figure, (axes,) = new_figure(width=8)
    for category, colour in ((NEW, GREY), (NEAR, GREEN)):
        found = [(number + 1, speedup) for number, kind, speedup in replay["requests"] if kind == category]
        if found:
            numbers, speedups = zip(*found, strict=True)
            axes.scatter(numbers, speedups, s=9, color=colour, label=category, alpha=0.7)
    if replay["points"]:
        draw_line(axes, [(number, speedup) for number, speedup in replay["points"]], "all of the last few", BLUE)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xlabel("requests so far")
    axes.set_ylabel("speed-up over off")
    axes.set_ylim(bottom=0)
    axes.set_title("A service that is used")
    finish(axes)
    axes.legend(frameon=False, fontsize=8)
    return figure


def draw_rows(experiments: Experiments, _: Mapping[str, Any]) -> Figure | None:
    """What more rows bring, and what they cost; the chain as a level."""
    rows = rows_by_label(experiments["rows"], 1.0) if "rows" in experiments else {}
    prefix = "best-first rows = "
    lengths = points_of(rows, prefix, "mean_acceptance_length")
    if not lengths:
        return None
    figure, (axes,) = new_figure()
    left = draw_line(axes, lengths, "tokens per forward, sub-tree", BLUE)
    right_axes = axes.twinx()
    right = draw_line(right_axes, points_of(rows, prefix, "output_throughput"), "tokens a second, sub-tree", ORANGE)
    if "best-first chain" in rows:
        chain = rows["best-first chain"]
        axes.axhline(chain["mean_acceptance_length"], color=BLUE, linestyle=":")
        right_axes.axhline(chain["output_throughput"], color=ORANGE, linestyle=":")
    right_axes.set_ylabel("tokens a second")
    two_axes(axes, left, right_axes, right)
    axes.set_xlabel("rows of a sub-tree (dotted: one chain)")
    axes.set_ylabel("tokens per forward of the target")
    axes.set_title("Rows of a target forward, T = 1")
    return figure
