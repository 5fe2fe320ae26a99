"""The methods as published beside ours, in simulated time: what a paper is worth here, and what Outrider adds.

A method as published is its preset (`Method.published`): the paper's acceptance rule and
parameters, without shared noise, calibration and what else this project adds. Ours is the method as a server has it
without further parameters. Spacelike decoding lives on what was said before, and has parts of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from outrider.core.methods import METHODS
from outrider_bench.costs import GPU, Costs
from outrider_bench.experiment import AS_PUBLISHED, PLAIN, Contender, Experiment, as_published, contender
from outrider_bench.measured import Measured
from outrider_bench.plotting import GREY, RED, draw_groups, draw_level, new_figure
from outrider_bench.report import Table, number_cell
from outrider_bench.result import Measurement, at_least, share_of
from outrider_bench.suites.methods import papers
from outrider_bench.suites.methods.prompts import code
from outrider_bench.suites.methods.settings import TRAINLESS
from outrider_bench.suites.methods.simulated.sizes import SimulatedSizes

PART = "simulated-published"
TITLE = "As published and ours, in simulated time"
TEMPERATURES = (0.0, 0.7, 1.0)
SPEED_RATIOS = (25.0, 5.0, 2.5)
"""C: the time of a target forward by that of a draft forward of one row."""
BATCH = 8
"""Generations at once, beside one alone."""
PUBLISHED = tuple(name for name, method in METHODS.items() if method.published and method.has_draft_model)
OURS = ("best-first", "auto")
"""Our own methods, which no paper has."""
NOTE = (
    "In simulated time, on two devices side by side, where the papers measure: a forward of the target takes 20 ms "
    "with 1 row, 22 with 64 and 30 with 256, one of the draft model 20 / C, and .01 for each further row, a message "
    ".05; without prefill. as published: see outrider.core.methods; chains of card and double are C tokens long "
    "(double's paper counts forwards, of several tokens each). The prior is what the target says to files that it was "
    "trained on."
)
CAPTION = (
    f"Speed-ups over plain decoding: alone, and {BATCH} generations at once by {BATCH} plain ones. as published: the "
    "method does what its paper says and nothing else."
)


def name_of(speed_ratio: float) -> str:
    """Return the name of the experiment at a speed ratio."""
    return f"{PART}-{speed_ratio:g}"


def costs_of(speed_ratio: float) -> Costs:
    """Return the times of a pair with a speed ratio."""
    return replace(GPU, draft_ms=GPU.target_ms[1] / speed_ratio - GPU.draft_row_ms)


def contenders_of(speed_ratio: float) -> tuple[Contender, ...]:
    """Return ours and those as published; where the draft model is of no matter, at the greatest speed ratio alone."""
    # The papers' gamma of parallel drafting: what the draft model makes during a forward of the target.
    chain = {"num_speculative_tokens": math.ceil(speed_ratio)}
    published = [as_published(method, **(chain if method in ("card", "double") else {})) for method in PUBLISHED]
    ours = [contender(method) for method in (*PUBLISHED, *OURS)]
    # Sources have no draft model: its C is of no matter to them.
    sources = [contender("retrieval", name, **fields) for name, fields in TRAINLESS.items()]
    with_sources = speed_ratio == max(SPEED_RATIOS)
    return (PLAIN, *ours, *published, *(sources if with_sources else ()))


def experiments(sizes: SimulatedSizes) -> list[Experiment]:
    """List the experiments of this part: one for each speed ratio."""
    return [
        Experiment(
            name_of(speed_ratio),
            PART,
            f"As published and ours, C = {speed_ratio:g}",
            contenders_of(speed_ratio),
            TEMPERATURES,
            code(sizes.num_prompts),
            sizes.tokens,
            repeats=1,
            prior_share=1.0,
            concurrencies=(1, BATCH),
            costs=costs_of(speed_ratio),
            note=NOTE,
        )
        for speed_ratio in SPEED_RATIOS
    ]


def claims(measured: Measured, sizes: SimulatedSizes) -> list[Measurement]:
    """Return the claims of this part: ours by the fastest method as published, alone and in a batch."""
    return [each for ratio in SPEED_RATIOS for t in TEMPERATURES for each in _claims_at(measured, ratio, t)]


def _claims_at(measured: Measured, speed_ratio: float, t: float) -> Iterator[Measurement]:
    name, what = name_of(speed_ratio), f"C = {speed_ratio:g}, T = {t:g}"
    published = [f"{method} {AS_PUBLISHED}" for method in PUBLISHED]
    for method in OURS:
        ratio, remark = measured.beside_the_best(name, method, published, t)
        yield at_least(PART, f"{what}: {method} by the best as published", ratio, 1.0, remark)
    for method in PUBLISHED:
        ratio = measured.ratio(name, method, f"{method} {AS_PUBLISHED}", t)
        yield at_least(PART, f"{what}: {method} by {method} as published", ratio, 1.0)
    batched = {label: measured.batch_ratio(name, label, PLAIN.method, t, BATCH) for label in ("auto", *published)}
    best = max((ratio for label, ratio in batched.items() if label != "auto" and ratio is not None), default=None)
    yield at_least(
        PART, f"{what}, {BATCH} at once: auto by the best as published", share_of(batched["auto"], best), 1.0
    )


def table(experiment: Mapping[str, Any]) -> Table:
    """Put each method beside itself as published, and beside the paper's own figure."""
    speedups = {
        (row["method"], row["setting"], row["temperature"], row["concurrency"]): row["speedup_over_off"]
        for row in experiment["rows"]
        if row["category"] == "all"
    }
    labels = dict.fromkeys((method, setting) for method, setting, *_ in speedups if setting != AS_PUBLISHED)
    rows = [
        [
            setting or method,
            f"{t:g}",
            *(
                number_cell(speedups.get((method, which, t, count)), 2)
                for count in (1, BATCH)
                for which in dict.fromkeys((setting, AS_PUBLISHED))
            ),
            papers.SPEEDUPS.get(method, {}).get(t, papers.NONE) if not setting else papers.NONE,
        ]
        for t in TEMPERATURES
        for method, setting in labels
        if method != PLAIN.method
    ]
    columns = ("method", "T", "ours", "as published", f"ours, {BATCH}", f"as published, {BATCH}", "the paper")
    return Table(experiment["title"], columns, rows, CAPTION, frozenset({"the paper"}), frozenset({"the paper"}))


def draw(found: Mapping[str, Mapping[str, Any]], _: Mapping[str, Any]) -> Figure | None:
    """Draw speed-ups by method, a panel for each temperature, at the smallest speed ratio that was measured."""
    names = [name_of(ratio) for ratio in SPEED_RATIOS if name_of(ratio) in found]
    if not names:
        return None
    rows = [row for row in found[names[0]]["rows"] if row["concurrency"] == 1 and row["category"] == "all"]
    methods = [method for method in PUBLISHED if any(row["method"] == method for row in rows)]
    figure, panels = new_figure(len(TEMPERATURES))
    for axes, t in zip(panels, TEMPERATURES, strict=True):
        here = {(row["method"], row["setting"]): row["speedup_over_off"] for row in rows if row["temperature"] == t}
        draw_groups(
            axes,
            methods,
            {
                "ours": [here.get((method, "")) or 0.0 for method in methods],
                AS_PUBLISHED: [here.get((method, AS_PUBLISHED)) or 0.0 for method in methods],
            },
            {"ours": RED, AS_PUBLISHED: GREY},
        )
        draw_level(axes)
        axes.set_title(f"T = {t:g}")
        axes.set_ylabel("speed-up over off")
    return figure
