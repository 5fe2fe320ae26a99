"""The picture of a run: tokens by the second, with the faults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; a benchmark often runs where there is no screen

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from outrider_bench.suites.faults.plan import DATASTORE, REDIS, SPECULATOR, VERIFIER

# Okabe and Ito: to be told apart by everybody, in print as well.
_COLOURS = {SPECULATOR: "#E69F00", DATASTORE: "#009E73", REDIS: "#56B4E9", VERIFIER: "#D55E00"}
_TOKENS = "#0072B2"
_DPI = 130
_SMOOTH_S = 3
_MAX_WIDTH = 16.0
"""Inches: as much as a page shows."""
_MAX_NAMED = 60
"""Faults whose kinds can be written beside them."""


def write_plots(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes the picture, if there is something to draw."""
    if not results["tokens_by_second"]:
        return []
    figure = draw(results)
    path = folder / "tokens_over_time.png"
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)
    return [path]


def draw(results: Mapping[str, Any]) -> Figure:
    """Tokens a second over time; each fault is a bar from its beginning to the return of its part."""
    tokens = results["tokens_by_second"]
    smooth = [sum(tokens[max(0, at - _SMOOTH_S + 1) : at + 1]) / min(at + 1, _SMOOTH_S) for at in range(len(tokens))]
    width = min(_MAX_WIDTH, max(9.0, len(tokens) / 45))
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(width, 5), sharex=True, height_ratios=(3, 1))
    figure.set_layout_engine("constrained")
    upper.plot(range(len(tokens)), smooth, color=_TOKENS)
    upper.set_ylabel(f"tokens/s, all sessions (over {_SMOOTH_S} s)")
    upper.set_ylim(bottom=0)
    parts = list(_COLOURS)
    for fault in results["faults"]:
        end = fault["returned_s"] if fault["returned_s"] is not None else len(tokens)
        row, colour = parts.index(fault["part"]), _COLOURS[fault["part"]]
        lower.barh(row, max(0.5, end - fault["began_s"]), left=fault["began_s"], color=colour, height=0.6)
        if len(results["faults"]) <= _MAX_NAMED:
            lower.annotate(fault["kind"], (fault["began_s"], row + 0.35), fontsize=5, rotation=40)
            upper.axvline(fault["began_s"], color=colour, alpha=0.35, linewidth=0.8)
        elif fault["part"] == VERIFIER:
            # The others hardly show.
            upper.axvline(fault["began_s"], color=colour, alpha=0.5, linewidth=0.8)
    lower.set_yticks(range(len(parts)), parts)
    lower.set_ylim(-0.5, len(parts))
    lower.set_xlabel("seconds")
    for axes in (upper, lower):
        axes.set_axisbelow(True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
