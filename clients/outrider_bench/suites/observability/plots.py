"""The picture of a run: what every round has lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from outrider_bench.plotting import DPI, finish, new_figure
from outrider_bench.suites.observability.verdicts import SLOWER


def write_plots(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes the picture, if there is something to draw."""
    sections = results["sections"]
    if not sections:
        return []
    figure, panels = new_figure(len(sections))
    for axes, section in zip(panels, sections, strict=True):
        losses = [number for number in section["numbers"] if number["name"].endswith(SLOWER)]
        axes.boxplot([number["runs"] for number in losses], showfliers=False)
        axes.set_xticks(
            range(1, len(losses) + 1), [number["name"].partition(":")[0] for number in losses], rotation=25, ha="right"
        )
        axes.axhline(0, linewidth=0.8, color="black")
        axes.set_ylabel("slower than with nothing, % of a turn")
        axes.set_title(section["title"])
        finish(axes)
    path = folder / "losses.png"
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return [path]
