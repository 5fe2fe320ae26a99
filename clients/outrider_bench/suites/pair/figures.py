"""Pictures of the pair suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outrider_bench.plotting import (
    BLACK,
    BLUE,
    GREY,
    METHOD_COLOURS,
    ORANGE,
    PALETTE,
    SKY,
    draw_legend_below,
    draw_level,
    draw_line,
    finish,
    new_figure,
)
from outrider_bench.suites.pair.acceptance import SHARED_NOISE
from outrider_bench.suites.pair.comparison import TOLERANCE


def figures_of(results: Mapping[str, Any]) -> dict[str, Figure | None]:
    """Draw every picture that there is something to draw for."""
    pairs = results["pairs"]
    one = pairs[0] if len(pairs) == 1 else None
    return {
        "pair": draw_pair(one) if one and one["predictions"] else None,
        "prediction": draw_predictions(pairs),
    }


def draw_pair(pair: Mapping[str, Any]) -> Figure:
    """Draw acceptance by position, and predicted speed-ups by length of the chain, a panel for each temperature."""
    temperatures = list(dict.fromkeys(one["temperature"] for one in pair["predictions"]))
    figure, panels = new_figure(1 + len(temperatures), width=4.0, height=4.2)
    _draw_acceptance(panels[0], pair["acceptances"])
    for axes, temperature in zip(panels[1:], temperatures, strict=True):
        _draw_speedups(axes, [one for one in pair["predictions"] if one["temperature"] == temperature], temperature)
        for one in pair["comparisons"]:
            count = one["setting"].removeprefix("gamma = ")
            if one["temperature"] == temperature and count:
                axes.scatter([int(count)], [one["measured"]], marker="x", color=METHOD_COLOURS[one["method"]], s=60)
    panels[1].set_ylabel("speed-up over off (line: predicted, x: measured)")
    handles, labels = panels[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    figure.suptitle(f"{pair['draft']} for {pair['target']}")
    return figure


def draw_predictions(pairs: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Draw what was measured by what was predicted, a colour for each pair."""
    found = {pair["title"]: [one for one in pair["comparisons"] if one["predicted"]] for pair in pairs}
    values = [value for ones in found.values() for one in ones for value in (one["predicted"], one["measured"])]
    if not values:
        return None
    figure, (axes,) = new_figure(width=5.6, height=5.2)
    low, high = 0.95 * min(values), 1.05 * max(values)
    axes.plot([low, high], [low, high], color=BLACK, linewidth=0.8)
    least, most = ([share * value for value in (low, high)] for share in (1 - TOLERANCE, 1 + TOLERANCE))
    # The prediction is off by a share of what is measured, so the band is one around x for each y.
    axes.fill_betweenx([low, high], least, most, color=GREY, alpha=0.2, label=f"within {TOLERANCE:.0%}")
    for (title, ones), colour in zip(found.items(), (*PALETTE, BLACK), strict=False):
        predicted, measured = [one["predicted"] for one in ones], [one["measured"] for one in ones]
        if ones:
            axes.scatter(predicted, measured, color=colour, s=28, label=title)
    axes.set_xlabel("speed-up predicted")
    axes.set_ylabel("speed-up measured")
    finish(axes, "both")
    draw_legend_below(axes, 3)
    return figure


def _draw_acceptance(axes: Axes, acceptances: Sequence[Mapping[str, Any]]) -> None:
    temperatures = list(dict.fromkeys(one["temperature"] for one in acceptances))
    for temperature, colour in zip(temperatures, (BLUE, ORANGE, SKY, *PALETTE), strict=False):
        for one in acceptances:
            if one["temperature"] == temperature and one["rule"] == SHARED_NOISE:
                known = [(place + 1, alpha) for place, alpha in enumerate(one["by_position"]) if alpha is not None]
                draw_line(axes, known, f"T = {temperature:g}", colour)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("position in the chain")
    axes.set_ylabel("drafted tokens kept, of those reached")
    axes.legend(frameon=False, fontsize=8)
    finish(axes)


def _draw_speedups(axes: Axes, predictions: Sequence[Mapping[str, Any]], temperature: float) -> None:
    for method in dict.fromkeys(one["method"] for one in predictions):
        points = [(one["num_speculative_tokens"], one["speedup"]) for one in predictions if one["method"] == method]
        draw_line(axes, points, method, METHOD_COLOURS[method])
    draw_level(axes)
    axes.set_xlabel("drafted tokens of a round, at most")
    axes.set_title(f"T = {temperature:g}")
    axes.set_ylim(bottom=0)
    finish(axes)
