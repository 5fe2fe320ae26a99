"""The speed-ups that were measured, beside those that were predicted. Pure: blocks in, numbers out."""

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
"""Share of what is measured that a prediction may be off by."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Holds the speed-up of one contender at one temperature, over `off`, decoding alone."""

    method: str
    setting: str
    temperature: float
    predicted: float | None
    """None means that nothing was predicted: the two models were not at hand."""
    measured: float
    runs: tuple[float, ...]
    """The speed-up in each repeat alone."""

    @property
    def label(self) -> str:
        """Return method and setting in a few words."""
        return f"{self.method} {self.setting}".strip()

    @property
    def error(self) -> float | None:
        """Return the part of what was measured that the prediction is too high by; below 0 where it is too low."""
        return None if self.predicted is None else self.predicted / self.measured - 1

    def to_json(self) -> dict[str, Any]:
        """Return the object that results.json keeps."""
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
"""Seconds of a token by prompt and repeat."""


def token_times(blocks: Iterable[Block]) -> dict[Condition, dict[int, dict[int, float]]]:
    """Return the seconds of a token of each generation, by condition, prompt and repeat.

    The prefill is left out: it is as long under every method, and no prediction is made of it.
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
    """Hold every contender but `off` and the probes against its prediction, in the order of the first turns.

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
    """Divide the time of plain decoding by that of a contender, on the prompts that both finished.

    Of each prompt the median of the repeats counts: a busy moment of the machine falls on one turn, not on a whole
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
    """Claims of a prediction that it is within `TOLERANCE` of what was measured."""

    title: str
    """The pair's."""
    comparison: Comparison
    interval: tuple[float, float] | None = None
    """The size of the error lies within with 95 % confidence; None means not known."""

    @property
    def error(self) -> float:
        """The size of the error; there must be a prediction."""
        assert self.comparison.error is not None
        return abs(self.comparison.error)

    @property
    def verdict(self) -> str:
        """MET, MISSED, or INCONCLUSIVE where other prompts might have decided otherwise."""
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
    """Claims of every prediction that it is right.

    Args:
        title: The pair's.
        times: As `token_times` returns them.
        predictions: Of settings at temperatures.
        num_prompts: Prompts of the run, which are drawn anew for the intervals: predicted and measured are then of the
            same ones, and so is the best setting, which `auto` is held against.
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
