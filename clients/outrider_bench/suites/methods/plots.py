"""Pictures, one for each part that there is something to draw for: bars here, curves in their own module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from outrider_bench.experiment import OFF
from outrider_bench.plotting import (
    BLUE,
    DPI,
    GREEN,
    GREY,
    ORANGE,
    RED,
    draw_bars,
    draw_groups,
    new_figure,
    rows_by_label,
)
from outrider_bench.statistics import label_of
from outrider_bench.suites.generation.plots import draw_speedup
from outrider_bench.suites.methods.curves import draw_card, draw_double, draw_rows, draw_saguaro, draw_spacelike
from outrider_bench.suites.methods.peers import LLAMA_CPP
from outrider_cli.prompts import ALL_CATEGORIES

Experiments = Mapping[str, Mapping[str, Any]]


def write_plots(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes every picture that there is something to draw for, named after its part."""
    experiments = {experiment["name"]: experiment for experiment in results["experiments"] if experiment["rows"]}
    written = []
    for part in results["config"]["parts"]:
        figure = _DRAW[part](experiments, results)
        if figure is not None:
            path = folder / f"{part}.png"
            figure.savefig(path, dpi=DPI)
            plt.close(figure)
            written.append(path)
    return written


def draw_methods(experiments: Experiments, _: Mapping[str, Any]) -> Figure | None:
    """Speed-up over `off` by temperature, the settings of a method apart."""
    rows = experiments.get("methods", {}).get("rows", [])
    apart = [
        {**row, "method": label_of(row), "setting": "", "best_setting": False}
        for row in rows
        if row["category"] == ALL_CATEGORIES
    ]
    return draw_speedup(apart)


def draw_noise(experiments: Experiments, _: Mapping[str, Any]) -> Figure | None:
    """Acceptance and tokens per forward, with the same draft model."""
    if "noise" not in experiments:
        return None
    rows = {label.removeprefix("speculative "): row for label, row in rows_by_label(experiments["noise"], 1.0).items()}
    colours = dict(zip(rows, (BLUE, GREY, ORANGE), strict=False))
    figure, (acceptance, tokens) = new_figure(2, width=4.6)
    draw_bars(acceptance, {name: row["acceptance"] or 0.0 for name, row in rows.items()}, colours)
    acceptance.set_ylabel("drafted tokens kept, of those compared")
    acceptance.set_ylim(0, 1)
    draw_bars(tokens, {name: row["mean_acceptance_length"] for name, row in rows.items()}, colours)
    tokens.set_ylabel("tokens per forward of the target")
    figure.suptitle("The same draft model at temperature 1")
    return figure


def draw_auto(experiments: Experiments, _: Mapping[str, Any]) -> Figure | None:
    """Speed-up over `off` of auto and of fixed methods, by prompts and temperature; and where drafting cannot pay."""
    if "auto" not in experiments:
        return None
    rows = [row for row in experiments["auto"]["rows"] if row["category"] != ALL_CATEGORIES and row["method"] != OFF]
    kinds = sorted({(row["category"], row["temperature"]) for row in rows})
    speedups = {(label_of(row), row["category"], row["temperature"]): row["speedup_over_off"] for row in rows}
    bars = {label: [speedups.get((label, *kind)) for kind in kinds] for label in dict.fromkeys(map(label_of, rows))}
    colours = {"pearl": ORANGE, "best-first": BLUE, "retrieval": GREEN, "auto": RED}
    figure, (axes, alone) = new_figure(2, width=7)
    draw_groups(axes, [f"{category}\nT = {t:g}" for category, t in kinds], bars, colours)
    axes.set_ylabel("speed-up over off")
    # Where nothing but auto is measured: the name says what is wrong with the draft model.
    names = {"auto-hot": "T = 1.5", "auto-untrained": "untrained\ndraft model", "auto-slow": "slow\ndraft model"}
    values = {
        names[name]: row["speedup_over_off"]
        for name in names
        for row in experiments.get(name, {}).get("rows", [])
        if row["method"] == "auto" and row["category"] == ALL_CATEGORIES and row["speedup_over_off"]
    }
    draw_bars(alone, values, dict.fromkeys(values, RED))
    alone.set_ylabel("speed-up of auto over off")
    for panel in (axes, alone):
        panel.axhline(1, color="black", linewidth=0.8)
    figure.suptitle("Auto beside fixed methods, and where drafting hardly pays")
    return figure


def draw_peers(experiments: Experiments, _: Mapping[str, Any]) -> Figure | None:
    """The best of ours beside the best of llama.cpp's, each over plain decoding on its machine."""
    rows = experiments.get("methods", {}).get("rows", [])
    best = {
        peer.temperature: max(
            (
                row["speedup_over_off"]
                for row in rows
                if row["temperature"] == peer.temperature
                and row["category"] == ALL_CATEGORIES
                and row["speedup_over_off"]
            ),
            default=None,
        )
        for peer in LLAMA_CPP
    }
    if not any(best.values()):
        return None
    figure, (axes,) = new_figure()
    bars: dict[str, list[float | None]] = {
        "our best method": list(best.values()),
        "llama.cpp's best (another machine)": [peer.speedup for peer in LLAMA_CPP],
    }
    draw_groups(axes, [f"T = {t:g}" for t in best], bars, dict(zip(bars, (BLUE, GREY), strict=True)))
    axes.set_xlabel("sampling temperature")
    axes.set_ylabel("tokens a second, by those of a plain runner beside it")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_title("The same pair of models: gain over plain decoding")
    return figure


_DRAW: dict[str, Callable[[Experiments, Mapping[str, Any]], Figure | None]] = {
    "methods": draw_methods,
    "saguaro": draw_saguaro,
    "card": draw_card,
    "double": draw_double,
    "spacelike": draw_spacelike,
    "rows": draw_rows,
    "noise": draw_noise,
    "auto": draw_auto,
    "peers": draw_peers,
}
