"""Speculative decoding in simulated time: tokens of a round and speed beside what the formulas predict, by gamma.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), as the tutorial has it: with the
acceptance rate a, gamma drafted tokens and a draft model that takes a share c of the target's time, a round commits
(1 - a ** (gamma + 1)) / (1 - a) tokens (equation 1), and the walltime improves by that, divided by gamma c + 1
(Theorem 3.8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from outrider_bench.costs import GPU, GPU_NOTE
from outrider_bench.experiment import PLAIN, Contender, Experiment, contender
from outrider_bench.measured import Measured
from outrider_bench.plotting import (
    BLUE,
    GREEN,
    ORANGE,
    draw_level,
    draw_line,
    finish,
    new_figure,
    points_of,
    rows_by_label,
)
from outrider_bench.prediction import expected_tokens, walltime_improvement
from outrider_bench.result import Measurement, claim, reported, share_of
from outrider_bench.suites.methods import papers
from outrider_bench.suites.methods.prompts import code
from outrider_bench.suites.methods.simulated.sizes import SimulatedSizes

PART = "simulated-speculative"
TITLE = "Speculative decoding in simulated time"
GAMMA = f"{PART}-gamma"
TEMPERATURES = (0.0, 0.7, 1.0)
RULES: dict[str, dict[str, Any]] = {"match": {}, "ratio": {"acceptance_rule": "ACCEPTANCE_RULE_RATIO"}}
"""Fields by the rule's name: the match rule with the target's noise, and the paper's own rule."""
DRAFT_SHARE = GPU.draft_ms / GPU.target_ms[1]
"""The paper's c: the time of a draft forward by that of a target forward."""
MAX_ERROR = 0.2
"""Share by which a prediction may miss: it takes tokens to be accepted independently of each other."""
_COLOURS = dict(zip(TEMPERATURES, (BLUE, ORANGE, GREEN), strict=True))


def experiments(sizes: SimulatedSizes) -> list[Experiment]:
    """List the experiments of this part."""
    title = "Tokens of a round and speed, by the number of drafted tokens"
    prompts = code(sizes.num_prompts)
    everyone = (PLAIN, *_contenders(sizes))
    return [Experiment(GAMMA, PART, title, everyone, TEMPERATURES, prompts, sizes.tokens, 1, costs=GPU, note=GPU_NOTE)]


def _contenders(sizes: SimulatedSizes) -> Iterator[Contender]:
    for rule, fields in RULES.items():
        for gamma in sizes.gammas:
            # Always gamma tokens, as in the paper: neither improbable chains nor those that do not pay are shorter.
            chain = {"num_speculative_tokens": gamma, "min_path_probability": 0.0, "calibration": False}
            yield contender("speculative", f"{rule}, gamma = {gamma}", **chain, **fields)


def claims(measured: Measured, sizes: SimulatedSizes) -> list[Measurement]:
    """Return the claims of this part, each beside the tutorial's figure."""
    return [each for t in TEMPERATURES for rule in RULES for each in _of_rule(measured, sizes, t, rule)]


def _of_rule(measured: Measured, sizes: SimulatedSizes, t: float, rule: str) -> Iterator[Measurement]:
    """Yield the acceptance rate of the longest chains, and for each gamma what is measured by what is predicted."""
    longest = measured.acceptance(GAMMA, _label(rule, sizes.gammas[-1]), t)
    yield reported(PART, f"T = {t:g}, {rule}: acceptance rate", longest, paper=papers.TUTORIAL_ACCEPTANCE)
    for gamma in sizes.gammas:
        label, what = _label(rule, gamma), f"T = {t:g}, {rule}, gamma = {gamma}"
        rate = measured.acceptance(GAMMA, label, t)
        tokens = None if rate is None else expected_tokens(rate, gamma)
        speed = None if rate is None else walltime_improvement(rate, gamma, DRAFT_SHARE)
        of_tokens = share_of(measured.tokens_per_forward(GAMMA, label, t), tokens)
        measured_speed = measured.speedup(GAMMA, label, t)
        remark = "" if tokens is None else f"predicted: {tokens:.2f}"
        yield _near(f"{what}: tokens of a round by the prediction", of_tokens, remark, papers.TUTORIAL_TOKENS)
        said = "" if speed is None else f"predicted: {speed:.2f}, measured: {measured_speed or 0:.2f}"
        yield _near(f"{what}: speed-up by the prediction", share_of(measured_speed, speed), said, papers.TUTORIAL_SPEED)


def _label(rule: str, gamma: int) -> str:
    return f"speculative {rule}, gamma = {gamma}"


def _near(name: str, ratio: float | None, remark: str, paper: str) -> Measurement:
    """Claim that the measured value is no more than a share of MAX_ERROR away from the prediction, either way."""
    error = None if ratio is None else abs(ratio - 1)
    return claim(PART, f"{name}, error", error, "<=", MAX_ERROR, remark, paper)


def draw(found: Mapping[str, Mapping[str, Any]], _: Mapping[str, Any]) -> Figure | None:
    """Draw tokens of a round and speed-up by gamma, a panel for each rule, beside what the formulas predict."""
    if GAMMA not in found:
        return None
    figure, panels = new_figure(2 * len(RULES))
    for number, rule in enumerate(RULES):
        tokens, speed = panels[2 * number : 2 * number + 2]
        for t in TEMPERATURES:
            _draw_temperature(tokens, speed, found[GAMMA], t, rule)
        draw_level(speed)
        tokens.set_ylabel("tokens of a round")
        speed.set_ylabel("speed-up over off")
        for axes in (tokens, speed):
            axes.set_xlabel("gamma: drafted tokens")
            axes.set_ylim(bottom=0)
            axes.set_title(f"{rule.capitalize()} rule (dotted: predicted)")
            finish(axes)
            axes.legend(frameon=False, fontsize=8)
    return figure


def _draw_temperature(tokens: Any, speed: Any, experiment: Mapping[str, Any], t: float, rule: str) -> None:
    rows, prefix = rows_by_label(experiment, t), f"speculative {rule}, gamma = "
    rates = points_of(rows, prefix, "acceptance")
    predictions = (
        [(gamma, expected_tokens(rate, int(gamma))) for gamma, rate in rates],
        [(gamma, walltime_improvement(rate, int(gamma), DRAFT_SHARE)) for gamma, rate in rates],
    )
    fields = ("mean_acceptance_length", "speedup_over_off")
    for axes, field, predicted in zip((tokens, speed), fields, predictions, strict=True):
        if points := points_of(rows, prefix, field):
            draw_line(axes, points, f"T = {t:g}", _COLOURS[t])
        if predicted:
            draw_line(axes, predicted, "", _COLOURS[t], linestyle=":", marker="")
