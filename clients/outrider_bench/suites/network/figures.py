"""Pictures of the network suite: speed by round trip with the simulated bound, and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outrider_bench.plotting import BLACK, GREY, METHOD_COLOURS, SKY, draw_bars, draw_line, finish, new_figure
from outrider_bench.statistics import label_of
from outrider_cli.prompts import ALL_CATEGORIES


def figures_of(results: Mapping[str, Any]) -> dict[str, Figure | None]:
    """Draw every picture that there is something to draw for, named after its part."""
    return {"rtt": draw_round_trips(results), "bytes": draw_bytes(results)}


def draw_round_trips(results: Mapping[str, Any]) -> Figure | None:
    """Draw tokens a second by round trip, a panel for each temperature; the simulated bound as a broken line."""
    rows = [
        row
        for experiment in results["experiments"]
        if experiment["part"] == "rtt"
        for row in experiment["rows"]
        if row["category"] == ALL_CATEGORIES and row["output_throughput"]
    ]
    temperatures = sorted({row["temperature"] for row in rows})
    if not temperatures:
        return None
    bounds = {bound["temperature"]: bound for bound in results["bounds"]}
    figure, panels = new_figure(len(temperatures))
    for axes, temperature in zip(panels, temperatures, strict=True):
        of_temperature = [row for row in rows if row["temperature"] == temperature]
        for label in dict.fromkeys(map(label_of, of_temperature)):
            points = sorted(
                (row["rtt_ms"], row["output_throughput"]) for row in of_temperature if label_of(row) == label
            )
            draw_line(axes, points, label, METHOD_COLOURS.get(label, GREY))
        if temperature in bounds:
            _draw_bound(axes, bounds[temperature])
        finish(axes)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("round trip between verifier and speculator, ms")
        axes.set_ylabel("tokens a second")
        axes.set_title(f"T = {temperature:g}")
        axes.legend(frameon=False, fontsize=8)
    return figure


def draw_bytes(results: Mapping[str, Any]) -> Figure | None:
    """Draw bytes for each accepted token, and for each round, a panel for each temperature."""
    traffic: Sequence[Mapping[str, Any]] = results["traffic"]
    temperatures = sorted({each["temperature"] for each in traffic})
    if not temperatures:
        return None
    figure, panels = new_figure(2 * len(temperatures), width=5.4)
    kinds = [(t, name) for t in temperatures for name in ("per_accepted", "per_round")]
    for axes, (temperature, name) in zip(panels, kinds, strict=True):
        of_temperature = [each for each in traffic if each["temperature"] == temperature]
        values = {each["label"]: each[name] for each in of_temperature if each[name] is not None}
        colours = {label: METHOD_COLOURS.get(label.partition(" ")[0], SKY) for label in values}
        draw_bars(axes, values, colours, "{:.0f}")
        axes.set_ylabel("bytes for each accepted token" if name == "per_accepted" else "bytes for each round")
        axes.set_title(f"T = {temperature:g}")
    return figure


def _draw_bound(axes: Axes, bound: Mapping[str, Any]) -> None:
    points = [(point["rtt_ms"], point["tokens_per_s"]) for point in bound["points"]]
    draw_line(axes, points, "simulated bound", BLACK, linestyle="--", marker="")
