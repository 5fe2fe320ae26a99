"""Blocks to ratios and rates: what the claims are about. Pure.

Two contenders are compared repeat by repeat, on the prompts that both have finished; the median of the repeats counts.
None means that a value was not measured. `Measured.resampled` is the same with other prompts drawn from those that
there are: what an interval is estimated from.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from itertools import chain, repeat
from statistics import median
from typing import Any

import numpy as np

from outrider_bench.bootstrap import Multiplicities, draw
from outrider_bench.experiment import OFF
from outrider_bench.samples import Block, GenerationSample, Rounds, Sample
from outrider_bench.statistics import Row, rows_of
from outrider_cli.prompts import ALL_CATEGORIES

Finished = dict[tuple[int, int], GenerationSample]
"""Generations by (repeat, prompt)."""
Strata = tuple[tuple[int, ...], ...]
"""Units that can be drawn, by kind."""


class Measured:
    """Blocks by the name of their experiment."""

    def __init__(self, blocks: Mapping[str, Sequence[Block]]) -> None:
        self._blocks = blocks
        self._generations = {name: _by_condition(found) for name, found in blocks.items()}
        self._prompts = {name: _prompts_of(found) for name, found in blocks.items()}
        self._repeats = {name: _repeats_of(found) for name, found in blocks.items()}
        self._drawn_prompts: Mapping[str, Multiplicities] = {}
        """Maps experiments to how often each prompt was drawn; prompts that are not named count once."""
        self._drawn_repeats: Mapping[str, Multiplicities] = {}
        """The same of repeats, for what ran at once."""

    @property
    def can_vary(self) -> bool:
        """True if another draw can have other values: there is more than one prompt of a kind somewhere."""
        units = (*self._prompts.values(), *self._repeats.values())
        return any(len(stratum) > 1 for strata in units for stratum in strata)

    def resampled(self, random: np.random.Generator) -> Measured:
        """Return the same measurements, as if other prompts of the same kinds had been asked.

        Experiments with the same prompts get the same draw: what is claimed of two of them is claimed of the same
        prompts. Generations that ran at once share the machine and have no times of their own: for what is claimed of
        them repeats are drawn, of those turns alone.
        """
        found = copy(self)  # what was measured stays the same; how much each counts does not
        found._drawn_prompts = _draw_each(self._prompts, random)
        found._drawn_repeats = _draw_each(self._repeats, random)
        return found

    def labels(self, experiment: str) -> list[str]:
        """Name the contenders that have finished something, in the order of the first turns."""
        found = (
            block.condition.label
            for block in self._blocks.get(experiment, ())
            if any(sample.generation is not None for sample in block.samples)
        )
        return list(dict.fromkeys(found))

    def ratio(self, experiment: str, label: str, base: str, temperature: float, category: str = "") -> float | None:
        """Divide the tokens a second of one contender by those of another, prefill included."""
        ours = self._finished(experiment, label, temperature, category)
        return self._ratio(experiment, ours, self._finished(experiment, base, temperature, category))

    def batch_ratio(self, experiment: str, label: str, base: str, temperature: float, concurrency: int) -> float | None:
        """Divide the tokens a second of one contender by those of another, so many generations running at once.

        The time is that of all generations of a turn together; the median of the repeats counts.
        """
        ours = self._turns(experiment, label, temperature, concurrency)
        theirs = self._turns(experiment, base, temperature, concurrency)
        drawn = self._drawn_repeats.get(experiment, {})
        ratios = [[ours[key] / theirs[key]] * drawn.get(key, 1) for key in sorted(ours.keys() & theirs.keys())]
        found = list(chain.from_iterable(ratios))
        return median(found) if found else None

    def batch_beside_the_best(
        self, experiment: str, label: str, others: Iterable[str], temperature: float, concurrency: int
    ) -> tuple[float | None, str]:
        """Return what `beside_the_best` does, so many generations running at once."""
        ratios = {other: self.batch_ratio(experiment, label, other, temperature, concurrency) for other in others}
        return _least(ratios)

    def kept(self, experiment: str, base_experiment: str, label: str, temperature: float) -> float | None:
        """Divide the tokens a second of a contender by those it has in another experiment with the same prompts."""
        ours = self._finished(experiment, label, temperature)
        return self._ratio(experiment, ours, self._finished(base_experiment, label, temperature))

    def speedup(self, experiment: str, label: str, temperature: float, category: str = "") -> float | None:
        """Divide the tokens a second by those of `off`."""
        return self.ratio(experiment, label, OFF, temperature, category)

    def beside_the_best(
        self, experiment: str, label: str, others: Iterable[str], temperature: float, category: str = ""
    ) -> tuple[float | None, str]:
        """Divide the tokens a second of one contender by those of the fastest of the others.

        Returns:
            The ratio, None if none of the others was measured; and a remark that names the fastest, and those of the
            others that were not measured.
        """
        return _least({other: self.ratio(experiment, label, other, temperature, category) for other in others})

    def the_best(
        self, experiment: str, labels: Iterable[str], base: str, temperature: float
    ) -> tuple[float | None, str]:
        """Divide the tokens a second of the fastest of several contenders by those of another.

        Returns:
            The ratio, None if none of them was measured; and a remark that names the fastest.
        """
        ratios = {label: self.ratio(experiment, label, base, temperature) for label in labels}
        known = {label: ratio for label, ratio in ratios.items() if ratio is not None}
        best = max(known, key=lambda label: known[label], default="")
        return known.get(best), f"best: {best}" if best else ""

    def throughput(self, experiment: str, label: str, temperature: float) -> float | None:
        """Return the tokens a second, prefill included."""
        found = self._finished(experiment, label, temperature)
        values = [self._throughput(experiment, found, keys) for keys in self._by_repeat(experiment, found)]
        return median(values) if values else None

    def first_token_s(self, experiment: str, label: str, temperature: float) -> float | None:
        """Return the seconds until the first token, median of all generations."""
        found, drawn = self._finished(experiment, label, temperature), self._prompts_drawn(experiment)
        times = [repeat(each.ttft_s, drawn.get(prompt, 1)) for (_, prompt), each in found.items()]
        seconds = list(chain.from_iterable(times))
        return median(seconds) if seconds else None

    def tokens_per_forward(self, experiment: str, label: str, temperature: float) -> float | None:
        """Return the tokens that one forward of the target commits, the one it draws itself included."""
        rounds = self._rounds(experiment, label, temperature)
        num_rounds = sum(each.num_rounds for each in rounds)
        return 1 + sum(each.num_accepted for each in rounds) / num_rounds if num_rounds else None

    def hit_rate(self, experiment: str, label: str, temperature: float) -> float | None:
        """Return the share of commits whose next token the tree already had."""
        return _per_round(self._rounds(experiment, label, temperature), "num_hits")

    def ready_hit_rate(self, experiment: str, label: str, temperature: float) -> float | None:
        """Return the share of commits behind whose next token more was drafted already: SAGUARO's hits."""
        return _per_round(self._rounds(experiment, label, temperature), "num_ready_hits")

    def acceptance(self, experiment: str, label: str, temperature: float, category: str = "") -> float | None:
        """Return the share of chain tokens kept, of those that were compared with the target's."""
        return _acceptance(self._rounds(experiment, label, temperature, category))

    def per_token(self, experiment: str, label: str, temperature: float, count: str) -> float | None:
        """Divide a count of `Rounds` by the tokens of the texts; None where it was not counted.

        Args:
            experiment: Name of the experiment.
            label: The contender's.
            temperature: That of the texts.
            count: Name of the field.
        """
        found, drawn = self._finished(experiment, label, temperature), self._prompts_drawn(experiment)
        return _per_token(((each, drawn.get(prompt, 1)) for (_, prompt), each in found.items()), count)

    def accepted_from(self, experiment: str, label: str, temperature: float, sources: Collection[str]) -> float | None:
        """Divide the kept tokens of some sources ("prior", "rejected", ...) by the tokens of the texts."""
        found, drawn = self._finished(experiment, label, temperature), self._prompts_drawn(experiment)
        counted = [(each, drawn.get(prompt, 1)) for (_, prompt), each in found.items()]
        num_tokens = sum(len(each.token_ids) * times for each, times in counted)
        kept = sum(each.rounds.accepted_by_source.get(name, 0) * times for each, times in counted for name in sources)
        return kept / num_tokens if num_tokens else None

    def rows(self, experiment: str, num_prompts: int, repeats: int, num_off: int | None = None) -> list[Row]:
        """Return the rows of the generation suite, with what this suite asks beside them.

        Args:
            num_off: How many prompts `off` takes part in; None means all.
        """
        blocks = self._blocks.get(experiment, ())
        rows = rows_of(blocks, num_prompts, repeats)
        num_of_off = sum(len(block.samples) for block in blocks if block.condition.method == OFF)
        for row in rows:
            # `rows_of` expects every contender at every prompt.
            if row["method"] == OFF and num_off is not None:
                row["partial"] = num_of_off < num_off
            found = [sample.generation for sample in _samples_of(row, blocks) if sample.generation is not None]
            rounds = [generation.rounds for generation in found]
            row |= {
                "acceptance": _acceptance(rounds),
                "draft_rows_per_token": _per_token(((each, 1) for each in found), "num_draft_rows"),
                "withheld_nodes_per_token": _per_token(((each, 1) for each in found), "num_withheld_nodes"),
                "accepted_by_source": _summed(each.accepted_by_source for each in rounds),
                "decisions": _summed(each.decisions for each in rounds),
            }
        return rows

    def generations(self, experiment: str) -> dict[str, list[Any]]:
        """Return what was counted and timed of each finished generation, by column: what intervals are drawn from."""
        found = [
            (block, sample, sample.generation)
            for block in self._blocks.get(experiment, ())
            for sample in block.samples
            if sample.generation is not None
        ]
        return {
            "contender": [block.condition.label for block, _, _ in found],
            "temperature": [block.condition.temperature for block, _, _ in found],
            "concurrency": [block.condition.concurrency for block, _, _ in found],
            "repeat": [sample.repeat for _, sample, _ in found],
            "prompt": [sample.prompt_index for _, sample, _ in found],
            "category": [sample.category for _, sample, _ in found],
            "output_tokens": [len(generation.token_ids) for _, _, generation in found],
            "duration_s": [generation.duration_s for _, _, generation in found],
            "turn_s": [block.duration_s for block, _, _ in found],
            "rounds": [generation.rounds.num_rounds for _, _, generation in found],
            "accepted": [generation.rounds.num_accepted for _, _, generation in found],
            "judged": [generation.rounds.num_judged for _, _, generation in found],
            "hits": [generation.rounds.num_hits for _, _, generation in found],
            "ready_hits": [generation.rounds.num_ready_hits for _, _, generation in found],
            "draft_forwards": [generation.rounds.num_draft_forwards for _, _, generation in found],
            "draft_rows": [generation.rounds.num_draft_rows for _, _, generation in found],
            "withheld_nodes": [generation.rounds.num_withheld_nodes for _, _, generation in found],
            "tail_tokens": [generation.rounds.num_tail_tokens for _, _, generation in found],
            "phrase_tokens": [generation.rounds.num_phrase_tokens for _, _, generation in found],
        }

    def _rounds(self, experiment: str, label: str, temperature: float, category: str = "") -> list[Rounds]:
        """Return the rounds of each generation, as often as its prompt was drawn."""
        found, drawn = self._finished(experiment, label, temperature, category), self._prompts_drawn(experiment)
        times = (repeat(generation.rounds, drawn.get(prompt, 1)) for (_, prompt), generation in found.items())
        return list(chain.from_iterable(times))

    def _prompts_drawn(self, experiment: str) -> Multiplicities:
        return self._drawn_prompts.get(experiment, {})

    def _finished(self, experiment: str, label: str, temperature: float, category: str = "") -> Finished:
        found = self._generations.get(experiment, {}).get((label, temperature), {})
        return found.get(category, {})

    def _turns(self, experiment: str, label: str, temperature: float, concurrency: int) -> dict[int, float]:
        """Return the tokens a second of each repeat in which every generation came to its end."""
        tokens: Counter[int] = Counter()
        seconds: dict[int, float] = defaultdict(float)
        failed: set[int] = set()
        for block in self._blocks.get(experiment, ()):
            condition = block.condition
            if (condition.label, condition.temperature, condition.concurrency) != (label, temperature, concurrency):
                continue
            seconds[block.repeat] += block.duration_s
            for sample in block.samples:
                if sample.generation is None:
                    failed.add(block.repeat)
                else:
                    tokens[block.repeat] += len(sample.generation.token_ids)
        return {number: tokens[number] / seconds[number] for number in tokens if number not in failed}

    def _ratio(self, experiment: str, ours: Finished, theirs: Finished) -> float | None:
        # The same prompts in the same repeats: a text that only one has finished would compare easy with hard ones.
        # Ratios within a repeat, since the machine changes more from one repeat to the next than most methods differ.
        groups = self._by_repeat(experiment, [key for key in ours if key in theirs])
        ratios = [
            self._throughput(experiment, ours, keys) / self._throughput(experiment, theirs, keys) for keys in groups
        ]
        return median(ratios) if ratios else None

    def _by_repeat(self, experiment: str, keys: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Group generations by repeat, without those whose prompts were not drawn."""
        drawn = self._prompts_drawn(experiment)
        groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for key in sorted(keys):
            if drawn.get(key[1], 1):
                groups[key[0]].append(key)
        return list(groups.values())

    def _throughput(self, experiment: str, found: Finished, keys: Sequence[tuple[int, int]]) -> float:
        drawn = self._prompts_drawn(experiment)
        times = [drawn.get(prompt, 1) for _, prompt in keys]
        num_tokens = sum(len(found[key].token_ids) * count for key, count in zip(keys, times, strict=True))
        return num_tokens / sum(found[key].duration_s * count for key, count in zip(keys, times, strict=True))


def _least(ratios: Mapping[str, float | None]) -> tuple[float | None, str]:
    """Return the least of the ratios by some contenders, which is that by the best of them; and who that is."""
    known = {other: ratio for other, ratio in ratios.items() if ratio is not None}
    if not known:
        return None, ""
    best = min(known, key=lambda other: known[other])
    missing = ", ".join(other for other in ratios if other not in known)
    return known[best], f"best of them: {best}" + (f"; not measured: {missing}" if missing else "")


def _by_condition(blocks: Iterable[Block]) -> Mapping[tuple[str, float], Mapping[str, Finished]]:
    """Return generations that ran alone, by contender and temperature, then by category; the category "" has all."""
    found: dict[tuple[str, float], dict[str, Finished]] = defaultdict(lambda: defaultdict(dict))
    for block in blocks:
        if block.condition.concurrency > 1:
            continue
        of_condition = found[block.condition.label, block.condition.temperature]
        for sample in block.samples:
            if sample.generation is not None:
                for category in {"", sample.category}:
                    of_condition[category][sample.repeat, sample.prompt_index] = sample.generation
    return found


def _prompts_of(blocks: Iterable[Block]) -> Strata:
    """Return the prompts by category: kinds that are compared apart are drawn apart."""
    prompts: dict[str, set[int]] = defaultdict(set)
    for sample in chain.from_iterable(block.samples for block in blocks):
        prompts[sample.category].add(sample.prompt_index)
    return tuple(tuple(sorted(indices)) for _, indices in sorted(prompts.items()))


def _repeats_of(blocks: Iterable[Block]) -> Strata:
    """Return the repeats of the turns in which generations ran at once."""
    repeats = {block.repeat for block in blocks if block.condition.concurrency > 1}
    return (tuple(sorted(repeats)),) if repeats else ()


def _draw_each(units: Mapping[str, Strata], random: np.random.Generator) -> dict[str, Multiplicities]:
    """Draw the units of each experiment; experiments with the same ones get the same draw."""
    draws = {strata: draw(strata, random) for strata in dict.fromkeys(units.values())}
    return {name: draws[strata] for name, strata in units.items()}


def _samples_of(row: Row, blocks: Iterable[Block]) -> list[Sample]:
    """Return the samples that a row is about."""
    names = ("method", "setting", "temperature", "concurrency", "rtt_ms")
    return [
        sample
        for block in blocks
        if all(getattr(block.condition, name) == row[name] for name in names)
        for sample in block.samples
        if row["category"] in (ALL_CATEGORIES, sample.category)
    ]


def _acceptance(rounds: Iterable[Rounds]) -> float | None:
    rounds = list(rounds)
    num_judged = sum(each.num_judged or 0 for each in rounds)
    return sum(each.num_accepted for each in rounds) / num_judged if num_judged else None


def _per_round(rounds: Iterable[Rounds], count: str) -> float | None:
    """Divide a count of `Rounds` by the rounds of the generations in which it was counted."""
    counted = [(getattr(each, count), each.num_rounds) for each in rounds]
    known = [(amount, num_rounds) for amount, num_rounds in counted if amount is not None]
    num_rounds = sum(each for _, each in known)
    return sum(amount for amount, _ in known) / num_rounds if num_rounds else None


def _per_token(generations: Iterable[tuple[GenerationSample, int]], count: str) -> float | None:
    """Divide a count of `Rounds` by the tokens of the texts, each generation as often as it says."""
    counted = [(getattr(each.rounds, count), len(each.token_ids), times) for each, times in generations]
    known = [(amount * times, num_tokens * times) for amount, num_tokens, times in counted if amount is not None]
    num_tokens = sum(length for _, length in known)
    return sum(amount for amount, _ in known) / num_tokens if num_tokens else None


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)
