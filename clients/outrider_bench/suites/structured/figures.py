"""Pictures of the suite of structured output: what each mask leaves of the speed, and speed-ups under schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from outrider_bench.plotting import PALETTE, draw_groups, draw_level, draw_speedup, new_figure
from outrider_cli.prompts import ALL_CATEGORIES


def figures_of(results: Mapping[str, Any]) -> dict[str, Figure | None]:
    """Draw every picture that there is something to draw for, named after its part."""
    speedups = {
        experiment["part"]: draw_speedup([row for row in experiment["rows"] if row["category"] == ALL_CATEGORIES])
        for experiment in results["experiments"]
        if experiment["part"] in ("forced", "schemas")
    }
    return {"mask": draw_masks(results), **speedups}


def draw_masks(results: Mapping[str, Any]) -> Figure | None:
    """Draw what is left of each method's speed with a mask, a panel for each temperature with and without filters."""
    costs = [cost for cost in results["masks"] if cost["kept_speed"] is not None]
    kinds = list(dict.fromkeys((cost["experiment"], cost["temperature"]) for cost in costs))
    if not kinds:
        return None
    figure, panels = new_figure(len(kinds))
    for axes, (experiment, temperature) in zip(panels, kinds, strict=True):
        shown = {
            (cost["setting"], cost["method"]): cost["kept_speed"]
            for cost in costs
            if (cost["experiment"], cost["temperature"]) == (experiment, temperature)
        }
        methods = list(dict.fromkeys(method for _, method in shown))
        settings = list(dict.fromkeys(setting for setting, _ in shown))
        bars = {setting: [shown.get((setting, method)) for method in methods] for setting in settings}
        draw_groups(axes, methods, bars, dict(zip(settings, PALETTE, strict=False)), legend_below=False)
        draw_level(axes)
        axes.set_ylabel("tokens a second with the mask by without")
        axes.set_title(f"T = {temperature:g}" + (", top_p" if experiment.endswith("filtered") else ""))
    return figure
