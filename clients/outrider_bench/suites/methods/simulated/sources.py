"""Sources of retrieval that need no draft model, in simulated time, each alone, as chains and as trees.

Token Recycling (Luo et al. 2024), a pool of n-grams (Fu et al. 2024; Zhao et al. 2024), REST (He et al. 2023), which is
a prior without a draft, and the session's own text. A session begins with nothing but its prompt, and `rest` with a
prior of what the target says to files that it was trained on. Lookups take no time here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from outrider_bench.costs import CPU, CPU_NOTE
from outrider_bench.experiment import PLAIN, Contender, Experiment, contender
from outrider_bench.measured import Measured
from outrider_bench.plotting import BLUE, GREEN, draw_groups, draw_level, new_figure, rows_by_label
from outrider_bench.result import Measurement, above
from outrider_bench.suites.methods.prompts import code
from outrider_bench.suites.methods.simulated.sizes import SimulatedSizes

PART = "simulated-sources"
TITLE = "Sources without a draft model, in simulated time"
TEMPERATURES = (0.0, 0.7, 1.0)
SOURCES: dict[str, list[str]] = {
    "token recycling": ["SOURCE_RECYCLED"],
    "n-gram pool": ["SOURCE_POOL"],
    "rest": ["SOURCE_PRIOR"],
    "own text": ["SOURCE_DYNAMIC", "SOURCE_REJECTED"],
    "own text, pool, recycling": ["SOURCE_DYNAMIC", "SOURCE_POOL", "SOURCE_RECYCLED"],
}
"""Sources by the name of the setting."""
ROWS = {"chain": "ROWS_CHAIN", "tree": "ROWS_TREE"}


def experiments(sizes: SimulatedSizes) -> list[Experiment]:
    """List the experiments of this part."""
    everyone = (PLAIN, *(_contender(name, rows) for name in SOURCES for rows in ROWS))
    return [
        Experiment(
            PART,
            PART,
            "Sources without a draft model",
            everyone,
            TEMPERATURES,
            code(sizes.num_prompts),
            sizes.source_tokens,
            repeats=1,
            prior_share=1.0,
            costs=CPU,
            note=CPU_NOTE,
        )
    ]


def _contender(name: str, rows: str) -> Contender:
    fields = {"rows": ROWS[rows], "retrieval_params": {"sources": SOURCES[name]}}
    return contender("retrieval", f"{name}, {rows}", **fields)


def claims(measured: Measured, sizes: SimulatedSizes) -> list[Measurement]:
    """Return the claims of this part: each source brings something, in its better rows."""
    return [
        above(PART, f"T = {t:g}: {name} by off", *measured.the_best(PART, _labels(name), PLAIN.method, t)[:1], 1.0)
        for t in TEMPERATURES
        for name in SOURCES
    ]


def _labels(name: str) -> list[str]:
    return [f"retrieval {name}, {rows}" for rows in ROWS]


def draw(found: Mapping[str, Mapping[str, Any]], _: Mapping[str, Any]) -> Figure | None:
    """Draw the speed-up of each source as chains and as trees, a panel for each temperature."""
    if PART not in found:
        return None
    figure, panels = new_figure(len(TEMPERATURES))
    for axes, t in zip(panels, TEMPERATURES, strict=True):
        rows = rows_by_label(found[PART], t)
        bars = {
            kind: [rows.get(f"retrieval {name}, {kind}", {}).get("speedup_over_off") for name in SOURCES]
            for kind in ROWS
        }
        draw_groups(axes, list(SOURCES), bars, {"chain": BLUE, "tree": GREEN})
        axes.tick_params(axis="x", labelsize=6)
        draw_level(axes)
        axes.set_title(f"T = {t:g}")
        axes.set_ylabel("speed-up over off")
    return figure
