"""Claims about structured output: what a mask costs, what drafts bring under one, and what forced text brings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from outrider_bench.experiment import OFF, Contender, Experiment, label_of
from outrider_bench.measured import Measured
from outrider_bench.result import Measurement, at_least, reported, share_of
from outrider_bench.samples import Block, GenerationSample
from outrider_bench.suites.structured.beginnings import Beginnings
from outrider_bench.suites.structured.descriptions import ANY_TEXT
from outrider_bench.suites.structured.experiments import (
    ASKED,
    ASKED_METHODS,
    FILTERED,
    FORCED_METHODS,
    FORCING,
    GENERAL,
    KEPT_PARAMETERS,
    MASK,
    TOP_P,
    settings_kept,
)

Key: TypeAlias = tuple[float, int, int]
"""Temperature, repeat and prompt of a text."""
KEPT_SPEED = 0.9
"""Share of its speed that a method must keep with a mask."""
KEPT_GAIN = 1.0
"""Share of its gain over `off` that a method must keep with a mask."""
FORCED_SPEEDUP = 2.0
FEWEST_SAME = 4
"""Texts that must be the same with and without a mask for a claim about them."""


@dataclass(frozen=True, slots=True)
class StructuredEvidence:
    """Holds all that the claims are about."""

    measured: Measured
    """Holds all texts."""
    same: Measured
    """Holds those texts alone that are the ones of `off` without a mask."""
    experiments: Sequence[Experiment]
    num_same: Mapping[tuple[str, str, float], tuple[int, int]]
    """Texts that are the same, and all texts, by experiment, label of the contender and temperature."""
    beginnings: Beginnings

    def resampled(self, random: np.random.Generator) -> StructuredEvidence:
        """Return the same evidence, as if other prompts of the same kinds had been asked."""
        return replace(self, measured=self.measured.resampled(random), same=self.same.resampled(random))


@dataclass(frozen=True, slots=True)
class MaskCost:
    """Says what a mask costs a method, on texts that it does not change."""

    experiment: str
    temperature: float
    method: str
    setting: str
    """Name of the mask."""
    kept_speed: float | None
    """Tokens a second with the mask by those without."""
    kept_gain: float | None
    """Speed-up over `off` with the mask by that without; None for `off`."""
    num_same: int
    num_texts: int

    def to_json(self) -> dict[str, Any]:
        """Return the object that results.json keeps."""
        return asdict(self)


def same_texts(blocks: Sequence[Block]) -> tuple[list[Block], dict[tuple[str, float], tuple[int, int]]]:
    """Select the generations whose text is that of `off` without a mask.

    Returns:
        Their blocks; and how many they are and of how many, by the label of the contender and temperature.
    """
    reference = {key: made.token_ids for block, key, made in _texts(blocks) if block.condition.label == OFF}
    kept = list[Block]()
    counts: dict[tuple[str, float], tuple[int, int]] = {}
    for block, key, made in _texts(blocks):
        is_same = made.token_ids == reference.get(key)
        place = (block.condition.label, block.condition.temperature)
        num_same, num_texts = counts.get(place, (0, 0))
        counts[place] = (num_same + is_same, num_texts + 1)
        if is_same:
            kept.append(block)
    return kept, counts


def _texts(blocks: Sequence[Block]) -> Iterator[tuple[Block, Key, GenerationSample]]:
    """Yield the generations that came to their end; each is alone in its block."""
    for block in blocks:
        for sample in block.samples:
            if sample.generation is not None:
                yield block, (block.condition.temperature, sample.repeat, sample.prompt_index), sample.generation


def evidence_of(
    blocks: Mapping[str, Sequence[Block]], experiments: Sequence[Experiment], beginnings: Beginnings
) -> StructuredEvidence:
    """Select what the claims are about."""
    selected = {name: same_texts(found) for name, found in blocks.items()}
    num_same = {
        (name, *place): counts
        for name, (_, of_experiment) in selected.items()
        for place, counts in of_experiment.items()
    }
    same = Measured({name: kept for name, (kept, _) in selected.items()})
    return StructuredEvidence(Measured(blocks), same, experiments, num_same, beginnings)


def mask_costs(evidence: StructuredEvidence) -> list[MaskCost]:
    """Return the cost of each mask for each method."""
    found = []
    for experiment in evidence.experiments:
        if experiment.name in (MASK, FILTERED):
            masked = [one for one in experiment.contenders if one.setting]
            found += [
                _cost_of(evidence, experiment, one.method, one.setting, temperature)
                for temperature in experiment.temperatures
                for one in masked
            ]
    return found


def _cost_of(
    evidence: StructuredEvidence, experiment: Experiment, method: str, setting: str, temperature: float
) -> MaskCost:
    name, label = experiment.name, f"{method} {setting}"
    kept = evidence.same.ratio(name, label, method, temperature)
    kept_by_off = evidence.same.ratio(name, f"{OFF} {setting}", OFF, temperature)
    counts = evidence.num_same.get((name, label, temperature), (0, 0))
    # Both speed-ups are of the same texts, so their ratio is that of what a mask costs either.
    kept_gain = None if method == OFF else share_of(kept, kept_by_off)
    return MaskCost(name, temperature, method, setting, kept, kept_gain, *counts)


def partings(evidence: StructuredEvidence, *, is_exact: bool) -> dict[str, str]:
    """Find texts that are not what they must be; with rows that are not exact, of `off` alone.

    Returns:
        Sentences about them, by experiment, contender and temperature.
    """
    found = {}
    for experiment, one, temperature, (num_same, num_texts) in _compared(evidence):
        if num_same < num_texts and (is_exact or one.method == OFF):
            what = f"{experiment.title}: {label_of(one)}, T = {temperature:g}"
            found[what] = f"{num_texts - num_same} of {num_texts} texts are not those of {OFF}"
    return found


def agreements(evidence: StructuredEvidence) -> list[str]:
    """Say of each experiment how many texts were compared with those of `off`, and are the same."""
    totals: dict[str, list[int]] = {}
    for experiment, _, _, counts in _compared(evidence):
        total = totals.setdefault(experiment.title, [0, 0])
        for place, count in enumerate(counts):
            total[place] += count
    return [f"{title}: {same} of {texts} texts are those of {OFF}" for title, (same, texts) in totals.items()]


def _compared(evidence: StructuredEvidence) -> Iterator[tuple[Experiment, Contender, float, tuple[int, int]]]:
    """Yield those whose texts must be those of `off` without a setting, and the numbers of same and of all texts."""
    for experiment in evidence.experiments:
        for one in experiment.contenders:
            if label_of(one) == OFF or (one.setting and one.setting not in settings_kept(experiment.name)):
                continue
            for temperature in experiment.temperatures:
                counts = evidence.num_same.get((experiment.name, label_of(one), temperature))
                if counts is not None:
                    yield experiment, one, temperature, counts


def different_texts(blocks: Sequence[Block]) -> list[tuple[int, ...]]:
    """Return the token ids of all texts, each once."""
    return list(dict.fromkeys(made.token_ids for _, _, made in _texts(blocks)))


def claims_of(parts: Sequence[str], evidence: StructuredEvidence) -> list[Measurement]:
    """Return the claims of these parts, and what is reported beside them."""
    return [one for part in parts for one in _CLAIMS[part](evidence)]


def _masks(evidence: StructuredEvidence) -> list[Measurement]:
    costs = mask_costs(evidence)
    claims = []
    for cost in costs:
        filters = f", top_p = {TOP_P:g}" if cost.experiment == FILTERED else ""
        what = f"T = {cost.temperature:g}{filters}, {cost.setting}: {cost.method}"
        remark = "" if cost.num_same == cost.num_texts else f"{cost.num_same} of {cost.num_texts} texts are the same"
        is_known = cost.num_same >= min(FEWEST_SAME, cost.num_texts)
        speed = cost.kept_speed if is_known else None
        claims.append(at_least("mask", f"{what} with the mask by without", speed, KEPT_SPEED, remark))
        if cost.setting == ANY_TEXT and cost.method != OFF:
            gain = cost.kept_gain if is_known else None
            claims.append(at_least("mask", f"{what} by {OFF} with the mask, by that without", gain, KEPT_GAIN))
    return claims


def _forced(evidence: StructuredEvidence) -> list[Measurement]:
    return [
        at_least(
            FORCING,
            f"T = {temperature:g}: {method} by {OFF}",
            evidence.measured.speedup(FORCING, method, temperature),
            FORCED_SPEEDUP,
        )
        for temperature in _temperatures(evidence, FORCING)
        for method in FORCED_METHODS
    ]


def _schemas(evidence: StructuredEvidence) -> list[Measurement]:
    measured = evidence.measured
    return [
        reported(GENERAL, f"T = {temperature:g}: {label} by {OFF}", measured.speedup(GENERAL, label, temperature))
        for temperature in _temperatures(evidence, GENERAL)
        for label in measured.labels(GENERAL)
        if label != OFF
    ]


def _texts_begun(evidence: StructuredEvidence) -> list[Measurement]:
    return evidence.beginnings.measurements("texts")


def _parameters(evidence: StructuredEvidence) -> list[Measurement]:
    return [
        reported(
            ASKED,
            f"T = {temperature:g}: {method} with {setting} by without",
            evidence.measured.ratio(ASKED, f"{method} {setting}", method, temperature),
        )
        for temperature in _temperatures(evidence, ASKED)
        for setting in KEPT_PARAMETERS
        for method in ASKED_METHODS
    ]


def _temperatures(evidence: StructuredEvidence, name: str) -> tuple[float, ...]:
    return next((one.temperatures for one in evidence.experiments if one.name == name), ())


_CLAIMS: Mapping[str, Callable[[StructuredEvidence], list[Measurement]]] = {
    "mask": _masks,
    "forced": _forced,
    "schemas": _schemas,
    "texts": _texts_begun,
    "parameters": _parameters,
}
