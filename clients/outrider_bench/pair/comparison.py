"""Measured speed-ups compared with predicted ones. Pure: blocks in, numbers out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from outrider_bench.bootstrap import Multiplicities, draw, intervals_of
from outrider_bench.experiment import OFF
from outrider_bench.pair.costs import PROBE
from outrider_bench.pair.settings import Prediction, predicted_for
from outrider_bench.samples import Block, Condition

MET, MISSED, INCONCLUSIVE = "met", "missed", "inconclusive"
TOLERANCE = 0.15
"""Share of the measured value by which a prediction may be off."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The speed-up of one contender at one temperature, over `off`, decoding alone."""

    method: str
    setting: str
    temperature: float
    predicted: float | None
    """None means that nothing was predicted, because the two models were not at hand."""
    measured: float
    runs: tuple[float, ...]
    """The speed-up in each repeat."""

    @property
    def label(self) -> str:
        """Returns method and setting in a few words."""
        return f"{self.method} {self.setting}".strip()

    @property
    def error(self) -> float | None:
        """Returns by which share of the measured value the prediction is too high; negative if it is too low."""
        return None if self.predicted is None else self.predicted / self.measured - 1

    def to_json(self) -> dict[str, Any]:
        """Returns the object that results.json keeps."""
        return {
            "method": self.method,
            "setting": self.setting,
            "temperature": self.temperature,
            "predicted": self.predicted,
            "measured": self.measured,
            "measured_runs": list(self.runs),
            "error": self.error,
        }


TokenTimes = Mapping[int, Mapping[int, float]]
"""Seconds per token by prompt and repeat."""


def token_times(blocks: Iterable[Block]) -> dict[Condition, dict[int, dict[int, float]]]:
    """Returns the seconds per token of each generation, by condition, prompt and repeat.

    The prefill is excluded: it takes equally long under every method, and is not predicted.
    """
    times: dict[Condition, dict[int, dict[int, float]]] = {}
    for block in blocks:
        for sample in block.samples:
            if (made := sample.generation) is not None and made.num_decoded:
                of_prompts = times.setdefault(block.condition, {})
                of_prompts.setdefault(sample.prompt_index, {})[block.repeat] = made.decode_s / made.num_decoded
    return times


def comparisons_of(
    times: Mapping[Condition, TokenTimes], predictions: Sequence[Prediction], drawn: Multiplicities | None = None
) -> list[Comparison]:
    """Compares every contender except `off` and the probes with its prediction, in the order of the first turns.

    Args:
        times: As `token_times` returns them.
        predictions: Of settings at temperatures.
        drawn: How often each prompt counts, by its index, on both sides; None means once.
    """
    contenders = [one for one in times if one.method != OFF and not one.setting.startswith(PROBE)]
    found = []
    for one in sorted(contenders, key=lambda condition: condition.temperature):
        ours, plain = times[one], times.get(Condition(OFF, "", one.temperature), {})
        if speedup := speedup_of(ours, plain, drawn):
            repeats = sorted({repeat for of_prompt in ours.values() for repeat in of_prompt})
            alone = ((_only(ours, repeat), _only(plain, repeat)) for repeat in repeats)
            runs = tuple(ratio for sides in alone if (ratio := speedup_of(*sides, drawn)))
            predicted = predicted_for(predictions, one.method, one.setting, one.temperature, drawn)
            found.append(Comparison(one.method, one.setting, one.temperature, predicted, speedup, runs))
    return found


def speedup_of(ours: TokenTimes, plain: TokenTimes, drawn: Multiplicities | None = None) -> float | None:
    """Divides the time of plain decoding by that of a contender, on the prompts that both finished.

    The median of the repeats counts for each prompt: a busy moment of the machine affects one turn, not a whole
    repeat. None means that they share no prompt, or that none of those was drawn.
    """
    shared = sorted(index for index in ours.keys() & plain.keys() if ours[index] and plain[index])
    counts = [1 if drawn is None else drawn[index] for index in shared]
    if not any(counts):
        return None
    seconds = [
        sum(count * median(side[index].values()) for index, count in zip(shared, counts, strict=True))
        for side in (ours, plain)
    ]
    return seconds[1] / seconds[0]


def _only(times: TokenTimes, repeat: int) -> TokenTimes:
    return {index: {repeat: of_prompt[repeat]} for index, of_prompt in times.items() if repeat in of_prompt}


@dataclass(frozen=True, slots=True)
class Claim:
    """A prediction's claim to be within `TOLERANCE` of what was measured."""

    title: str
    """The pair's title."""
    comparison: Comparison
    interval: tuple[float, float] | None = None
    """95 % confidence interval of the size of the error; None means not known."""

    @property
    def error(self) -> float:
        """The size of the error; there must be a prediction."""
        assert self.comparison.error is not None
        return abs(self.comparison.error)

    @property
    def verdict(self) -> str:
        """MET, MISSED, or INCONCLUSIVE if other prompts might have decided otherwise."""
        if self.interval is not None and self.interval[0] <= TOLERANCE <= self.interval[1]:
            return INCONCLUSIVE
        return MET if self.error <= TOLERANCE else MISSED

    def to_json(self) -> dict[str, Any]:
        """Returns the object that results.json keeps."""
        return {
            "pair": self.title,
            **self.comparison.to_json(),
            "error": self.error,
            "interval": None if self.interval is None else list(self.interval),
            "verdict": self.verdict,
        }


def claims_of(
    title: str,
    times: Mapping[Condition, TokenTimes],
    predictions: Sequence[Prediction],
    num_prompts: int,
    seed: int,
) -> list[Claim]:
    """Makes a claim for every prediction.

    Args:
        title: The pair's.
        times: As `token_times` returns them.
        predictions: Of settings at temperatures.
        num_prompts: Prompts of the run, which are drawn again for the intervals. Predicted and measured values then use
            the same ones, and so does the best setting, with which `auto` is compared.
        seed: Of the draws.
    """
    known = [one for one in comparisons_of(times, predictions) if one.predicted is not None]

    def drawn(random: np.random.Generator) -> list[float | None]:
        found = comparisons_of(times, predictions, draw([range(num_prompts)], random))
        errors = {(one.label, one.temperature): one.error for one in found}
        sizes = [errors.get((one.label, one.temperature)) for one in known]
        return [None if size is None else abs(size) for size in sizes]

    intervals = intervals_of(len(known), drawn, seed)
    return [Claim(title, one, interval) for one, interval in zip(known, intervals, strict=True)]
