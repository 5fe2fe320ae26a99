"""Settings that are predicted and measured: a method and the length of its chains, and what to type for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider_bench.bootstrap import Multiplicities
from outrider_bench.experiment import OFF, Contender, contender

METHODS = ("speculative", "pearl", "card", "saguaro", "double", "best-first")
"""Methods that draft with a model. Spacelike does not: it lives on earlier outputs, of which a pair has none."""
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Setting:
    """A method, and most tokens of a path that one round verifies."""

    method: str
    num_speculative_tokens: int

    @property
    def contender(self) -> Contender:
        """Return the setting as a contender; all else is as the server has it."""
        count = self.num_speculative_tokens
        return contender(self.method, f"gamma = {count}", num_speculative_tokens=count)

    @property
    def flags(self) -> str:
        """Return the flags of `outrider generate` that ask for it."""
        return flags_of(self.contender)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Holds what a setting should bring at a temperature."""

    setting: Setting
    temperature: float
    tokens_per_round: float
    """The target's own token included."""
    plain_ms: float
    """Time of a text under `off`, decoding alone; texts are equally long."""
    text_ms: tuple[float, ...]
    """Time of the text of each prompt under the setting, decoding alone."""

    @property
    def speedup(self) -> float:
        """Return the speed-up over `off`, decoding alone."""
        return self.plain_ms * len(self.text_ms) / sum(self.text_ms)

    def speedup_on(self, drawn: Multiplicities) -> float:
        """Return the speed-up on a draw of the prompts, by their indices."""
        times_ms = [count * self.text_ms[index] for index, count in drawn.items()]
        return self.plain_ms * sum(drawn.values()) / sum(times_ms)

    def to_json(self) -> dict[str, Any]:
        """Return the object that results.json keeps."""
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
    """Return the flags of `outrider generate` that ask for what a contender asks for."""
    names = {"method": "--method", "num_speculative_tokens": "--num-speculative-tokens"}
    return " ".join(f"{names[name]} {value}" for name, value in one.options.items())


def best_of(predictions: Iterable[Prediction], temperature: float) -> Prediction | None:
    """Return the fastest setting at a temperature, the shortest chains among equals; None if `off` is faster."""
    found = [one for one in predictions if one.temperature == temperature and one.speedup > 1]
    return max(found, key=lambda one: (one.speedup, -one.setting.num_speculative_tokens), default=None)


def measured_settings(predictions: Sequence[Prediction], temperature: float) -> list[Setting]:
    """Choose what to measure at a temperature: the best, the runner-up, and settings that should be worse.

    These are the best setting of the best two methods, that of draft-then-verify, and the best method with the shortest
    chains of the grid: a prediction that is right about the best alone would not say which is the best.
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
    """Return the speed-up that was predicted for a contender; None if none was.

    `auto` should be as fast as the best, and never slower than `off`.

    Args:
        predictions: Of settings at temperatures.
        method: The contender's.
        setting: The contender's, as its condition has it.
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
