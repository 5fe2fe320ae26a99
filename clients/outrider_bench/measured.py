"""Blocks to ratios and rates: what the claims are about. Pure.

Two contenders are compared repeat by repeat, on the prompts that both have finished; the median of the repeats counts.
None means that a value was not measured.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from outrider_bench.experiment import OFF
from outrider_bench.samples import Block, GenerationSample, Rounds
from outrider_bench.statistics import Row, rows_of
from outrider_cli.prompts import ALL_CATEGORIES

Finished = dict[tuple[int, int], GenerationSample]
"""Generations by (repeat, prompt)."""


class Measured:
    """Blocks by the name of their experiment."""

    def __init__(self, blocks: Mapping[str, Sequence[Block]]) -> None:
        self._blocks = blocks

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
        return _ratio(ours, self._finished(experiment, base, temperature, category))

    def kept(self, experiment: str, base_experiment: str, label: str, temperature: float) -> float | None:
        """Divide the tokens a second of a contender by those it has in another experiment with the same prompts."""
        ours = self._finished(experiment, label, temperature)
        return _ratio(ours, self._finished(base_experiment, label, temperature))

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
        ratios = {other: self.ratio(experiment, label, other, temperature, category) for other in others}
        known = {other: ratio for other, ratio in ratios.items() if ratio is not None}
        if not known:
            return None, ""
        best = min(known, key=lambda other: known[other])
        missing = ", ".join(ratios.keys() - known.keys())
        return known[best], f"best of them: {best}" + (f"; not measured: {missing}" if missing else "")

    def throughput(self, experiment: str, label: str, temperature: float) -> float | None:
        """Return the tokens a second, prefill included."""
        found = self._finished(experiment, label, temperature)
        values = [_throughput(found, keys) for keys in _by_repeat(found.keys()).values()]
        return median(values) if values else None

    def first_token_s(self, experiment: str, label: str, temperature: float) -> float | None:
        """Return the seconds until the first token, median of all generations."""
        found = self._finished(experiment, label, temperature)
        return median(each.ttft_s for each in found.values()) if found else None

    def tokens_per_forward(self, experiment: str, label: str, temperature: float) -> float | None:
        """Return the tokens that one forward of the target commits, the one it draws itself included."""
        rounds = self._rounds(experiment, label, temperature)
        num_rounds = sum(each.num_rounds for each in rounds)
        return 1 + sum(each.num_accepted for each in rounds) / num_rounds if num_rounds else None

    def hit_rate(self, experiment: str, label: str, temperature: float) -> float | None:
        """Return the share of commits whose next token the tree already had."""
        rounds = [each for each in self._rounds(experiment, label, temperature) if each.num_hits is not None]
        num_rounds = sum(each.num_rounds for each in rounds)
        return sum(each.num_hits or 0 for each in rounds) / num_rounds if num_rounds else None

    def acceptance(self, experiment: str, label: str, temperature: float, category: str = "") -> float | None:
        """Return the share of chain tokens kept, of those that were compared with the target's."""
        rounds = self._rounds(experiment, label, temperature, category)
        num_judged = sum(each.num_judged or 0 for each in rounds)
        return sum(each.num_accepted for each in rounds) / num_judged if num_judged else None

    def rows(self, experiment: str, num_prompts: int, repeats: int, num_off: int | None = None) -> list[Row]:
        """Return the rows of the generation suite, with what this suite asks beside them.

        Args:
            num_off: How many prompts `off` takes part in; None means all.
        """
        blocks = self._blocks.get(experiment, ())
        conditions = {
            (block.condition.method, block.condition.setting, block.condition.temperature): block.condition.label
            for block in blocks
        }
        rows = rows_of(blocks, num_prompts, repeats)
        num_of_off = sum(len(block.samples) for block in blocks if block.condition.method == OFF)
        for row in rows:
            # `rows_of` expects every contender at every prompt.
            if row["method"] == OFF and num_off is not None:
                row["partial"] = num_of_off < num_off
            label, temperature = conditions[row["method"], row["setting"], row["temperature"]], row["temperature"]
            category = "" if row["category"] == ALL_CATEGORIES else row["category"]
            rounds = self._rounds(experiment, label, temperature, category)
            row |= {
                "acceptance": self.acceptance(experiment, label, temperature, category),
                "accepted_by_source": _summed(each.accepted_by_source for each in rounds),
                "decisions": _summed(each.decisions for each in rounds),
            }
        return rows

    def _rounds(self, experiment: str, label: str, temperature: float, category: str = "") -> list[Rounds]:
        found = self._finished(experiment, label, temperature, category)
        return [generation.rounds for generation in found.values()]

    def _finished(self, experiment: str, label: str, temperature: float, category: str = "") -> Finished:
        return {
            (sample.repeat, sample.prompt_index): sample.generation
            for block in self._blocks.get(experiment, ())
            if block.condition.label == label and block.condition.temperature == temperature
            for sample in block.samples
            if sample.generation is not None and category in ("", sample.category)
        }


def _ratio(ours: Finished, theirs: Finished) -> float | None:
    # The same prompts in the same repeats: a text that only one has finished would compare easy with hard ones. Ratios
    # within a repeat, since the machine changes more from one repeat to the next than most methods differ.
    common = ours.keys() & theirs.keys()
    ratios = [_throughput(ours, keys) / _throughput(theirs, keys) for keys in _by_repeat(common).values()]
    return median(ratios) if ratios else None


def _by_repeat(keys: Iterable[tuple[int, int]]) -> dict[int, list[tuple[int, int]]]:
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for repeat, prompt in sorted(keys):
        groups[repeat].append((repeat, prompt))
    return groups


def _throughput(found: Finished, keys: Sequence[tuple[int, int]]) -> float:
    num_tokens = sum(len(found[key].token_ids) for key in keys)
    return num_tokens / sum(found[key].duration_s for key in keys)


def _summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)
