"""Pictures of the methods suite, one for each part: what is compared, and what the papers vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.figure import Figure

from outrider_bench.experiment import LLAMA_CPP, OFF
from outrider_bench.plotting import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    draw_bars,
    draw_by_concurrency,
    draw_groups,
    draw_level,
    draw_line,
    draw_speedup,
    finish,
    new_figure,
    points_of,
    rows_by_label,
    two_axes,
)
from outrider_bench.prediction import expected_tokens
from outrider_bench.statistics import label_of
from outrider_bench.suites.methods.experiments import CHAIN_LEN, DRAFT_C2_5
from outrider_bench.suites.methods.replay import NEAR, NEW
from outrider_bench.suites.methods.simulated.parts import SIMULATED
from outrider_cli.prompts import ALL_CATEGORIES

Experiments = Mapping[str, Mapping[str, Any]]
_TOKENS = "mean_acceptance_length"
_BATCHES = {"batch": "All methods", "batch-fallbacks": "SAGUARO after a miss"}
"""Titles by experiment."""
_FAN_OUT_COLOURS = (BLUE, GREY, GREEN, ORANGE, "#8cc5a2", "#f2bf8c")
"""Pairs of shapes: with shared noise, and paler without."""


def figures_of(results: Mapping[str, Any]) -> dict[str, Figure | None]:
    """Draw every picture that there is something to draw for, named after its part."""
    experiments = {experiment["name"]: experiment for experiment in results["experiments"] if experiment["rows"]}
    parts = results["config"]["parts"]
    found = {part: _DRAW[part](experiments, results) for part in parts}
    return found | ({"double_sweeps": draw_double_sweeps(experiments)} if "double" in parts else {})


def draw_methods(experiments: Experiments, _: Mapping[str, Any]) -> Figure | None:
    """Draw speed-up over `off` by temperature: the settings of a method apart, of llama.cpp the best one."""
    return _draw_apart(experiments, "methods")


def draw_sources(experiments: Experiments, _: Mapping[str, Any]) -> Figure | None:
    """Draw speed-up over `off` by temperature, for each source without a draft model."""
    return _draw_apart(experiments, "sources")


def _draw_apart(experiments: Experiments, name: str) -> Figure | None:
    rows = experiments.get(name, {}).get("rows", [])
    apart = [
        row if row["method"] == LLAMA_CPP else {**row, "method": label_of(row), "setting": "", "best_setting": False}
        for row in rows
        if row["category"] == ALL_CATEGORIES
    ]
    return draw_speedup(apart)


def draw_noise(experiments: Experiments, _: Mapping[str, Any]) -> Figure | None:
    """Draw acceptance and tokens per forward, with the same draft model."""
    if "noise" not in experiments:
        return None
    rows = {label.removeprefix("speculative "): row for label, row in rows_by_label(experiments["noise"], 1.0).items()}
    colours = dict(zip(rows, (BLUE, GREY, ORANGE), strict=False))
    figure, (acceptance, tokens) = new_figure(2, width=4.6)
    draw_bars(acceptance, {name: row["acceptance"] or 0.0 for name, row in rows.items()}, colours)
    acceptance.set_ylabel("drafted tokens kept, of those compared")
    acceptance.set_ylim(0, 1)
    draw_bars(tokens, {name: row["mean_acceptance_length"] for name, row in rows.items()}, colours)
    predicted = [expected_tokens(row["acceptance"] or 0.0, CHAIN_LEN) for row in rows.values()]
    tokens.scatter(range(len(rows)), predicted, marker="_", s=900, color=RED, zorder=3, label="predicted by acceptance")
    tokens.legend(frameon=False, fontsize=8)
    tokens.set_ylabel("tokens per forward of the target")
    figure.suptitle("The same draft model at temperature 1")
    return figure


def draw_auto(experiments: Experiments, _: Mapping[str, Any]) -> Figure | None:
    """Draw speed-up over `off` of auto and fixed methods, by prompts and temperature; and where drafting cannot pay."""
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
        draw_level(panel)
    figure.suptitle("Auto beside fixed methods, and where drafting hardly pays")
    return figure


def draw_saguaro(experiments: Experiments, _: Mapping[str, Any]) -> Figure | None:
    """Draw hit rates by fan-out, and what SAGUARO sampling trades for them."""
    if "saguaro-fan-out" not in experiments:
        return None
    figure, (bars, curve) = new_figure(2)
    experiment = experiments["saguaro-fan-out"]
    temperatures = sorted({row["temperature"] for row in experiment["rows"]})
    by_temperature = [rows_by_label(experiment, t) for t in temperatures]
    labels = dict.fromkeys(label for rows in by_temperature for label in rows)
    rates = {
        label.removeprefix("saguaro "): [
            rows[label]["ready_hit_rate"] if label in rows else None for rows in by_temperature
        ]
        for label in labels
    }
    draw_groups(bars, [f"T = {t:g}" for t in temperatures], rates, dict(zip(rates, _FAN_OUT_COLOURS, strict=False)))
    bars.set_ylabel("hit rate")
    bars.set_title("Fan-out, at the same budget")
    rows = rows_by_label(experiments["saguaro-bias"], 1.0) if "saguaro-bias" in experiments else {}
    for field, label, colour in (("ready_hit_rate", "hit rate", BLUE), ("acceptance", "acceptance", ORANGE)):
        if points := points_of(rows, "saguaro C = ", field):
            draw_line(curve, points, label, colour)
    finish(curve)
    curve.set_xlabel("C: factor of the likeliest draft tokens' probabilities")
    curve.set_ylabel("share")
    curve.set_ylim(0, 1)
    curve.set_title("SAGUARO sampling, ratio rule, T = 1")
    if rows:
        curve.legend(frameon=False, fontsize=8)
    return figure


def draw_card(experiments: Experiments, _: Mapping[str, Any]) -> Figure | None:
    """Draw the ablation, and the width of the beam: hit rate on one side, speed on the other."""
    if "card-width" not in experiments or "card" not in experiments:
        return None
    figure, (bars, curve) = new_figure(2)
    temperatures = sorted({row["temperature"] for row in experiments["card"]["rows"]})
    by_temperature = [rows_by_label(experiments["card"], t) for t in temperatures]
    labels = {"off": "off", "card query only": "query only", "card": "query and correct"}
    speeds = {
        name: [rows[label]["output_throughput"] if label in rows else None for rows in by_temperature]
        for label, name in labels.items()
    }
    draw_groups(
        bars, [f"T = {t:g}" for t in temperatures], speeds, dict(zip(speeds, (GREY, ORANGE, BLUE), strict=True))
    )
    bars.set_ylabel("tokens a second")
    bars.set_title("Cache and correction")
    rows = rows_by_label(experiments["card-width"], 0.0)
    hits = points_of(rows, "card K = ", "hit_rate")
    if hits:
        left = draw_line(curve, hits, "hit rate", BLUE)
        right_axes = curve.twinx()
        right = draw_line(right_axes, points_of(rows, "card K = ", "output_throughput"), "tokens a second", ORANGE)
        right_axes.set_ylabel("tokens a second")
        two_axes(curve, left, right_axes, right)
    curve.set_xlabel("K: candidates of a layer")
    curve.set_ylabel("hit rate")
    curve.set_title("Width of the beam, T = 0")
    return figure


def draw_double(experiments: Experiments, results: Mapping[str, Any]) -> Figure | None:
    """Draw double and its ablations over the ceiling C, and what more prior brings."""
    if "double" not in experiments:
        return None
    figure, (bars, curve) = new_figure(2, width=7)
    rows = rows_by_label(experiments["double"], 0.0)
    values = {
        label.removeprefix("double ").replace(" ", "\n", 1): row["speedup_over_off"]
        for label, row in rows.items()
        if row["speedup_over_off"] and label != "off"
    }
    draw_bars(bars, values, {"pearl": ORANGE, "double": BLUE})
    ceiling = results["speed_ratios"].get(DRAFT_C2_5)
    # DOUBLE, Theorem 3: what parallel drafting without retrieval cannot exceed.
    if ceiling:
        bars.axhline(ceiling, color=RED, linestyle="--", label=f"C = {ceiling:.2f}")
        bars.legend(frameon=False, fontsize=8)
    bars.set_ylabel("speed-up over off")
    bars.set_title("Double, and double without one of its parts, T = 0")
    # None of the prior and all of it are contenders of one experiment; the sizes in between have one each. All are held
    # against pearl, which knows no prior and took turns with each.
    sizes = [(0.0, rows, "double no prior"), (100.0, rows, "double")]
    for name, one in experiments.items():
        if name.startswith("double-prior-"):
            sizes.append((100 * one["prior_share"], rows_by_label(one, 0.0), "double"))
    speeds = [
        (share, those[label]["output_throughput"] / those["pearl"]["output_throughput"])
        for share, those, label in sizes
        if label in those and "pearl" in those
    ]
    if speeds:
        draw_line(curve, sorted(speeds), "double", BLUE)
    finish(curve)
    curve.set_xlabel("% of the prior")
    curve.set_ylabel("tokens a second by those of pearl")
    curve.set_title("Size of the prior")
    return figure


def draw_double_sweeps(experiments: Experiments) -> Figure | None:
    """Draw tokens per forward and speed-up by depth and by the longest n-gram (DOUBLE, section 5.3, Fig. 6)."""
    sweeps = {
        name: rows_by_label(experiments[name], 0.0)
        for name in ("double-depth", "double-match-len")
        if name in experiments
    }
    letters = {"double-depth": "d", "double-match-len": "n"}
    titles = {"d": "d: most retrieved tokens at a time", "n": "n: longest n-gram that is looked up"}
    drawable = [
        (letters[name], rows) for name, rows in sweeps.items() if points_of(rows, f"double {letters[name]} = ", _TOKENS)
    ]
    if not drawable:
        return None
    figure, panels = new_figure(len(drawable))
    for axes, (letter, rows) in zip(panels, drawable, strict=True):
        prefix = f"double {letter} = "
        left = draw_line(axes, points_of(rows, prefix, _TOKENS), "tokens per forward", BLUE)
        axes.set_ylabel("tokens per forward of the target")
        axes.set_xlabel(titles[letter])
        if speeds := points_of(rows, prefix, "speedup_over_off"):
            right_axes = axes.twinx()
            right = draw_line(right_axes, speeds, "speed-up over off", ORANGE)
            right_axes.set_ylabel("speed-up over off")
            two_axes(axes, left, right_axes, right)
    figure.suptitle("Retrieval of double, T = 0")
    return figure


def draw_batch(experiments: Experiments, _: Mapping[str, Any]) -> Figure | None:
    """Draw speed-up over `off` by the number of generations at once: of all methods, and of saguaro's fallbacks."""
    found = [(name, title) for name, title in _BATCHES.items() if name in experiments]
    if not found:
        return None
    figure, panels = new_figure(len(found), width=7)
    for axes, (name, title) in zip(panels, found, strict=True):
        draw_by_concurrency(axes, experiments[name]["rows"], title, "saguaro fallback ")
    return figure


def draw_spacelike(_: Experiments, results: Mapping[str, Any]) -> Figure | None:
    """Draw speed-up over the requests."""
    replay = results["replay"]
    if replay is None:
        return None
    figure, (axes,) = new_figure(width=8)
    for category, colour in ((NEW, GREY), (NEAR, GREEN)):
        found = [(number + 1, speedup) for number, kind, speedup in replay["requests"] if kind == category]
        if found:
            numbers, speedups = zip(*found, strict=True)
            axes.scatter(numbers, speedups, s=9, color=colour, label=category, alpha=0.7)
    if replay["points"]:
        draw_line(axes, [(number, speedup) for number, speedup in replay["points"]], "all of the last few", BLUE)
    draw_level(axes)
    axes.set_xlabel("requests so far")
    axes.set_ylabel("speed-up over off")
    axes.set_ylim(bottom=0)
    axes.set_title("A service that is used")
    finish(axes)
    axes.legend(frameon=False, fontsize=8)
    return figure


def draw_rows(experiments: Experiments, _: Mapping[str, Any]) -> Figure | None:
    """Draw the gain and the cost of more rows; the chain as a level."""
    rows = rows_by_label(experiments["rows"], 1.0) if "rows" in experiments else {}
    prefix = "best-first rows = "
    lengths = points_of(rows, prefix, "mean_acceptance_length")
    if not lengths:
        return None
    figure, (axes,) = new_figure()
    left = draw_line(axes, lengths, "tokens per forward, sub-tree", BLUE)
    right_axes = axes.twinx()
    right = draw_line(right_axes, points_of(rows, prefix, "output_throughput"), "tokens a second, sub-tree", ORANGE)
    if "best-first chain" in rows:
        chain = rows["best-first chain"]
        axes.axhline(chain["mean_acceptance_length"], color=BLUE, linestyle=":")
        right_axes.axhline(chain["output_throughput"], color=ORANGE, linestyle=":")
    right_axes.set_ylabel("tokens a second")
    two_axes(axes, left, right_axes, right)
    axes.set_xlabel("rows of a sub-tree (dotted: one chain)")
    axes.set_ylabel("tokens per forward of the target")
    axes.set_title("Rows of a target forward, T = 1")
    return figure


_DRAW: dict[str, Callable[[Experiments, Mapping[str, Any]], Figure | None]] = {
    "methods": draw_methods,
    "saguaro": draw_saguaro,
    "card": draw_card,
    "double": draw_double,
    "sources": draw_sources,
    "spacelike": draw_spacelike,
    "rows": draw_rows,
    "noise": draw_noise,
    "auto": draw_auto,
    "batch": draw_batch,
    **{part: module.draw for part, module in SIMULATED.items()},
}
