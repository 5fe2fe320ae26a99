"""Pictures of the datastore's suite: how lookups are distributed, and what a ring's size costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; a benchmark often runs where there is no screen

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from outrider_bench.result import PLOTTED_PERCENTILES

# Okabe and Ito: to be told apart by everybody, in print as well.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7")
_DPI = 130


def write_plots(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes every picture that there is something to draw for."""
    written = []
    for section in results["sections"]:
        if not section["distributions"]:
            continue
        figure = draw(section)
        path = folder / f"{_file_name(section['title'])}.png"
        figure.savefig(path, dpi=_DPI)
        plt.close(figure)
        written.append(path)
    return written


def draw(section: Mapping[str, Any]) -> Figure:
    """The distributions of a section and, if it has curves, beside them their values by size."""
    curves = section["curves"]
    figure, panels = plt.subplots(1, 2 if curves else 1, figsize=(11 if curves else 7, 4.4), squeeze=False)
    figure.set_layout_engine("constrained")
    figure.suptitle(section["title"])
    _draw_distributions(panels[0][0], section["distributions"])
    if curves:
        _draw_curves(panels[0][1], curves)
    return figure


def _draw_distributions(axes: Axes, distributions: Mapping[str, list[float]]) -> None:
    for number, (name, values) in enumerate(distributions.items()):
        style = "-" if number < len(_COLOURS) else "--"
        axes.plot(values, PLOTTED_PERCENTILES, label=name, color=_COLOURS[number % len(_COLOURS)], linestyle=style)
    _scale(axes.set_xscale, axes.xaxis)
    axes.set_xlabel("µs (log scale)")
    axes.set_ylabel("% of the lookups that took no longer")
    axes.set_ylim(0, 100)
    _finish(axes)


def _draw_curves(axes: Axes, curves: Mapping[str, list[list[float]]]) -> None:
    for number, (name, points) in enumerate(curves.items()):
        sizes, values = zip(*points, strict=True)
        axes.plot(sizes, values, marker="o", label=name, color=_COLOURS[number])
    axes.set_xscale("log")
    _scale(axes.set_yscale, axes.yaxis)
    axes.set_xlabel("tokens in the ring (log scale)")
    axes.set_ylabel("µs a lookup, idle (log scale)")
    _finish(axes)


def _scale(set_scale: Callable[[str], None], axis: Axis) -> None:
    """A logarithmic scale with 1, 2 and 5 of each power of ten: more labels would overlap."""
    set_scale("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _finish(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def _file_name(title: str) -> str:
    words = "".join(letter if letter.isalnum() else " " for letter in title.lower()).split()
    return "_".join(words)
