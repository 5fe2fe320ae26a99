"""The picture of the gateway suite: what is left of the speed, by the number of streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from outrider_bench.plotting import draw_level, finish, new_figure
from outrider_bench.suites.gateway.claims import LEAST_SPEED

_RATIO = ": HTTP by gRPC"


def figures_of(results: Mapping[str, Any]) -> dict[str, Figure | None]:
    """Draw the ratios, a panel for each method."""
    ratios = {
        section["title"]: [one for one in section["measurements"] if one["name"].endswith(_RATIO)]
        for section in results["sections"]
    }
    ratios = {title: found for title, found in ratios.items() if found}
    if not ratios:
        return {}
    figure, panels = new_figure(len(ratios))
    for axes, (title, found) in zip(panels, ratios.items(), strict=True):
        axes.boxplot([one["values"] for one in found])
        axes.set_xticks(range(1, len(found) + 1), [one["name"].removesuffix(_RATIO) for one in found])
        draw_level(axes, LEAST_SPEED)
        axes.set_ylabel("tokens/s over HTTP by those over gRPC")
        axes.set_title(title)
        finish(axes)
    return {"speed": figure}
