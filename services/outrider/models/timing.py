"""Times forwards: one by one while an engine runs, and by their number of rows, as the verifier does when it starts.

`python -m outrider_bench.workers.forward` prints measurements of the second kind.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from outrider.models.runner import KVCache, Runner, Segment


class Stopwatch(Protocol):
    """Measures how long a device works on a forward, one at a time."""

    def start(self) -> None:
        """Called before the forward."""

    def stop(self) -> None:
        """Called when the forward was asked for. The device may still be at it."""

    def elapsed_ms(self) -> float:
        """Returns the milliseconds between the two. To be called when the forward's results have been read; before
        that, it may wait for them."""


class HostStopwatch:
    """Reads the host's clock, after waiting for the device."""

    def __init__(
        self, wait: Callable[[], object] = lambda: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """
        Args:
            wait: Returns when the device has done what it was asked for. A CPU has when a call returns.
            clock: Returns the time in seconds.
        """
        self._wait, self._clock = wait, clock
        self._started = self._stopped = 0.0

    def start(self) -> None:
        """See `Stopwatch`."""
        self._started = self._now()

    def stop(self) -> None:
        """See `Stopwatch`."""
        self._stopped = self._now()

    def elapsed_ms(self) -> float:
        """See `Stopwatch`."""
        return (self._stopped - self._started) * 1e3

    def _now(self) -> float:
        self._wait()
        return self._clock()


class EventStopwatch:
    """Has the device note the times itself, in the order of its work: the host need not wait for it."""

    def __init__(self, make_event: Callable[[], Any], current_stream: Callable[[], Any]) -> None:
        """
        Args:
            make_event: Makes an event as `torch.cuda.Event(enable_timing=True)` is one.
            current_stream: Returns the stream that forwards of the calling thread go to: an event that is told of none
                takes that of the thread's current device, which need not be the model's.
        """
        self._first, self._last = make_event(), make_event()
        self._current_stream = current_stream

    def start(self) -> None:
        """See `Stopwatch`."""
        self._first.record(self._current_stream())

    def stop(self) -> None:
        """See `Stopwatch`."""
        self._last.record(self._current_stream())

    def elapsed_ms(self) -> float:
        """See `Stopwatch`."""
        self._last.synchronize()  # returns at once if the results were read; without it, `elapsed_time` may raise
        return float(self._first.elapsed_time(self._last))


def stopwatch_for(device: torch.device) -> Stopwatch:
    """Returns the stopwatch for the forwards of a device."""
    if device.type == "cuda":
        make_event = partial(torch.cuda.Event, enable_timing=True)
        return EventStopwatch(make_event, partial(torch.cuda.current_stream, device))
    if device.type == "cpu":
        return HostStopwatch()
    return HostStopwatch(torch.get_device_module(device).synchronize)


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


def measure_buckets(runner: Runner, max_rows: int, context: int = 200, *, num_repeats: int = 15) -> dict[int, float]:
    """Measures the median time of a forward by the rows that it is filled up to, in milliseconds.

    Args:
        runner: One that fills forwards up (`Runner.buckets`).
        max_rows: Most rows that anybody will ask about; the bucket that has room for them is the last one.
        context: Slots in front of the rows.
        num_repeats: Forwards of each bucket.

    Returns:
        Times by bucket, of those that one session can have rows for.
    """
    rows: dict[int, int] = {}
    smaller = 0
    for bucket in runner.buckets:
        # One row more than the smaller bucket has is enough to be filled up to this one.
        num_rows = min(bucket, runner.max_context_len - context)
        if num_rows <= smaller or smaller >= max_rows:
            break
        rows[num_rows] = smaller = bucket
    return {
        rows[num_rows]: time_ms
        for num_rows, time_ms in measure_forward(runner, list(rows), context, num_repeats=num_repeats).items()
    }


@torch.inference_mode()
def measure_products(runner: Runner, rows: Sequence[int], *, num_repeats: int = 15) -> dict[int, float]:
    """Measures the median time of the large products of a forward alone, back to back, in milliseconds: the least that
    a forward can take with these libraries. Empty for a model that runs as the library has it."""
    products = runner.large_products()
    times: dict[int, list[float]] = {n: [] for n in rows if products}
    for repeat in range(num_repeats + 2):
        for n, samples in times.items():
            inputs = {size: torch.ones(n, size, dtype=runner.dtype, device=runner.device) for _, size in products}
            started = time.perf_counter()
            for product, size in products:
                out = product(inputs[size])
            out[-1, -1].item()  # waits for an accelerator
            if repeat >= 2:
                samples.append(1e3 * (time.perf_counter() - started))
    return {n: statistics.median(samples) for n, samples in times.items()}


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


def forward_us_of(runner: Runner) -> int:
    """Returns the time of a forward of one row behind a short text, in microseconds."""
    context_len = min(200, runner.max_context_len // 2)
    return max(1, int(1e3 * measure_forward(runner, [1], context=context_len, num_repeats=7)[1]))
