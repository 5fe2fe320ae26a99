"""DOUBLE in simulated time: what each of its parts brings, how deep it retrieves, and how long its n-grams are.

"Breaking the Acceleration Limit via Double Retrieval Speculative Parallelism". Its subject is a pair with a small speed
ratio, where drafting in parallel cannot be faster than C, and retrieval lifts that. So C is 2.5 here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from outrider_bench.experiment import PLAIN, Experiment, contender
from outrider_bench.measured import Measured
from outrider_bench.plotting import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    draw_groups,
    draw_level,
    draw_line,
    finish,
    new_figure,
    points_of,
    rows_by_label,
)
from outrider_bench.result import Measurement, above, at_least, at_most, claim, reported, share_of
from outrider_bench.suites.methods import papers
from outrider_bench.suites.methods.prompts import code
from outrider_bench.suites.methods.settings import ABLATIONS, NO_OWN_TEXT
from outrider_bench.suites.methods.simulated import published
from outrider_bench.suites.methods.simulated.sizes import SimulatedSizes

PART = "simulated-double"
TITLE = "DOUBLE in simulated time"
PARTS_OF_DOUBLE, DEPTH, MATCH_LEN = f"{PART}-ablations", f"{PART}-depth", f"{PART}-match-len"
REJECTED_TIER = f"{PART}-rejected"
TEMPERATURES = (0.0, 0.7, 1.0)
SWEEP_TEMPERATURES = (0.0, 0.7)
SPEED_RATIO = 2.5
"""C: the time of a target forward by that of a draft forward."""
DEPTH_OF_PAPER = 10
MORE_RETRIEVED = {0.0: 1.01, 0.7: 1.02, 1.0: 1.17}
"""Asked of the rejected tier: retrieved tokens with it by those without, by temperature. Offline, on the texts of the
same pair, it found so many more."""
RETRIEVED = ("prior", "dynamic", "rejected")
"""Sources of retrieved tokens, as results name them."""
NOTE = (
    f"{published.NOTE} C = {SPEED_RATIO:g}. Session tiers begin with the prompt alone. Parts of double are judged in "
    "our own setting of it: shared noise, and tails as long as they pay."
)


def experiments(sizes: SimulatedSizes) -> list[Experiment]:
    """List the experiments of this part."""
    simulated = partial(
        Experiment,
        part=PART,
        prompts=code(sizes.num_prompts),
        max_tokens=sizes.double_tokens,
        repeats=1,
        prior_share=1.0,
        costs=published.costs_of(SPEED_RATIO),
        note=NOTE,
    )
    ablations = {name: contender("double", name, double=switches) for name, switches in ABLATIONS.items()}
    tiers = (ablations[name] for name in ("no rejected tier", "no dynamic tier", NO_OWN_TEXT))
    depths = (contender("double", f"d = {depth}", double={"max_phrase_len": depth}) for depth in sizes.depths)
    lengths = (contender("double", f"n = {count}", double={"max_match_len": count}) for count in sizes.match_lens)
    return [
        simulated(
            PARTS_OF_DOUBLE,
            title="double without some of its parts",
            contenders=(PLAIN, contender("pearl"), contender("double"), *ablations.values()),
            temperatures=TEMPERATURES,
        ),
        simulated(
            REJECTED_TIER,
            title="The tier of refused drafts, on more prompts",
            contenders=(PLAIN, contender("double"), *tiers),
            temperatures=TEMPERATURES,
            prompts=code(sizes.rejected_prompts),
        ),
        simulated(DEPTH, title="Depth of retrieval", contenders=(PLAIN, *depths), temperatures=SWEEP_TEMPERATURES),
        simulated(MATCH_LEN, title="Longest n-gram", contenders=(PLAIN, *lengths), temperatures=SWEEP_TEMPERATURES),
    ]


def claims(measured: Measured, sizes: SimulatedSizes) -> list[Measurement]:
    """Return the claims of this part, each beside the paper's figure."""
    return [
        *(one for t in TEMPERATURES for one in _of_parts(measured, t)),
        *(one for t in TEMPERATURES for one in _of_retrieved(measured, t)),
        *(one for t in SWEEP_TEMPERATURES for one in _of_sweeps(measured, sizes, t)),
    ]


def _of_parts(measured: Measured, t: float) -> Iterator[Measurement]:
    """Yield what double brings, and what each of its parts does (section 5.3, Fig. 5; Tables 3 and 9)."""
    pearl, double = (measured.speedup(PARTS_OF_DOUBLE, label, t) for label in ("pearl", "double"))
    by_pearl = measured.ratio(PARTS_OF_DOUBLE, "double", "pearl", t)
    of_paper = papers.DOUBLE_BY_PEARL_SAMPLED if t else papers.DOUBLE_BY_PEARL
    yield claim(PART, f"T = {t:g}: pearl by off stays below C", pearl, "<", SPEED_RATIO, "", papers.DOUBLE_CEILING)
    if not t:
        yield above(PART, "T = 0: double by off exceeds C", double, SPEED_RATIO, paper=papers.DOUBLE_BEYOND_C)
    yield above(PART, f"T = {t:g}: double by pearl", by_pearl, 1.0, paper=of_paper)
    for name in (name for name in ABLATIONS if name != NO_OWN_TEXT):
        # Their effect is small: it takes more prompts to tell it.
        experiment = REJECTED_TIER if name == "no rejected tier" else PARTS_OF_DOUBLE
        ratio = measured.ratio(experiment, "double", f"double {name}", t)
        figure = papers.DOUBLE_ABLATIONS.get(name, papers.NONE)
        yield above(PART, f"T = {t:g}: double by double with {name}", ratio, 1.0, paper=figure)
    ratio = measured.ratio(REJECTED_TIER, "double no dynamic tier", f"double {NO_OWN_TEXT}", t)
    yield above(PART, f"T = {t:g}: the rejected tier, where there is no dynamic one", ratio, 1.0)


def _of_retrieved(measured: Measured, t: float) -> Iterator[Measurement]:
    """Yield the tokens that retrieval has brought on either side, and what the rejected tier adds to them."""

    def of(label: str, count: str) -> float | None:
        return measured.per_token(REJECTED_TIER, label, t, count)

    def retrieved(label: str) -> float | None:
        """Return the phrases' tokens that the draft model has kept, and the others that the target has."""
        kept = measured.accepted_from(REJECTED_TIER, label, t, RETRIEVED)
        phrases = of(label, "num_phrase_tokens")
        return None if kept is None or phrases is None else kept + phrases

    amt = share_of(of("double", "num_phrase_tokens"), of("double", "num_draft_forwards"))
    tails = of("double", "num_tail_tokens")
    yield above(PART, f"T = {t:g}: tokens kept behind a draft, by token", tails, 0.0, paper=papers.DOUBLE_TAILS)
    what = f"T = {t:g}: retrieved tokens, with the rejected tier by without"
    for remark, label, without in (
        ("", "double", "double no rejected tier"),
        (", where there is no dynamic one", "double no dynamic tier", f"double {NO_OWN_TEXT}"),
    ):
        more = share_of(retrieved(label), retrieved(without))
        yield at_least(PART, f"{what}{remark}", more, MORE_RETRIEVED[t], paper=papers.DOUBLE_REJECTED)
    yield reported(PART, f"T = {t:g}: retrieved tokens of a draft forward (AMT)", amt, paper=papers.DOUBLE_AMT)


def _of_sweeps(measured: Measured, sizes: SimulatedSizes, t: float) -> Iterator[Measurement]:
    """Yield what depth (section 5.3, Fig. 6) and the longest n-gram (n of Algorithm 3) are worth."""
    for name, letter, values, figure in (
        (DEPTH, "d", sizes.depths, papers.DOUBLE_DEPTH),
        (MATCH_LEN, "n", sizes.match_lens, papers.NONE),
    ):
        first, *others = (f"double {letter} = {value}" for value in values)
        ratio, remark = measured.the_best(name, others, first, t)
        yield above(PART, f"T = {t:g}: the best {letter} by {letter} = {values[0]}", ratio, 1.0, remark, figure)
    tokens = [measured.tokens_per_forward(DEPTH, f"double d = {d}", t) for d in (sizes.depths[-1], DEPTH_OF_PAPER)]
    what = f"T = {t:g}: tokens per forward, d = {sizes.depths[-1]} by d = {DEPTH_OF_PAPER} (saturates)"
    yield at_most(PART, what, share_of(*tokens), 1.05, paper=papers.DOUBLE_DEPTH)


def draw(found: Mapping[str, Mapping[str, Any]], _: Mapping[str, Any]) -> Figure | None:
    """Draw double without each of its parts over the ceiling C, and both sweeps."""
    if any(name not in found for name in (PARTS_OF_DOUBLE, DEPTH, MATCH_LEN)):
        return None
    figure, (bars, depths, lengths) = new_figure(3, width=6.8)
    rows = [rows_by_label(found[PARTS_OF_DOUBLE], t) for t in TEMPERATURES]
    names = {"pearl": "pearl", "double": "double", **{f"double {name}": name for name in ABLATIONS}}
    values = {
        f"T = {t:g}": [those.get(label, {}).get("speedup_over_off") for label in names]
        for t, those in zip(TEMPERATURES, rows, strict=True)
    }
    draw_groups(
        bars,
        [name.replace(" ", "\n", 1).replace(", ", ",\n") for name in names.values()],
        values,
        dict(zip(values, (BLUE, ORANGE, GREEN), strict=True)),
    )
    bars.tick_params(axis="x", labelsize=6)
    # DOUBLE, Theorem 3: what parallel drafting without retrieval cannot exceed.
    bars.axhline(SPEED_RATIO, color=RED, linestyle="--", linewidth=1)
    draw_level(bars)
    bars.set_ylabel("speed-up over off")
    bars.set_title(f"double without some of its parts; dashed: C = {SPEED_RATIO:g}")
    for axes, name, letter, title in (
        (depths, DEPTH, "d", "d: most retrieved tokens at a time"),
        (lengths, MATCH_LEN, "n", "n: longest n-gram that is looked up"),
    ):
        for t, colour in zip(SWEEP_TEMPERATURES, (BLUE, ORANGE), strict=True):
            those = rows_by_label(found[name], t)
            points = points_of(those, f"double {letter} = ", "speedup_over_off")
            tokens = points_of(those, f"double {letter} = ", "mean_acceptance_length")
            draw_line(axes, points, f"speed-up, T = {t:g}", colour)
            draw_line(axes, tokens, f"tokens per forward, T = {t:g}", colour, linestyle="--")
        axes.set_ylim(bottom=0)
        axes.axhline(1.0, color=GREY, linewidth=0.8)
        axes.set_xlabel(title)
        axes.set_ylabel("speed-up over off; tokens per forward")
        axes.set_title("Depth of retrieval" if letter == "d" else "Longest n-gram")
        finish(axes)
        axes.legend(frameon=False, fontsize=8)
    return figure
