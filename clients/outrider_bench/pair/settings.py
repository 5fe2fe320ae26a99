"""Settings that are predicted and measured: a method, the length of its chains, and the flags for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider_bench.bootstrap import Multiplicities
from outrider_bench.experiment import OFF, Contender, contender

METHODS = ("speculative", "pearl", "card", "saguaro", "double", "best-first")
"""Methods that draft with a model. Spacelike does not: it needs earlier outputs, and a pair has none."""
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Setting:
    """A method, and the maximum tokens of a path that one round verifies."""

    method: str
    num_speculative_tokens: int

    @property
    def contender(self) -> Contender:
        """Returns the setting as a contender, with the server's defaults for everything else."""
        count = self.num_speculative_tokens
        return contender(self.method, f"gamma = {count}", num_speculative_tokens=count)

    @property
    def flags(self) -> str:
        """Returns the flags of `outrider generate` for it."""
        return flags_of(self.contender)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted effect of a setting at a temperature."""

    setting: Setting
    temperature: float
    tokens_per_round: float
    """Includes the target's own token."""
    plain_ms: float
    """Time of a text under `off`, decoding alone; all texts are equally long."""
    text_ms: tuple[float, ...]
    """Time of the text of each prompt under the setting, decoding alone."""

    @property
    def speedup(self) -> float:
        """Returns the speed-up over `off`, decoding alone."""
        return self.plain_ms * len(self.text_ms) / sum(self.text_ms)

    def speedup_on(self, drawn: Multiplicities) -> float:
        """Returns the speed-up on a draw of the prompts, by their indices."""
        times_ms = [count * self.text_ms[index] for index, count in drawn.items()]
        return self.plain_ms * sum(drawn.values()) / sum(times_ms)

    def to_json(self) -> dict[str, Any]:
        """Returns the object that results.json keeps."""
        return {
            "method": self.setting.method,
            "num_speculative_tokens": self.setting.num_speculative_tokens,
            "temperature": self.temperature,
            "tokens_per_round": self.tokens_per_round,
            "speedup": self.speedup,
            "plain_ms": self.plain_ms,
            "text_ms": list(self.text_ms),
        }


def flags_of(one: Contender) -> str:
    """Returns the flags of `outrider generate` for a contender."""
    names = {"method": "--method", "num_speculative_tokens": "--num-speculative-tokens"}
    return " ".join(f"{names[name]} {value}" for name, value in one.options.items())


def best_of(predictions: Iterable[Prediction], temperature: float) -> Prediction | None:
    """Returns the fastest setting at a temperature, among equals the one with the shortest chains; None if `off`
    wins."""
    found = [one for one in predictions if one.temperature == temperature and one.speedup > 1]
    return max(found, key=lambda one: (one.speedup, -one.setting.num_speculative_tokens), default=None)


def measured_settings(predictions: Sequence[Prediction], temperature: float) -> list[Setting]:
    """Chooses what to measure at a temperature: the best, the runner-up, and settings that should be worse.

    These are the best settings of the best two methods, that of draft-then-verify, and the best method with the
    shortest chains of the grid: a prediction that is right only about the best would not tell which one that is.
    """
    here = [one for one in predictions if one.temperature == temperature]
    by_method: dict[str, Prediction] = {}
    for one in sorted(here, key=lambda each: -each.speedup):
        by_method.setdefault(one.setting.method, one)
    leaders = list(by_method.values())
    if not leaders:
        return []
    chosen = [one.setting for one in leaders[:2]]
    chosen += [one.setting for one in leaders if one.setting.method == METHODS[0]]
    shortest = min(one.setting.num_speculative_tokens for one in here)
    chosen.append(Setting(leaders[0].setting.method, shortest))
    return list(dict.fromkeys(chosen))


def predicted_for(
    predictions: Iterable[Prediction],
    method: str,
    setting: str,
    temperature: float,
    drawn: Multiplicities | None = None,
) -> float | None:
    """Returns the predicted speed-up of a contender; None if there is none.

    `auto` should be as fast as the best setting, and never slower than `off`.

    Args:
        predictions: Of settings at temperatures.
        method: The contender's.
        setting: The contender's, as in its condition.
        temperature: The contender's.
        drawn: How often each prompt counts, by its index; None means once.
    """
    labels: dict[tuple[str, str], float] = {}
    for one in predictions:
        if one.temperature == temperature:
            label = (one.setting.method, one.setting.contender.setting)
            labels[label] = one.speedup if drawn is None else one.speedup_on(drawn)
    if method == AUTO:
        return max(1.0, *labels.values()) if labels else None
    return labels.get((method, setting), 1.0 if method == OFF else None)
