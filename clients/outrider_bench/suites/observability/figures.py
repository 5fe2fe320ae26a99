"""The picture of the observability suite: what every round has lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from outrider_bench.plotting import draw_level, finish, new_figure
from outrider_bench.suites.observability.claims import SLOWER


def figures_of(results: Mapping[str, Any]) -> dict[str, Figure | None]:
    """Draw the losses, a panel for each method."""
    sections = results["sections"]
    if not sections:
        return {}
    figure, panels = new_figure(len(sections))
    for axes, section in zip(panels, sections, strict=True):
        losses = [one for one in section["measurements"] if one["name"].endswith(SLOWER)]
        # Without outliers: a turn that another program disturbed would flatten all the others.
        axes.boxplot([one["values"] for one in losses], showfliers=False)
        names = [one["name"].partition(":")[0] for one in losses]
        axes.set_xticks(range(1, len(losses) + 1), names, rotation=25, ha="right")
        draw_level(axes, 0.0)
        axes.set_ylabel("slower than with nothing, % of a turn")
        axes.set_title(section["title"])
        finish(axes)
    return {"losses": figure}
