"""Times forwards by their number of rows, as the verifier does when it starts.

`python -m outrider_bench.workers.forward` prints such measurements.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from outrider.models.runner import KVCache, Runner, Segment


def measure_forward(
    runner: Runner, rows: Sequence[int], context: int = 200, *, num_repeats: int = 15
) -> dict[int, float]:
    """Measures the median time of a forward of one session by its number of rows, in milliseconds.

    All numbers of rows take turns, so that a busy moment of the machine does not fall on one of them.
    """
    cache = runner.new_cache()
    runner.forward([Segment(cache, [i % runner.vocab_size for i in range(context)], 0)])
    times_ms = _take_turns(runner, {n: [(cache, n)] for n in rows}, num_repeats)
    cache.clear()
    return times_ms


def measure_sessions(
    runner: Runner, num_sessions: Sequence[int], context: int = 200, *, num_repeats: int = 15
) -> dict[int, float]:
    """Measures the median time of a forward of one row for each of many sessions by their number, in milliseconds."""
    caches = [runner.new_cache() for _ in range(max(num_sessions))]
    for cache in caches:
        runner.forward([Segment(cache, [i % runner.vocab_size for i in range(context)], 0)])
    times_ms = _take_turns(runner, {n: [(cache, 1) for cache in caches[:n]] for n in num_sessions}, num_repeats)
    for cache in caches:
        cache.clear()
    return times_ms


def _take_turns(runner: Runner, forwards: dict[int, list[tuple[KVCache, int]]], num_repeats: int) -> dict[int, float]:
    times: dict[int, list[float]] = {n: [] for n in forwards}
    for repeat in range(num_repeats + 2):
        for n, parts in forwards.items():
            lengths = [cache.length for cache, _ in parts]
            started = time.perf_counter()
            logits = runner.forward([Segment(cache, [1] * num_rows, num_rows) for cache, num_rows in parts])
            logits[-1, -1].item()  # waits for an accelerator
            if repeat >= 2:  # the first calls choose kernels and warm caches
                times[n].append(1e3 * (time.perf_counter() - started))
            for (cache, _), length in zip(parts, lengths, strict=True):
                cache.truncate(length)
    return {n: statistics.median(samples) for n, samples in times.items()}
