"""One layer of pictures: matplotlib set up once, one palette, and the shapes that suites draw with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; a benchmark often runs where there is no screen

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from outrider.core.methods import METHODS
from outrider_bench.experiment import LLAMA_CPP, OFF
from outrider_bench.statistics import Row, label_of
from outrider_cli.prompts import ALL_CATEGORIES

# Okabe and Ito's palette: people of every colour vision can tell these apart, in print as well.
BLUE, ORANGE, GREEN, RED, SKY, PINK, GREY, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#999999",
    "#000000",
)
PALETTE = (BLUE, ORANGE, GREEN, RED, SKY, PINK)
METHOD_COLOURS = {
    **{method.name: method.colour for method in METHODS.values()},
    "pearl+retrieval": "#B37400",
    "speculative+retrieval": SKY,
    "best-first chain": "#8888CC",
    "bare": "#BBBBBB",
    "hf-generate": "#CCCCCC",
    "hf-assisted": "#AA4499",
    "hf-prompt-lookup": "#F0E442",
    LLAMA_CPP: BLACK,
}
_DPI = 130
_MANY_DECADES = 500.0
"""Ratio of the ends of a logarithmic axis from which on it has few labels."""


def write_figures(figures: Mapping[str, Figure | None], folder: Path) -> list[Path]:
    """Write every picture that there was something to draw for, under its name."""
    written = []
    for name, figure in figures.items():
        if figure is not None:
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=_DPI)
            # pyplot keeps every figure that it has made until it is closed.
            plt.close(figure)
            written.append(path)
    return written


def new_figure(num_panels: int = 1, width: float = 6.4, height: float = 4.4) -> tuple[Figure, list[Axes]]:
    """Make a figure with panels side by side; `width` is that of one panel, in inches."""
    # Without `squeeze=False` a single panel would come as such, not as an array of one.
    figure, panels = plt.subplots(1, num_panels, figsize=(width * num_panels, height), squeeze=False)
    figure.set_layout_engine("constrained")
    return figure, list(panels[0])


def stacked_figure(width: float, height: float, ratios: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Make a figure with panels one below the other, on the same x axis."""
    figure, panels = plt.subplots(
        len(ratios), 1, figsize=(width, height), sharex=True, height_ratios=list(ratios), squeeze=False
    )
    figure.set_layout_engine("constrained")
    return figure, [row[0] for row in panels]


def draw_bars(axes: Axes, values: Mapping[str, float], colours: Mapping[str, str], text: str = "{:.2f}") -> None:
    """Draw a bar for each name, with its value above."""
    names = list(values)
    axes.bar(range(len(names)), list(values.values()), 0.7, color=[colours.get(name, SKY) for name in names])
    for place, value in enumerate(values.values()):
        axes.text(place, value, text.format(value), ha="center", va="bottom", fontsize=8)
    is_crowded = len(names) > 3
    axes.set_xticks(range(len(names)), names, rotation=25 if is_crowded else 0, ha="right" if is_crowded else "center")
    axes.margins(y=0.12)
    finish(axes)


def draw_groups(
    axes: Axes,
    groups: Sequence[str],
    bars: Mapping[str, Sequence[float | None]],
    colours: Mapping[str, str],
    ranges: Mapping[str, Sequence[tuple[float, float] | None]] | None = None,
    *,
    legend_below: bool = False,
) -> None:
    """Draw groups of bars, with their values above.

    Args:
        axes: The panel.
        groups: Names below the groups.
        bars: For each name a value in each group; None means no bar.
        colours: By name.
        ranges: The lowest and the highest value behind each bar, drawn as a line.
        legend_below: Put the legend below the panel: many bars leave no place in it.
    """
    width = 0.84 / max(1, len(bars))
    for index, (name, values) in enumerate(bars.items()):
        known = [(place, value) for place, value in enumerate(values) if value is not None]
        # Side by side, the middle of them above the group's name.
        places = [place + (index - (len(bars) - 1) / 2) * width for place, _ in known]
        axes.bar(places, [value for _, value in known], width * 0.92, label=name, color=colours.get(name, SKY))
        spreads = [(ranges[name][place] if ranges else None) or (value, value) for place, value in known]
        if ranges:
            # errorbar takes distances from the value, not the ends of the range.
            below = [value - low for (low, _), (_, value) in zip(spreads, known, strict=True)]
            beyond = [high - value for (_, high), (_, value) in zip(spreads, known, strict=True)]
            heights = [value for _, value in known]
            axes.errorbar(places, heights, [below, beyond], fmt="none", ecolor="black", elinewidth=0.8)
        for at, (_, high), (_, value) in zip(places, spreads, known, strict=True):
            axes.text(at, high, f"{value:.2f}", ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.margins(y=0.12)
    finish(axes)
    if legend_below:
        draw_legend_below(axes, min(4, len(bars)))
    else:
        axes.legend(frameon=False, fontsize=8)


def draw_line(axes: Axes, points: Sequence[tuple[float, float]], label: str, colour: str, **style: Any) -> Any:
    """Draw a line through points, with a mark on each. Return the line."""
    x, y = zip(*points, strict=True)
    return axes.plot(x, y, label=label, color=colour, **({"marker": "o"} | style))[0]


def draw_by_concurrency(axes: Axes, rows: Sequence[Row], title: str, prefix: str = "") -> None:
    """Draw the speed-up over `off` of each contender by generations at once; labels without the prefix."""
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row["category"] == ALL_CATEGORIES and row["method"] != OFF and row["speedup_over_off"]:
            lines[label_of(row)].append((row["concurrency"], row["speedup_over_off"]))
    for number, (label, points) in enumerate(lines.items()):
        colour = METHOD_COLOURS.get(label, PALETTE[number % len(PALETTE)])
        draw_line(axes, sorted(points), label.removeprefix(prefix), colour)
    draw_level(axes)
    finish(axes)
    counts = sorted({row["concurrency"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("generations at once")
    axes.set_ylabel("speed-up over off at the same number")
    axes.set_title(title)
    axes.legend(frameon=False, fontsize=8, ncols=2)


def draw_level(axes: Axes, value: float = 1.0) -> None:
    """Draw a thin line across the panel where nothing is gained and nothing lost."""
    axes.axhline(value, color="black", linewidth=0.8)


def two_axes(axes: Axes, left: Any, right_axes: Axes, right: Any) -> None:
    """Finish a panel with an axis on each side: both begin at zero, their lines share one legend."""
    finish(axes)
    for panel in (axes, right_axes):
        panel.set_ylim(0, 1.15 * panel.get_ylim()[1])
    right_axes.spines["top"].set_visible(False)
    axes.legend(handles=[left, right], frameon=False, fontsize=8)


def finish(axes: Axes, grid: Any = "y") -> None:
    """Draw grid and frame."""
    axes.set_axisbelow(True)
    axes.grid(axis=grid, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw_legend_below(axes: Axes, num_columns: int) -> None:
    """Draw the legend below the figure, where it covers nothing."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    handles, labels = axes.get_legend_handles_labels()
    # "outside" is for figures with a constrained layout only, which makes room for it.
    figure.legend(handles, labels, loc="outside lower center", ncols=num_columns, frameon=False, fontsize=8)


def scale_logarithmically(set_scale: Callable[[str], None], axis: Axis) -> None:
    """Scale an axis with labels at 1, 2 and 5 of each power of ten; over many powers at 1 alone. To be called last."""
    set_scale("log")
    low, high = axis.get_view_interval()
    # Labels of 2 and 5 would overlap where a decade is narrow.
    subs = (1.0, 2.0, 5.0) if high < _MANY_DECADES * low else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())  # else matplotlib labels minor ticks too, where an axis is short


def draw_by_temperature(rows: Sequence[Row], field: str, spread: str = "") -> tuple[Figure, Axes]:
    """Draw a group of bars for each temperature, a bar for each method, in its best setting.

    Args:
        rows: One for each method, setting and temperature.
        field: The field that is shown.
        spread: The field with its values by repeat; empty means that no range is drawn.
    """
    temperatures = sorted({row["temperature"] for row in rows})
    # The best setting comes last in this order, and a dict keeps the last.
    found = {(row["method"], row["temperature"]): row for row in sorted(rows, key=lambda row: row["best_setting"])}
    several = {row["method"] for row in rows if row["best_setting"]}
    methods = list(dict.fromkeys(row["method"] for row in rows))
    names = {name: f"{name} (best setting)" if name in several else name for name in methods}
    shown = {name: [found.get((name, temperature)) for temperature in temperatures] for name in methods}
    bars = {names[name]: [row[field] if row else None for row in group] for name, group in shown.items()}
    colours = {names[name]: METHOD_COLOURS.get(name, "#666666") for name in methods}
    ranges: dict[str, list[tuple[float, float] | None]] = {
        names[name]: [(min(row[spread]), max(row[spread])) if row and row[spread] else None for row in group]
        for name, group in (shown if spread else {}).items()
    }
    figure, (axes,) = new_figure(width=max(6.4, 0.46 * len(methods) * len(temperatures)), height=4.6)
    groups = [f"T = {temperature:g}" for temperature in temperatures]
    draw_groups(axes, groups, bars, colours, ranges or None, legend_below=True)
    axes.set_xlabel("sampling temperature")
    return figure, axes


def draw_speedup(rows: Sequence[Row]) -> Figure | None:
    """Draw the speed-up over `off`, with lines from the lowest to the highest repeat."""
    shown = [row for row in rows if row["method"] != OFF and row["speedup_over_off"]]
    if not shown:
        return None
    figure, axes = draw_by_temperature(shown, "speedup_over_off", spread="speedup_runs")
    draw_level(axes)
    axes.set_ylabel("speed-up over off (1 = no gain)")
    axes.set_title("Output tokens a second, relative to off")
    return figure


def rows_by_label(experiment: Mapping[str, Any], temperature: float) -> dict[str, Row]:
    """Select the rows of an experiment over all its prompts, at one temperature, by contender."""
    rows = [
        row for row in experiment["rows"] if row["category"] == ALL_CATEGORIES and row["temperature"] == temperature
    ]
    return {label_of(row): row for row in rows if row["completed"]}


def points_of(rows: Mapping[str, Row], prefix: str, field: str) -> list[tuple[float, float]]:
    """Make a point of each contender whose label is the prefix and a number: the number, and a field of its row."""
    found = [(float(label.removeprefix(prefix)), row[field]) for label, row in rows.items() if label.startswith(prefix)]
    return sorted((number, value) for number, value in found if value is not None)
