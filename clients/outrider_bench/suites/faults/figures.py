"""The picture of the faults suite: tokens by the second, with the faults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from outrider_bench.plotting import BLUE, GREEN, ORANGE, RED, SKY, finish, stacked_figure
from outrider_bench.suites.faults.experiments import DATASTORE, REDIS, SPECULATOR, VERIFIER

_COLOURS = {SPECULATOR: ORANGE, DATASTORE: GREEN, REDIS: SKY, VERIFIER: RED}
_SMOOTH_S = 3
_MAX_WIDTH = 16.0
"""Inches: as much as a page shows."""
_MAX_NAMED = 60
"""Faults whose kinds can be written beside them."""


def figures_of(results: Mapping[str, Any]) -> dict[str, Figure | None]:
    """Draw the picture, if there is something to draw."""
    return {"tokens_over_time": draw_timeline(results) if results["tokens_by_second"] else None}


def draw_timeline(results: Mapping[str, Any]) -> Figure:
    """Draw tokens a second over time; each fault is a bar from its beginning to the return of its part."""
    tokens = results["tokens_by_second"]
    # The mean of the last seconds; the first ones have fewer before them.
    smooth = [sum(tokens[max(0, at - _SMOOTH_S + 1) : at + 1]) / min(at + 1, _SMOOTH_S) for at in range(len(tokens))]
    figure, (upper, lower) = stacked_figure(min(_MAX_WIDTH, max(9.0, len(tokens) / 45)), 5.6, (3, 2))
    upper.plot(range(len(tokens)), smooth, color=BLUE)
    upper.set_ylabel(f"tokens/s, all sessions (over {_SMOOTH_S} s)")
    upper.set_ylim(bottom=0)
    parts = list(_COLOURS)
    for fault in results["faults"]:
        end = fault["returned_s"] if fault["returned_s"] is not None else len(tokens)
        row, colour = parts.index(fault["part"]), _COLOURS[fault["part"]]
        lower.barh(row, max(0.5, end - fault["began_s"]), left=fault["began_s"], color=colour, height=0.45)
        if len(results["faults"]) <= _MAX_NAMED:
            lower.annotate(fault["kind"], (fault["began_s"], row + 0.27), fontsize=6.5, rotation=15)
            upper.axvline(fault["began_s"], color=colour, alpha=0.35, linewidth=0.8)
        elif fault["part"] == VERIFIER:
            # The others hardly show: drafts are missing, and tokens come all the same.
            upper.axvline(fault["began_s"], color=colour, alpha=0.5, linewidth=0.8)
    lower.set_yticks(range(len(parts)), parts)
    lower.set_ylim(-0.5, len(parts))
    lower.set_xlabel("seconds")
    for axes in (upper, lower):
        finish(axes, "both")
    return figure
