"""Estimates of how long a run takes: seconds, roughly, on machine A of RESULTS.md.

The table is what the methods were measured at; a method that got faster makes the estimate too long, not too short.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.methods import METHODS
from outrider_bench.experiment import DRAFT, DRAFT_UNTRAINED, Contender, Experiment
from outrider_bench.running import AUTO_WARM_UP_TOKENS, AUTO_WARM_UPS, WARM_UP_TOKENS
from outrider_bench.suites.methods.experiments import DRAFT_C2_5, DRAFT_C5, DRAFT_SLOW, MethodsSizes

TOKEN_S = 0.0207
"""A plain round: 47 tokens a second, prefill aside."""
PREFILL_TOKEN_S = 0.0012
CHARACTERS_PER_TOKEN = 2.8
START_S = 7.0
"""Seconds that the services take until all models are loaded."""
WARM_UP_PREFILL_S = 0.08
MEASURE_S = 6.0
"""Seconds that it takes to measure the speed ratio of a draft model."""
BUILD_TOKENS_PER_S = 700.0
"""Speed of the small target at eight generations at a time."""
BUILD_ROUNDS = 2
LOAD_S = 4.0
"""Seconds from loading a prior until all services have it."""

SHARED_ROW = 1 / 30
"""Time that a further row adds to a forward, as a share of one with a single row."""

NUM_SIMULATING = 2
"""Processes that simulate at the same time, where no cores are named."""
SIMULATED_TOKEN_S = 0.015
"""Computing time of a token in simulated time, on average; those of the widest trees take five times as long."""
SIMULATED_LOOKUP_TOKEN_S = 0.002
"""The same without a draft model: the target's text is known by then, and lookups are quick."""

_SPEEDUPS = {
    "off": {0.0: 1.0},
    "spacelike": {0.0: 1.0},
    "retrieval": {0.0: 2.8, 0.7: 1.4, 1.0: 1.1},
    "auto": {0.0: 5.0, 0.7: 3.0, 1.0: 2.2, 1.5: 1.0},
}
_DRAFTED = {0.0: 5.5, 0.7: 3.4, 1.0: 2.4, 1.5: 1.2}
_CEILINGS = {DRAFT: 10.0, DRAFT_C5: 3.0, DRAFT_C2_5: 2.0, DRAFT_SLOW: 1.0, DRAFT_UNTRAINED: 1.0}
_REPLAY_SPEEDUP = 1.5


def seconds_of(experiment: Experiment) -> float:
    """Estimate an experiment, its warm-up included, its services not."""
    if experiment.costs is not None:
        tokens = experiment.num_generations * experiment.max_tokens / len(experiment.contenders)
        return tokens * sum(map(_simulated_token_s, experiment.contenders))
    warm_up = sum(
        WARM_UP_TOKENS * TOKEN_S / _speedup(one, 0.0, experiment) + WARM_UP_PREFILL_S for one in experiment.contenders
    )
    if any(one.method == "auto" for one in experiment.contenders):
        tokens = AUTO_WARM_UPS * min(AUTO_WARM_UP_TOKENS, experiment.max_tokens)
        warm_up += sum(tokens * TOKEN_S / _interpolated(_SPEEDUPS["auto"], t) for t in experiment.temperatures)
    prefill = sum(_prefill_s(prompt.text) for prompt in experiment.prompts)
    decode = len(experiment.prompts) * experiment.max_tokens * TOKEN_S
    if experiment.off_at is not None:
        each = (prefill + decode) / len(experiment.prompts)
        return warm_up + len(experiment.off_at) * each + prefill + decode / _REPLAY_SPEEDUP
    measured = sum(
        prefill + decode * _shared(count) / (_speedup(one, temperature, experiment) if count == 1 else 1.0)
        for count in experiment.concurrencies
        for one in experiment.contenders
        for temperature in experiment.temperatures
    )
    return warm_up + experiment.repeats * measured


def total_seconds(experiments: Sequence[Experiment], sizes: MethodsSizes) -> float:
    """Estimate a run: the experiments, their services, the prior, and the speed ratios."""
    simulated = sum(seconds_of(one) for one in experiments if one.costs is not None) / NUM_SIMULATING
    experiments = [one for one in experiments if one.costs is None]
    drafts = {experiment.draft for experiment in experiments}
    total = (
        simulated
        + sum(map(seconds_of, experiments))
        + START_S * len({experiment.services for experiment in experiments})
    )
    total += MEASURE_S * len(drafts & {DRAFT_C5, DRAFT_C2_5})
    priors = {(one.services, one.prior_share) for one in experiments if one.prior_share}
    if priors:
        # Twice: what the prompts that are measured say must be known too, to keep it out.
        num_tokens = BUILD_ROUNDS * sizes.prior_prompts * sizes.prior_tokens
        total += START_S + num_tokens / BUILD_TOKENS_PER_S + LOAD_S * len(priors)
    return total


def _simulated_token_s(contender: Contender) -> float:
    has_draft_model = METHODS[contender.method].has_draft_model
    return SIMULATED_TOKEN_S if has_draft_model else SIMULATED_LOOKUP_TOKEN_S


def _speedup(contender: Contender, temperature: float, experiment: Experiment) -> float:
    if contender.method in _SPEEDUPS:
        usual = _interpolated(_SPEEDUPS[contender.method], temperature)
        return min(usual, _CEILINGS[experiment.draft]) if contender.method == "auto" else usual
    return min(_interpolated(_DRAFTED, temperature), _CEILINGS[experiment.draft])


def _shared(concurrency: int) -> float:
    """Return the time of a generation that runs with others, as a share of its time alone.

    A round of all of them is one forward of as many rows; drafts, which make it many more, gain little then.
    """
    return (1 + SHARED_ROW * (concurrency - 1)) / concurrency


def _interpolated(table: dict[float, float], temperature: float) -> float:
    """Return the value at the highest temperature of the table that is not above this one."""
    return table[max(known for known in table if known <= temperature)]


def _prefill_s(text: str) -> float:
    return PREFILL_TOKEN_S * len(text) / CHARACTERS_PER_TOKEN
