"""Samples to rows. One row for each condition, over all prompts and for each category.

Names are those of `vllm bench` where it has the number. Speculation brings several tokens at once, so `itl` (the time
between two arrivals on the stream) says how bursty the text comes, and `tpot` how fast.

* `output_throughput`: output tokens by wall time, prefill included; the median over the repeats.
* `decode_throughput`: tokens after the first arrival by the time from the first arrival to the last; likewise.
* `speedup_over_off`: the median over the repeats of the ratio to `off` in the same repeat on the same prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from outrider_bench.experiment import LLAMA_CPP, OFF
from outrider_bench.samples import TIME_NAMES, Block, Condition, GenerationSample, Sample
from outrider_cli.prompts import ALL_CATEGORIES

Row = dict[str, Any]
Reference = Mapping[tuple[int, int], tuple[int, ...]]
"""Token ids of `off` by (repeat, prompt)."""


def rows_of(blocks: Sequence[Block], num_prompts: int, repeats: int) -> list[Row]:
    """Returns all rows: temperatures, loads and distances separately, the methods in the order of their first turn."""
    by_condition: dict[Condition, list[Block]] = defaultdict(list)
    for block in blocks:
        by_condition[block.condition].append(block)
    rows = []
    # The order rotates; in its first turns, the first temperature has the contenders' given order.
    places = {name: place for place, name in enumerate(dict.fromkeys((c.method, c.setting) for c in by_condition))}

    def place(condition: Condition) -> tuple[float, int, float, int]:
        method = places[condition.method, condition.setting]
        return condition.rtt_ms, condition.concurrency, condition.temperature, method

    for condition in sorted(by_condition, key=place):
        found = by_condition[condition]
        # `off` at the same temperature, under the same load, over the same distance.
        off = by_condition.get(replace(condition, method=OFF, setting=""), [])
        row = _row(condition, ALL_CATEGORIES, found, off)
        row["partial"] = row["completed"] + row["failed"] < num_prompts * repeats
        rows.append(row)
        for category in _categories(found):
            members = _only(found, category)
            rows.append(_row(condition, category, members, _only(off, category)) | {"partial": row["partial"]})
    _mark_best(rows)
    return rows


def _categories(blocks: Sequence[Block]) -> list[str]:
    """Lists the categories if there are several; none for generations that shared the machine."""
    # Their time is that of the block, in which one text slows the others down.
    if any(len(block.samples) > 1 for block in blocks):
        return []
    found = sorted({sample.category for block in blocks for sample in block.samples})
    return found if len(found) > 1 else []


def _only(blocks: Iterable[Block], category: str) -> list[Block]:
    return [block for block in blocks if all(sample.category == category for sample in block.samples)]


def _row(condition: Condition, category: str, blocks: Sequence[Block], off: Sequence[Block]) -> Row:
    samples = [sample for block in blocks for sample in block.samples]
    done = [sample.generation for sample in samples if sample.generation is not None]
    duration_s = sum(block.duration_s for block in blocks)
    runs = [_throughput(of_repeat) for of_repeat in _by_repeat(blocks).values()]
    speedups = _speedups(blocks, off)
    row: Row = {
        "method": condition.method,
        "setting": condition.setting,
        "category": category,
        "temperature": condition.temperature,
        "concurrency": condition.concurrency,
        "rtt_ms": condition.rtt_ms,
        "output_throughput": median(runs) if runs else 0.0,
        "decode_throughput": _median([_decode_throughput(each) for each in _by_repeat(blocks).values()]),
        "speedup_over_off": _median(speedups),
        "runs": runs,
        "speedup_runs": speedups,
        "completed": len(done),
        "failed": len(samples) - len(done),
        "errors": sorted({sample.error for sample in samples if sample.error}),
        "duration": duration_s,
        "total_input_tokens": sum(generation.num_prompt_tokens for generation in done),
        "total_output_tokens": sum(len(generation.token_ids) for generation in done),
    }
    row["request_throughput"] = len(done) / duration_s if duration_s else 0.0
    total = row["total_input_tokens"] + row["total_output_tokens"]
    row["total_token_throughput"] = total / duration_s if duration_s else 0.0
    return row | _latencies(done) | _speculation(done) | _identity(condition, samples, _reference(off))


def _by_repeat(blocks: Iterable[Block]) -> dict[int, list[Block]]:
    groups: dict[int, list[Block]] = defaultdict(list)
    for block in blocks:
        groups[block.repeat].append(block)
    return groups


def _generations(blocks: Iterable[Block]) -> list[GenerationSample]:
    return [s.generation for block in blocks for s in block.samples if s.generation is not None]


def _throughput(blocks: Sequence[Block]) -> float:
    """Output tokens per second, over blocks that ran one after the other."""
    duration_s = sum(block.duration_s for block in blocks)
    tokens = sum(len(generation.token_ids) for generation in _generations(blocks))
    return tokens / duration_s if duration_s else 0.0


def _decode_throughput(blocks: Sequence[Block]) -> float:
    """Returns the tokens per second of one stream, without the prefill."""
    found = _generations(blocks)
    seconds = sum(generation.decode_s for generation in found)
    return sum(generation.num_decoded for generation in found) / seconds if seconds else 0.0


def _speedups(blocks: Sequence[Block], off: Sequence[Block]) -> list[float]:
    """Throughput over that of `off`, for each repeat, on the blocks that both have finished."""

    def key(block: Block) -> tuple[int, frozenset[int]]:
        # A failed generation did not finish early: it says nothing about speed.
        done = (sample.prompt_index for sample in block.samples if sample.generation is not None)
        return block.repeat, frozenset(done)

    off_by_key = {key(block): block for block in off if key(block)[1]}
    pairs = [(block, off_by_key[key(block)]) for block in blocks if key(block) in off_by_key]
    ratios = []
    for repeat in sorted({block.repeat for block, _ in pairs}):
        of_repeat = [pair for pair in pairs if pair[0].repeat == repeat]
        base = _throughput([other for _, other in of_repeat])
        if base:
            ratios.append(_throughput([block for block, _ in of_repeat]) / base)
    return ratios


def _latencies(done: Sequence[GenerationSample]) -> Row:
    """Mean, median, standard deviation and 99th percentile of each latency, in milliseconds."""
    series: dict[str, list[float]] = {
        "ttft": [g.ttft_s for g in done if g.chunks],
        "tpot": [g.decode_s / g.num_decoded for g in done if g.num_decoded],
        # Every gap counts once, from whichever generation; of the other latencies each generation has one value.
        "itl": [gap for g in done for gap in g.gaps_s],
        "e2el": [g.duration_s for g in done],
    }
    measures: dict[str, Callable[[Any], Any]] = {
        "mean": np.mean,
        "median": np.median,
        "std": np.std,
        "p99": lambda values: np.percentile(values, 99),
    }
    return {
        f"{measure}_{name}_ms": float(function(values)) * 1000 if values else None
        for name, values in series.items()
        for measure, function in measures.items()
    }


def _speculation(done: Sequence[GenerationSample]) -> Row:
    """Acceptance over all rounds, and the median over the generations of each median time."""
    rounds = [generation.rounds for generation in done]
    num_rounds = sum(r.num_rounds for r in rounds)
    num_drafted = sum(r.num_drafted for r in rounds)
    num_accepted = sum(r.num_accepted for r in rounds)
    num_judged = sum(r.num_judged or 0 for r in rounds)
    empty = [r.num_empty for r in rounds if r.num_empty is not None]
    hits = [r.num_hits for r in rounds if r.num_hits is not None]
    ready = [r.num_ready_hits for r in rounds if r.num_ready_hits is not None]
    # Totals over totals, not means of means: a long generation has more rounds. The 1 is the target's own token, of
    # which every round has one.
    row: Row = {
        "num_drafts": num_rounds,
        "num_draft_tokens": num_drafted,
        "num_accepted_tokens": num_accepted,
        "mean_acceptance_length": 1 + num_accepted / num_rounds if num_rounds else None,
        "acceptance": num_accepted / num_judged if num_judged else None,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else None,
        "hit_rate": sum(hits) / num_rounds if hits and num_drafted else None,
        "ready_hit_rate": sum(ready) / num_rounds if ready and num_drafted else None,
        "empty_chain_rate": sum(empty) / num_rounds if empty and num_drafted else None,
        "degraded": sum(r.degraded for r in rounds),
    }
    for name in TIME_NAMES:
        row[f"{name}_p50"] = _median([r.times_p50[name] for r in rounds if name in r.times_p50])
    return row


def _reference(off: Iterable[Block]) -> Reference:
    samples = [sample for block in off for sample in block.samples]
    return {(s.repeat, s.prompt_index): s.generation.token_ids for s in samples if s.generation is not None}


def _identity(condition: Condition, samples: Iterable[Sample], reference: Reference) -> Row:
    """Compares the token ids with those of `off`, and finds where they part.

    transformers and llama.cpp draw their noise from other generators, so their samples can be compared only if nothing
    is drawn; their speculative sampling draws differently even from their own plain sampling.
    """
    draws_alike = condition.temperature == 0 or not condition.method.startswith(("hf-", LLAMA_CPP))
    pairs = [
        (sample, sample.generation.token_ids, reference[sample.repeat, sample.prompt_index])
        for sample in samples
        if sample.generation is not None and (sample.repeat, sample.prompt_index) in reference
    ]
    if not draws_alike or not pairs:
        return {"identical_to_off": None, "first_differences": [], "median_first_difference": None}
    differences = [
        {"repeat": sample.repeat, "prompt": sample.prompt_index, "position": first_difference(ours, theirs)}
        for sample, ours, theirs in pairs
        if ours != theirs
    ]
    return {
        "identical_to_off": 1 - len(differences) / len(pairs),
        "first_differences": differences,
        "median_first_difference": _median([difference["position"] for difference in differences]),
    }


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Returns the first output index at which two texts differ, or at which the shorter one ends."""
    pairs = zip(ours, theirs, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def label_of(row: Row) -> str:
    """Returns method and setting in a few words."""
    return f"{row['method']} {row['setting']}".strip()


def _mark_best(rows: Sequence[Row]) -> None:
    """Marks the fastest setting of each method that ran with several."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        row["best_setting"] = False
        names = ("method", "category", "temperature", "concurrency", "rtt_ms")
        groups[tuple(row[name] for name in names)].append(row)
    for group in groups.values():
        if len(group) > 1:
            max(group, key=lambda row: row["output_throughput"])["best_setting"] = True


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
