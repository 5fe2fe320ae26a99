"""What the pictures have in common: colours, bars, frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; a benchmark often runs where there is no screen

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outrider_bench.statistics import Row, label_of

# Okabe and Ito: to be told apart by everybody, in print as well.
BLUE, ORANGE, GREEN, RED, SKY, PINK, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#56B4E9",
    "#CC79A7",
    "#999999",
)
DPI = 130


def new_figure(num_panels: int = 1, width: float = 6.4) -> tuple[Figure, list[Axes]]:
    """A figure with panels side by side."""
    figure, panels = plt.subplots(1, num_panels, figsize=(width * num_panels, 4.4), squeeze=False)
    figure.set_layout_engine("constrained")
    return figure, list(panels[0])


def draw_bars(axes: Axes, values: Mapping[str, float], colours: Mapping[str, str], text: str = "{:.2f}") -> None:
    """A bar for each name, with its value above."""
    names = list(values)
    axes.bar(range(len(names)), list(values.values()), 0.7, color=[colours.get(name, SKY) for name in names])
    for place, value in enumerate(values.values()):
        axes.text(place, value, text.format(value), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(
        range(len(names)), names, rotation=25 if len(names) > 3 else 0, ha="right" if len(names) > 3 else "center"
    )
    axes.margins(y=0.12)
    finish(axes)


def draw_groups(
    axes: Axes, groups: Sequence[str], bars: Mapping[str, Sequence[float | None]], colours: Mapping[str, str]
) -> None:
    """Groups of bars: `bars` has for each name a value in each group; None = no bar."""
    width = 0.84 / max(1, len(bars))
    for index, (name, values) in enumerate(bars.items()):
        known = [(place, value) for place, value in enumerate(values) if value is not None]
        places = [place + (index - (len(bars) - 1) / 2) * width for place, _ in known]
        axes.bar(places, [value for _, value in known], width * 0.92, label=name, color=colours.get(name, SKY))
        for place, (_, value) in zip(places, known, strict=True):
            axes.text(place, value, f"{value:.2f}", ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.margins(y=0.12)
    finish(axes)
    axes.legend(frameon=False, fontsize=8)


def draw_line(axes: Axes, points: Sequence[tuple[float, float]], label: str, colour: str) -> Any:
    """A line through points, with a mark on each."""
    x, y = zip(*points, strict=True)
    return axes.plot(x, y, marker="o", label=label, color=colour)[0]


def two_axes(axes: Axes, left: Any, right_axes: Axes, right: Any) -> None:
    """One legend for the lines of a panel that has an axis on each side, which both begin at zero."""
    finish(axes)
    for panel in (axes, right_axes):
        panel.set_ylim(0, 1.15 * panel.get_ylim()[1])
    right_axes.spines["top"].set_visible(False)
    axes.legend(handles=[left, right], frameon=False, fontsize=8)


def finish(axes: Axes) -> None:
    """Grid and frame."""
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def rows_by_label(experiment: Mapping[str, Any], temperature: float) -> dict[str, Row]:
    """The rows of an experiment over all its prompts, at one temperature, by contender."""
    rows = [row for row in experiment["rows"] if row["category"] == "all" and row["temperature"] == temperature]
    return {label_of(row): row for row in rows if row["completed"]}


def points_of(rows: Mapping[str, Row], prefix: str, field: str) -> list[tuple[float, float]]:
    """A point for each contender whose label is the prefix and a number: the number, and a field of its row."""
    found = [(float(label.removeprefix(prefix)), row[field]) for label, row in rows.items() if label.startswith(prefix)]
    return sorted((number, value) for number, value in found if value is not None)
