"""Generations at once in simulated time: every method by the same number of plain generations.

Rows are free for long on the devices where the papers measure, and not on two cores of a CPU: what a batch leaves of a
method's speed-up is a matter of the device's costs, so it is simulated beside being timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from outrider_bench.costs import GPU, GPU_NOTE
from outrider_bench.experiment import OFF, Experiment
from outrider_bench.measured import Measured
from outrider_bench.plotting import draw_by_concurrency, new_figure
from outrider_bench.result import Measurement, above, at_least, reported
from outrider_bench.suites.methods import papers
from outrider_bench.suites.methods.prompts import code
from outrider_bench.suites.methods.settings import BATCH_METHODS
from outrider_bench.suites.methods.simulated.sizes import SimulatedSizes

PART = "simulated-batch"
TITLE = "Generations at once, in simulated time"
TEMPERATURE = 0.7
NOTE = f"{GPU_NOTE} No prior: double and retrieval have the session's own text."


def experiments(sizes: SimulatedSizes) -> list[Experiment]:
    """List the experiments of this part."""
    return [
        Experiment(
            PART,
            PART,
            "Generations at once",
            BATCH_METHODS,
            (TEMPERATURE,),
            code(max(sizes.batches)),
            sizes.batch_tokens,
            sizes.batch_repeats,
            concurrencies=sizes.batches,
            costs=GPU,
            note=NOTE,
        )
    ]


def claims(measured: Measured, sizes: SimulatedSizes) -> list[Measurement]:
    """Return the claims of this part: drafts pay in every batch, and `auto` finds the method that pays most."""
    found: list[Measurement] = []
    fixed = [one.method for one in BATCH_METHODS if one.method not in (OFF, "auto")]
    for count in sizes.batches:
        speedups = {label: measured.batch_ratio(PART, label, OFF, TEMPERATURE, count) for label in (*fixed, "auto")}
        by_the_best, remark = measured.batch_beside_the_best(PART, "auto", fixed, TEMPERATURE, count)
        what = f"{count} at once"
        found.append(at_least(PART, f"{what}: auto by off", speedups["auto"], 0.98))
        found.append(at_least(PART, f"{what}: auto by the best fixed method", by_the_best, 0.95, remark))
        found.append(above(PART, f"{what}: double by off", speedups["double"], 1.0, paper=papers.DOUBLE_BATCH))
        others = [label for label in fixed if label != "double"]
        found += [reported(PART, f"{what}: {label} by off", speedups[label]) for label in others]
    return found


def draw(found: Mapping[str, Mapping[str, Any]], _: Mapping[str, Any]) -> Figure | None:
    """Draw the speed-up of each method by the number of generations at once."""
    if PART not in found:
        return None
    figure, (axes,) = new_figure(width=7)
    draw_by_concurrency(axes, found[PART]["rows"], f"Generations at once, T = {TEMPERATURE:g}")
    return figure
