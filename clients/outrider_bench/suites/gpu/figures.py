"""The picture of the GPU suite: rates by sessions, a line for each method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from outrider_bench.plotting import METHOD_COLOURS, draw_legend_below, draw_line, finish, new_figure
from outrider_bench.suites.gpu.report import grouped, rate_of


def figures_of(results: Mapping[str, Any]) -> dict[str, Figure | None]:
    """Draw the rates at the shortest context, a panel for each temperature."""
    cells = [one for one in results["cells"] if one["part"] == "services"]
    if not cells:
        return {}
    shortest = min(one["context"] for one in cells)
    groups = grouped(one for one in cells if one["context"] == shortest)
    temperatures = sorted({temperature for _, temperature, _ in groups})
    figure, panels = new_figure(len(temperatures))
    for axes, temperature in zip(panels, temperatures, strict=True):
        for label in dict.fromkeys(name for name, _, _ in groups):
            rates = {
                sessions: rate_of(values)
                for (name, at, sessions), values in groups.items()
                if (name, at) == (label, temperature)
            }
            points = [(float(sessions), rate) for sessions, rate in sorted(rates.items()) if rate]
            if points:
                draw_line(axes, points, label, METHOD_COLOURS.get(label, "#666666"))
        axes.set_title(f"T = {temperature:g}")
        axes.set_xlabel("generations at once")
        axes.set_ylabel("tokens/s of all")
        finish(axes)
    draw_legend_below(panels[0], 4)
    return {"rates": figure}
