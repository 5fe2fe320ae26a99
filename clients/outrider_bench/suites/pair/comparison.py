"""The speed-ups that were measured, beside those that were predicted. Pure: blocks in, numbers out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from outrider_bench.experiment import OFF
from outrider_bench.result import Measurement, at_most
from outrider_bench.samples import Block
from outrider_bench.suites.pair.costs import PROBE
from outrider_bench.suites.pair.settings import predicted_for

PART = "prediction"
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


def comparisons_of(blocks: Sequence[Block], predictions: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Hold every contender but `off` and the probes against its prediction, in the order of the first turns."""
    conditions = dict.fromkeys(
        block.condition
        for block in blocks
        if block.condition.method != OFF and not block.condition.setting.startswith(PROBE)
    )
    times, found = _token_times(blocks), []
    for one in sorted(conditions, key=lambda condition: condition.temperature):
        ours, plain = (times.get((*name, one.temperature), {}) for name in ((one.method, one.setting), (OFF, "")))
        if speedup := speedup_of(ours, plain):
            repeats = sorted({repeat for of_prompt in ours.values() for repeat in of_prompt})
            alone = [[_only(side, repeat) for side in (ours, plain)] for repeat in repeats]
            runs = tuple(ratio for sides in alone if (ratio := speedup_of(*sides)))
            predicted = predicted_for(predictions, one.method, one.setting, one.temperature)
            found.append(Comparison(one.method, one.setting, one.temperature, predicted, speedup, runs))
    return found


TokenTimes = Mapping[int, Mapping[int, float]]
"""Seconds of a token by prompt and repeat."""


def speedup_of(ours: TokenTimes, plain: TokenTimes) -> float | None:
    """Divide the time of plain decoding by that of a contender, on the prompts that both finished.

    Of each prompt the median of the repeats counts: a busy moment of the machine falls on one turn, not on a whole
    repeat. None means that they share no prompt.
    """
    shared = sorted(index for index in ours.keys() & plain.keys() if ours[index] and plain[index])
    if not shared:
        return None
    seconds = [sum(median(side[index].values()) for index in shared) for side in (ours, plain)]
    return seconds[1] / seconds[0]


def _token_times(blocks: Iterable[Block]) -> dict[tuple[str, str, float], dict[int, dict[int, float]]]:
    """Return the seconds of a token of each generation, by contender and temperature, prompt and repeat.

    The prefill is left out: it is as long under every method, and no prediction is made of it.
    """
    times: dict[tuple[str, str, float], dict[int, dict[int, float]]] = {}
    for block in blocks:
        one = block.condition
        for sample in block.samples:
            if (made := sample.generation) is not None and made.num_decoded:
                of_prompts = times.setdefault((one.method, one.setting, one.temperature), {})
                of_prompts.setdefault(sample.prompt_index, {})[block.repeat] = made.decode_s / made.num_decoded
    return times


def _only(times: TokenTimes, repeat: int) -> TokenTimes:
    return {index: {repeat: of_prompt[repeat]} for index, of_prompt in times.items() if repeat in of_prompt}


def claims_of(title: str, comparisons: Iterable[Comparison]) -> list[Measurement]:
    """Claim of every prediction that it is within `TOLERANCE` of what was measured."""
    return [
        at_most(
            PART,
            f"{title}, T = {one.temperature:g}, {one.label}: prediction off by",
            abs(one.error),
            TOLERANCE,
            f"predicted {one.predicted:.2f}x, measured {one.measured:.2f}x",
        )
        for one in comparisons
        if one.error is not None
    ]
