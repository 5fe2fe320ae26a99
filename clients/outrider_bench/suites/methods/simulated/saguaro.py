"""SAGUARO in simulated time: misses by budget, fan-outs, the bias of its sampling, and what is done after a miss.

Kumar, Dao and May, "Speculative Speculative Decoding". Theorem 12 takes for granted that the next token is missed by F
guesses with a probability that falls like F ** -r; here the rate of misses over the whole budget shows how far that
holds, with the exponent that fits. A hit is what it is in the paper: an outcome with a speculation behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from outrider_bench.costs import GPU, GPU_NOTE
from outrider_bench.experiment import PLAIN, Contender, Experiment, contender
from outrider_bench.measured import Measured
from outrider_bench.plotting import (
    BLUE,
    GREEN,
    ORANGE,
    SKY,
    draw_by_concurrency,
    draw_line,
    finish,
    new_figure,
    points_of,
    rows_by_label,
    scale_logarithmically,
)
from outrider_bench.power_law import PowerLaw, fit_power_law
from outrider_bench.result import Measurement, above, at_least, claim, reported, share_of
from outrider_bench.suites.methods import papers
from outrider_bench.suites.methods.prompts import code
from outrider_bench.suites.methods.simulated.sizes import SimulatedSizes

PART = "simulated-saguaro"
TITLE = "SAGUARO in simulated time"
BUDGET, BIAS, FALLBACK = f"{PART}-budget", f"{PART}-bias", f"{PART}-fallback"
CHAIN: dict[str, Any] = {"num_speculative_tokens": 8, "min_path_probability": 0.0}
"""Chains of a fixed length, however improbable they get, as in the paper."""
TEMPERATURES = (0.7, 1.0)
BIAS_BUDGET = FALLBACK_BUDGET = 16
FALLBACK_TEMPERATURE = 0.7
FALLBACKS = ("draft", "retrieval", "plain", "random", "auto")
NOISES = ("", "no shared noise, ")
"""Prefixes of the settings with the target's noise, and of those without, as in the paper."""
SHARED = "shared noise, "
MIN_FIT = 0.9
"""Asked of R**2: hit rates that scale predictably with the size of the cache are a line in logarithms."""
_COLOURS = {(0.7, ""): BLUE, (1.0, ""): ORANGE, (0.7, NOISES[1]): SKY, (1.0, NOISES[1]): GREEN}


def experiments(sizes: SimulatedSizes) -> list[Experiment]:
    """List the experiments of this part."""
    prompts = code(sizes.num_prompts)
    biases = (
        contender("saguaro", f"C = {bias:g}", **CHAIN, **_RATIO, saguaro={"bias": bias, "budget": BIAS_BUDGET})
        for bias in sizes.biases
    )
    fallbacks = (_after_a_miss(name) for name in FALLBACKS)
    simulated = partial(Experiment, part=PART, costs=GPU, note=GPU_NOTE)
    alone = partial(simulated, temperatures=TEMPERATURES, prompts=prompts, max_tokens=sizes.tokens, repeats=1)
    return [
        alone(
            BUDGET,
            title="Misses by the number of outcomes that are drafted for",
            contenders=(PLAIN, *_budgets(sizes)),
        ),
        alone(
            BIAS,
            title="SAGUARO sampling under the ratio rule: the most probable draft tokens times C",
            contenders=(PLAIN, *biases),
        ),
        simulated(
            FALLBACK,
            title="What is done after a miss, by generations at once",
            contenders=(PLAIN, *fallbacks),
            temperatures=(FALLBACK_TEMPERATURE,),
            prompts=code(max(sizes.batches)),
            max_tokens=sizes.batch_tokens,
            repeats=sizes.batch_repeats,
            concurrencies=sizes.batches,
        ),
    ]


_RATIO: dict[str, Any] = {"acceptance_rule": "ACCEPTANCE_RULE_RATIO"}


def _budgets(sizes: SimulatedSizes) -> Iterator[Contender]:
    """Yield each budget with geometric fan-outs, and some with uniform ones, with the target's noise and without."""
    for noise in NOISES:
        alone: dict[str, Any] = {"shared_noise": False} if noise else {}
        for budget in sizes.budgets:
            yield contender("saguaro", f"{noise}B = {budget}", **CHAIN, **alone, saguaro={"budget": budget})
        for budget in sizes.uniform_budgets:
            fan_out = {"fan_out": "FAN_OUT_UNIFORM", "budget": budget}
            yield contender("saguaro", f"uniform, {noise}B = {budget}", **CHAIN, **alone, saguaro=fan_out)


def _after_a_miss(name: str) -> Contender:
    # A server refuses to fall back on what it was not told to retrieve.
    retrieves: dict[str, Any] = {"retrieval": True} if name == "retrieval" else {}
    fields = {"fallback": f"FALLBACK_{name.upper()}", "budget": FALLBACK_BUDGET}
    return contender("saguaro", f"fallback {name}", **retrieves, saguaro=fields)


def claims(measured: Measured, sizes: SimulatedSizes) -> list[Measurement]:
    """Return the claims of this part, each beside the paper's words: it has no figures of these."""
    return [
        *_of_misses(measured, sizes),
        *_of_fan_outs(measured, sizes),
        *_of_bias(measured, sizes),
        *_of_fallbacks(measured, sizes),
    ]


def _of_misses(measured: Measured, sizes: SimulatedSizes) -> Iterator[Measurement]:
    """Yield the exponent of the misses, and how well the law fits, by temperature and noise."""
    for t in TEMPERATURES:
        for noise in NOISES:
            rates = {
                budget: measured.ready_hit_rate(BUDGET, f"saguaro {noise}B = {budget}", t) for budget in sizes.budgets
            }
            law = _law({budget: rate for budget, rate in rates.items() if rate is not None})
            what = f"T = {t:g}: {noise or SHARED}misses by B"
            exponent, fit = (None, None) if law is None else (law.exponent, law.r_squared)
            last = sizes.budgets[-1]
            yield above(PART, f"{what}, exponent r", exponent, 0.0, paper=papers.SAGUARO_SCALING)
            yield at_least(PART, f"{what}, R2 of the power law", fit, MIN_FIT, paper=papers.SAGUARO_SCALING)
            yield reported(PART, f"{what}, hit rate at B = {last}", rates[last], paper=papers.SAGUARO_HITS)


def _law(hit_rates: Mapping[int, float]) -> PowerLaw | None:
    return fit_power_law([(budget, 1 - rate) for budget, rate in hit_rates.items()])


def _of_fan_outs(measured: Measured, sizes: SimulatedSizes) -> Iterator[Measurement]:
    for t in TEMPERATURES:
        for noise in NOISES:
            for budget in sizes.uniform_budgets:
                labels = [f"saguaro {shape}{noise}B = {budget}" for shape in ("", "uniform, ")]
                hits = share_of(*(measured.ready_hit_rate(BUDGET, label, t) for label in labels))
                speed = measured.ratio(BUDGET, labels[0], labels[1], t)
                what = f"{noise or SHARED}B = {budget}, geometric by uniform fan-out"
                yield above(PART, f"T = {t:g}: hit rate, {what}", hits, 1.0, paper=papers.SAGUARO_FAN_OUT)
                yield above(PART, f"T = {t:g}: tokens/s, {what}", speed, 1.0, paper=papers.SAGUARO_FAN_OUT)


def _of_bias(measured: Measured, sizes: SimulatedSizes) -> Iterator[Measurement]:
    """Yield what a smaller C brings and costs, beside none (C = 1)."""
    first = f"saguaro C = {sizes.biases[0]:g}"
    for t in TEMPERATURES:
        for bias in sizes.biases[1:]:
            label, paper = f"saguaro C = {bias:g}", papers.SAGUARO_BIAS
            hits = share_of(measured.ready_hit_rate(BIAS, label, t), measured.ready_hit_rate(BIAS, first, t))
            kept = share_of(measured.acceptance(BIAS, label, t), measured.acceptance(BIAS, first, t))
            speed = measured.ratio(BIAS, label, first, t)
            yield above(PART, f"T = {t:g}: C = {bias:g} by 1, hit rate (up)", hits, 1.0, paper=paper)
            yield claim(PART, f"T = {t:g}: C = {bias:g} by 1, acceptance (down)", kept, "<", 1.0, paper=paper)
            yield reported(PART, f"T = {t:g}: C = {bias:g} by 1, tokens/s", speed, paper=paper)


def _of_fallbacks(measured: Measured, sizes: SimulatedSizes) -> Iterator[Measurement]:
    """Yield that drafting is best alone, something that costs no time with many, and `auto` hardly ever worse."""

    labels, paper, t = (
        {name: f"saguaro fallback {name}" for name in FALLBACKS},
        papers.SAGUARO_FALLBACK,
        FALLBACK_TEMPERATURE,
    )
    others = [label for name, label in labels.items() if name != "auto"]
    for count in sizes.batches:
        ratio, remark = measured.batch_beside_the_best(FALLBACK, labels["auto"], others, t, count)
        yield at_least(PART, f"{count} at once: auto by the best other", ratio, 0.95, remark, paper)
        what = f"{count} at once: random by draft"
        ratio = measured.batch_ratio(FALLBACK, labels["random"], labels["draft"], t, count)
        if count == 1:
            yield claim(PART, what, ratio, "<", 1.0, paper=paper)
        elif count == sizes.batches[-1]:
            yield above(PART, what, ratio, 1.0, paper=paper)
        else:
            yield reported(PART, what, ratio, paper=paper)


def draw(found: Mapping[str, Mapping[str, Any]], _: Mapping[str, Any]) -> Figure | None:
    """Draw misses by budget with the laws that fit, the trade of the bias, and fallbacks by generations at once."""
    if any(name not in found for name in (BUDGET, BIAS, FALLBACK)):
        return None
    figure, (misses, bias, batches) = new_figure(3)
    _draw_misses(misses, found[BUDGET])
    for t, style in zip(TEMPERATURES, ("-", "--"), strict=True):
        rows = rows_by_label(found[BIAS], t)
        for field, name, colour in (("ready_hit_rate", "hit rate", BLUE), ("acceptance", "acceptance", ORANGE)):
            if values := points_of(rows, "saguaro C = ", field):
                draw_line(bias, values, f"{name}, T = {t:g}", colour, linestyle=style)
    bias.set_xlabel("C: factor of the most probable draft tokens")
    bias.set_ylabel("share")
    bias.set_ylim(0, 1)
    bias.set_title("SAGUARO sampling, ratio rule")
    finish(bias)
    bias.legend(frameon=False, fontsize=8)
    draw_by_concurrency(
        batches, found[FALLBACK]["rows"], f"After a miss, T = {FALLBACK_TEMPERATURE:g}", "saguaro fallback "
    )
    return figure


def _draw_misses(axes: Any, experiment: Mapping[str, Any]) -> None:
    """Draw points for what was measured, and a line for the law of each temperature and noise."""
    for t in TEMPERATURES:
        rows = rows_by_label(experiment, t)
        for noise in NOISES:
            points = [(budget, 1 - rate) for budget, rate in points_of(rows, f"saguaro {noise}B = ", "ready_hit_rate")]
            law, colour = fit_power_law(points), _COLOURS[t, noise]
            if law is None:
                continue
            what = f"T = {t:g}, {noise or SHARED}r = {law.exponent:.2f}"
            draw_line(axes, points, what, colour, linestyle="none")
            draw_line(axes, [(budget, law.at(budget)) for budget, _ in points], "", colour, marker="")
    axes.set_xlabel("B: outcomes that are drafted for")
    axes.set_ylabel("share of misses")
    axes.set_title("Misses by budget, with the power law that fits")
    finish(axes, "both")
    scale_logarithmically(axes.set_xscale, axes.xaxis)
    scale_logarithmically(axes.set_yscale, axes.yaxis)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8)
