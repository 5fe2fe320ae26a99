"""From blocks to the numbers of claims. Pure.

Two contenders are compared repeat by repeat, on the prompts that both have finished; the median of the repeats counts.
None means that a value was not measured. `Measured.resampled` gives the same measurements with other prompts drawn
from the existing ones, which intervals are estimated from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import chain, repeat
from statistics import median

import numpy as np

from outrider_bench.bootstrap import Multiplicities, draw
from outrider_bench.papers.claims import ACCEPTANCE, HITS, READY_HITS, SPEED, TOKENS, Claim
from outrider_bench.samples import Block, GenerationSample, Rounds

Finished = Mapping[tuple[int, int], GenerationSample]
"""Generations by (repeat, prompt)."""
Strata = tuple[tuple[int, ...], ...]
"""Units that can be drawn, by kind."""


class Measured:
    """Blocks by the name of their experiment."""

    def __init__(self, blocks: Mapping[str, Sequence[Block]]) -> None:
        self._blocks = blocks
        self._prompts = {name: _prompts_of(found) for name, found in blocks.items()}
        self._repeats = {name: _repeats_of(found) for name, found in blocks.items()}
        self._drawn_prompts: Mapping[str, Multiplicities] = {}
        """Maps experiments to how often each prompt was drawn; prompts that are not named count once."""
        self._drawn_repeats: Mapping[str, Multiplicities] = {}
        """The same for repeats, for generations that ran at once."""
        self._finished_by_key: dict[tuple[str, str, float, str], Finished] = {}

    def resampled(self, random: np.random.Generator) -> Measured:
        """Returns the same measurements, as if other prompts of the same kinds had been used.

        Experiments with the same prompts get the same draw. Generations that ran at once have no times of their own, so
        their claims are drawn by repeats.
        """
        found = copy(self)  # the measurements stay the same; only their weights change
        found._drawn_prompts = _draw_each(self._prompts, random)
        found._drawn_repeats = _draw_each(self._repeats, random)
        return found

    def value_of(self, claim: Claim) -> float | None:
        """Returns the value of a claim: a metric of its contender, divided by that of its base."""
        if claim.metric == SPEED:
            if claim.concurrency > 1:
                return self._batch_ratio(claim)
            return self._ratio(claim)
        ours = self._rate(claim, claim.contender)
        if not claim.base:
            return ours
        theirs = self._rate(claim, claim.base)
        return ours / theirs if ours is not None and theirs else None

    def _ratio(self, claim: Claim) -> float | None:
        """Divides the tokens per second of two contenders: within a repeat, on the same prompts."""
        ours, theirs = (self._finished(claim, label) for label in (claim.contender, claim.base))
        drawn = self._drawn_prompts.get(claim.experiment, {})
        seconds: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for key in sorted(ours.keys() & theirs.keys()):
            number, prompt = key
            for side, found in enumerate((ours, theirs)):
                # Per token, because texts may end at different lengths.
                made = found[key]
                seconds[number][side] += drawn.get(prompt, 1) * made.duration_s / max(1, len(made.token_ids))
        ratios = [theirs_s / ours_s for ours_s, theirs_s in seconds.values() if ours_s]
        return median(ratios) if ratios else None

    def _batch_ratio(self, claim: Claim) -> float | None:
        ours, theirs = (self._turns(claim, label) for label in (claim.contender, claim.base))
        drawn = self._drawn_repeats.get(claim.experiment, {})
        ratios = [[ours[key] / theirs[key]] * drawn.get(key, 1) for key in sorted(ours.keys() & theirs.keys())]
        found = list(chain.from_iterable(ratios))
        return median(found) if found else None

    def _rate(self, claim: Claim, label: str) -> float | None:
        found, drawn = self._finished(claim, label), self._drawn_prompts.get(claim.experiment, {})
        each = (repeat(made.rounds, drawn.get(prompt, 1)) for (_, prompt), made in found.items())
        return _RATES[claim.metric](list(chain.from_iterable(each)))

    def _finished(self, claim: Claim, label: str) -> Finished:
        key = claim.experiment, label, claim.temperature, claim.category
        if key not in self._finished_by_key:
            self._finished_by_key[key] = {
                (sample.repeat, sample.prompt_index): sample.generation
                for block in self._blocks.get(claim.experiment, ())
                if (block.condition.label, block.condition.temperature) == (label, claim.temperature)
                and block.condition.concurrency == 1
                for sample in block.samples
                if sample.generation is not None and claim.category in ("", sample.category)
            }
        return self._finished_by_key[key]

    def _turns(self, claim: Claim, label: str) -> dict[int, float]:
        """Returns the tokens per second of each repeat in which every generation finished."""
        wanted = (label, claim.temperature, claim.concurrency)
        return {
            block.repeat: sum(len(each.generation.token_ids) for each in block.samples if each.generation is not None)
            / block.duration_s
            for block in self._blocks.get(claim.experiment, ())
            if (block.condition.label, block.condition.temperature, block.condition.concurrency) == wanted
            and all(each.generation is not None for each in block.samples)
        }


def _per_round(rounds: Sequence[Rounds], counted: Iterable[int | None]) -> float | None:
    known = [(count, each.num_rounds) for count, each in zip(counted, rounds, strict=True) if count is not None]
    num_rounds = sum(number for _, number in known)
    return sum(count for count, _ in known) / num_rounds if num_rounds else None


def _acceptance(rounds: Sequence[Rounds]) -> float | None:
    num_judged = sum(each.num_judged or 0 for each in rounds)
    return sum(each.num_accepted for each in rounds) / num_judged if num_judged else None


def _tokens(rounds: Sequence[Rounds]) -> float | None:
    kept = _per_round(rounds, [each.num_accepted for each in rounds])
    return None if kept is None else 1 + kept


_RATES = {
    HITS: lambda rounds: _per_round(rounds, [each.num_hits for each in rounds]),
    READY_HITS: lambda rounds: _per_round(rounds, [each.num_ready_hits for each in rounds]),
    ACCEPTANCE: _acceptance,
    TOKENS: _tokens,
}
"""Metrics of rounds: the share of commits whose next token the tree already had, and of those after which more was
already drafted; the share of kept tokens among the compared drafted ones; tokens per target forward."""


def _prompts_of(blocks: Iterable[Block]) -> Strata:
    """Returns the prompts by category, because kinds that are compared separately are drawn separately."""
    prompts: dict[str, set[int]] = defaultdict(set)
    for sample in chain.from_iterable(block.samples for block in blocks):
        prompts[sample.category].add(sample.prompt_index)
    return tuple(tuple(sorted(indices)) for _, indices in sorted(prompts.items()))


def _repeats_of(blocks: Iterable[Block]) -> Strata:
    repeats = {block.repeat for block in blocks if block.condition.concurrency > 1}
    return (tuple(sorted(repeats)),) if repeats else ()


def _draw_each(units: Mapping[str, Strata], random: np.random.Generator) -> dict[str, Multiplicities]:
    """Draws the units of each experiment; experiments with the same ones get the same draw."""
    draws = {strata: draw(strata, random) for strata in dict.fromkeys(units.values())}
    return {name: draws[strata] for name, strata in units.items()}
