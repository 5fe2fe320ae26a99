"""Pictures of the datastore suite: how lookups are distributed, and what a ring's size costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outrider_bench.plotting import PALETTE, draw_line, finish, new_figure, scale_logarithmically
from outrider_bench.result import PLOTTED_PERCENTILES


def figures_of(results: Mapping[str, Any]) -> dict[str, Figure | None]:
    """Draw each section that has distributions."""
    return {
        _file_name(section["title"]): draw_section(section)
        for section in results["sections"]
        if section["distributions"]
    }


def draw_section(section: Mapping[str, Any]) -> Figure:
    """Draw the distributions of a section and, if it has curves, beside them their values by size."""
    curves = section["curves"]
    figure, panels = new_figure(2, width=5.5) if curves else new_figure(width=7)
    figure.suptitle(section["title"])
    _draw_distributions(panels[0], section["distributions"])
    if curves:
        _draw_curves(panels[1], curves)
    return figure


def _draw_distributions(axes: Axes, distributions: Mapping[str, list[float]]) -> None:
    for number, (name, values) in enumerate(distributions.items()):
        points = list(zip(values, PLOTTED_PERCENTILES, strict=True))
        style = "-" if number < len(PALETTE) else "--"
        draw_line(axes, points, name, PALETTE[number % len(PALETTE)], marker="", linestyle=style)
    scale_logarithmically(axes.set_xscale, axes.xaxis)
    axes.set_xlabel("µs (log scale)")
    axes.set_ylabel("% of the lookups that took no longer")
    axes.set_ylim(0, 100)
    finish(axes, "both")
    axes.legend(frameon=False, fontsize=8)


def _draw_curves(axes: Axes, curves: Mapping[str, list[list[float]]]) -> None:
    for colour, (name, points) in zip(PALETTE, curves.items(), strict=False):
        draw_line(axes, [(size, value) for size, value in points], name, colour)
    axes.set_xscale("log")
    scale_logarithmically(axes.set_yscale, axes.yaxis)
    axes.set_xlabel("tokens in the ring (log scale)")
    axes.set_ylabel("µs a lookup, idle (log scale)")
    finish(axes, "both")
    axes.legend(frameon=False, fontsize=8)


def _file_name(title: str) -> str:
    words = "".join(letter if letter.isalnum() else " " for letter in title.lower()).split()
    return "_".join(words)
