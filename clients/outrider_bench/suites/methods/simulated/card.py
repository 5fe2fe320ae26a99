"""CARD in simulated time: what correction adds to the cache, the width of the beam, and what both cost in rows.

Zhou et al., "CARD: A Cache-Assisted Parallel Speculative Decoding Framework". Its measure of cost is Params x L_new
(section 3.1 and Table 3), the parameters of a model in billions by the tokens that a forward processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from outrider_bench.costs import CPU, CPU_NOTE
from outrider_bench.experiment import PLAIN, Experiment, contender
from outrider_bench.measured import Measured
from outrider_bench.plotting import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    draw_line,
    finish,
    new_figure,
    points_of,
    rows_by_label,
    two_axes,
)
from outrider_bench.result import Measurement, above, at_least, reported, share_of
from outrider_bench.suites.methods import papers
from outrider_bench.suites.methods.prompts import code
from outrider_bench.suites.methods.simulated.sizes import SimulatedSizes

PART = "simulated-card"
TITLE = "CARD in simulated time"
PARTS_OF_CARD, WIDTH = f"{PART}-correction", f"{PART}-width"
QUERY_ONLY = "query only"
TEMPERATURES = (0.0, 0.7)
WIDTH_TEMPERATURE = 0.7
MIN_HIT_RATE = 0.9
QUERY_SHARE = 0.73
"""The paper's share of query only."""
DRAFT_MILLIONS, TARGET_MILLIONS = 1.2, 99.3
"""Parameters of the demo pair: of the draft model, and of the target with what inflates its cost."""


def experiments(sizes: SimulatedSizes) -> list[Experiment]:
    """List the experiments of this part."""
    prompts = code(sizes.num_prompts)
    correction = (PLAIN, contender("card", QUERY_ONLY, card={"correction": False}), contender("card"))
    widths = (contender("card", f"K = {width}", card={"beam_width": width}) for width in sizes.beam_widths)
    simulated = partial(
        Experiment, part=PART, prompts=prompts, max_tokens=sizes.tokens, repeats=1, costs=CPU, note=CPU_NOTE
    )
    return [
        simulated(PARTS_OF_CARD, title="Cache and correction", contenders=correction, temperatures=TEMPERATURES),
        simulated(WIDTH, title="Width of the beam", contenders=(PLAIN, *widths), temperatures=(WIDTH_TEMPERATURE,)),
    ]


def claims(measured: Measured, sizes: SimulatedSizes) -> list[Measurement]:
    """Return the claims of this part, each beside the paper's figure."""
    return [*_of_correction(measured), *_of_widths(measured, sizes)]


def _of_correction(measured: Measured) -> Iterator[Measurement]:
    """Yield the steps of CARD, section 3.3, Table 2: the cache alone, and correction on top of it."""
    query = f"card {QUERY_ONLY}"
    for t in TEMPERATURES:
        cache = measured.speedup(PARTS_OF_CARD, query, t)
        share = measured.ratio(PARTS_OF_CARD, query, "card", t)
        yield above(PART, f"T = {t:g}: query only by off", cache, 1.0, paper=papers.CARD_QUERY_ONLY)
        yield at_least(PART, f"T = {t:g}: query only, share of both", share, QUERY_SHARE, paper=papers.CARD_QUERY_SHARE)


def _of_widths(measured: Measured, sizes: SimulatedSizes) -> Iterator[Measurement]:
    """Yield hits and speed by K (CARD, section 3.4, Fig. 6), and the cost of each K (Table 3)."""
    labels, t = {width: f"card K = {width}" for width in sizes.beam_widths}, WIDTH_TEMPERATURE
    first, last = sizes.beam_widths[0], sizes.beam_widths[-1]
    hits = {width: measured.hit_rate(WIDTH, label, t) for width, label in labels.items()}
    highest = max((rate for rate in hits.values() if rate is not None), default=None)
    best, remark = measured.the_best(WIDTH, list(labels.values())[1:], labels[first], t)
    fall = measured.the_best(WIDTH, labels.values(), labels[last], t)[0]
    yield at_least(PART, f"T = {t:g}: highest hit rate", highest, MIN_HIT_RATE, paper=papers.CARD_HITS)
    gain = share_of(highest, hits[first])
    yield above(PART, f"T = {t:g}: highest hit rate by K = {first}", gain, 1.0, paper=papers.CARD_HITS)
    yield above(
        PART, f"T = {t:g}: tokens/s, the best K by K = {first} (rises)", best, 1.0, remark, papers.CARD_SPEED_BY_K
    )
    yield above(PART, f"T = {t:g}: tokens/s, the best K by K = {last} (falls)", fall, 1.0, "", papers.CARD_SPEED_BY_K)
    for width, label in labels.items():
        yield from _of_cost(measured, width, label)


def _of_cost(measured: Measured, width: int, label: str) -> Iterator[Measurement]:
    t, of_paper = WIDTH_TEMPERATURE, papers.CARD_COST
    rows, forwards, withheld = (
        measured.per_token(WIDTH, label, t, count)
        for count in ("num_draft_rows", "num_draft_forwards", "num_withheld_nodes")
    )
    target_rows = _target_rows(measured, label)
    what = f"T = {t:g}, K = {width}"
    scaled = None if rows is None else DRAFT_MILLIONS * rows
    verified = None if target_rows is None else TARGET_MILLIONS * target_rows
    yield reported(PART, f"{what}: rows of a draft forward", share_of(rows, forwards), "L_new of the draft", of_paper)
    yield reported(PART, f"{what}: draft, Params x L_new by token", scaled, "millions", of_paper)
    yield reported(PART, f"{what}: target, Params x L_new by token", verified, "millions", of_paper)
    yield reported(PART, f"{what}: nodes held back for a time, by token", withheld, "by the send budget")


def _target_rows(measured: Measured, label: str) -> float | None:
    """Return the rows that the target computes for each token: the drafted ones, and one of its own a round."""
    counts = [measured.per_token(WIDTH, label, WIDTH_TEMPERATURE, count) for count in ("num_drafted", "num_rounds")]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def draw(found: Mapping[str, Mapping[str, Any]], _: Mapping[str, Any]) -> Figure | None:
    """Draw hits and speed by K, and beside them what a K costs: rows of the draft model for each token."""
    rows = rows_by_label(found[WIDTH], WIDTH_TEMPERATURE) if WIDTH in found else {}
    hits, speeds, costs, withheld = (
        points_of(rows, "card K = ", field)
        for field in ("hit_rate", "output_throughput", "draft_rows_per_token", "withheld_nodes_per_token")
    )
    if not (hits and speeds and costs and withheld):
        return None
    figure, (curve, cost) = new_figure(2)
    left = draw_line(curve, hits, "hit rate", BLUE)
    curve.set_ylabel("hit rate")
    right_axes = curve.twinx()
    right = draw_line(right_axes, speeds, "tokens a second", ORANGE)
    right_axes.set_ylabel("tokens a second")
    two_axes(curve, left, right_axes, right)
    curve.set_title(f"Width of the beam, T = {WIDTH_TEMPERATURE:g}")
    draw_line(cost, costs, "rows of the draft model", GREEN)
    draw_line(cost, withheld, "nodes that the send budget held back", GREY)
    cost.set_ylabel("for each token of the text")
    cost.set_ylim(bottom=0)
    cost.set_title("What the width costs")
    finish(cost)
    cost.legend(frameon=False, fontsize=8)
    for axes in (curve, cost):
        axes.set_xlabel("K: candidates of a layer")
    return figure
