"""Times forwards: one by one while an engine runs, and by their number of rows when the verifier starts.

`python -m outrider_bench.workers.forward` prints measurements of the second kind.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from outrider.core.costs import AttentionTimes
from outrider.core.params import SamplingParams
from outrider.models.cuda.graphs import capture_cuda
from outrider.models.runner import KVCache, Runner, Segment
from outrider.models.torch.products import Product

K = TypeVar("K", bound=Hashable)


class Timing(Protocol):
    """Measures how long a device works on one forward."""

    def stop(self) -> None:
        """Called when the forward was launched. The device may still be running it."""

    def elapsed_ms(self) -> float:
        """Returns the milliseconds from the beginning until `stop`. Call it after the forward's results have been read;
        before that, it may wait for them."""


class Stopwatch(Protocol):
    """Measures how long a device works on forwards."""

    def start(self) -> Timing:
        """Called before a forward. The device may still be running others."""


class HostStopwatch:
    """Reads the host's clock, after waiting for the device."""

    def __init__(
        self, wait: Callable[[], object] = lambda: None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """
        Args:
            wait: Waits until the device has done all queued work. A CPU has when a call returns.
            clock: Returns the time in seconds.
        """
        self._wait, self._clock = wait, clock

    def start(self) -> Timing:
        """See `Stopwatch`."""
        return _HostTiming(self._now)

    def _now(self) -> float:
        self._wait()
        return self._clock()


class _HostTiming:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._started = self._stopped = now()

    def stop(self) -> None:
        self._stopped = self._now()

    def elapsed_ms(self) -> float:
        return (self._stopped - self._started) * 1e3


class EventStopwatch:
    """Has the device record the times itself, in the order of its work, so that the host need not wait."""

    def __init__(self, make_event: Callable[[], Any], current_stream: Callable[[], Any]) -> None:
        """
        Args:
            make_event: Makes an event like `torch.cuda.Event(enable_timing=True)`.
            current_stream: Returns the stream that forwards of the calling thread go to. Without it an event takes the
                stream of the thread's current device, which need not be the model's.
        """
        self._make_event, self._current_stream = make_event, current_stream

    def start(self) -> Timing:
        """See `Stopwatch`."""
        return _EventTiming(self._make_event(), self._make_event(), self._current_stream)


class _EventTiming:
    def __init__(self, first: Any, last: Any, current_stream: Callable[[], Any]) -> None:
        self._first, self._last, self._current_stream = first, last, current_stream
        first.record(current_stream())

    def stop(self) -> None:
        self._last.record(self._current_stream())

    def elapsed_ms(self) -> float:
        self._last.synchronize()  # returns at once if the results were read; otherwise `elapsed_time` might raise
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

    All numbers of rows take turns, so that a busy moment of the machine does not distort one of them.
    """
    cache = runner.new_cache()
    runner.forward([Segment(cache, [i % runner.vocab_size for i in range(context)], 0)])
    times_ms = _take_turns(runner, {n: [(cache, n)] for n in rows}, num_repeats)
    cache.clear()
    return times_ms


def measure_buckets(runner: Runner, max_rows: int, context: int = 200, *, num_repeats: int = 15) -> dict[int, float]:
    """Measures the median time of a forward by the rows that it is padded to, in milliseconds.

    Args:
        runner: A runner that pads forwards (`Runner.buckets`).
        max_rows: Most rows that will be asked about; the bucket that has room for them is the last one.
        context: Slots before the rows.
        num_repeats: Forwards of each bucket.

    Returns:
        Times by bucket, for the buckets that one session can have rows for.
    """
    rows: dict[int, int] = {}
    smaller = 0
    for bucket in runner.buckets:
        # One row more than the smaller bucket has is padded to this one.
        num_rows = min(bucket, runner.max_context_len - context)
        if num_rows <= smaller or smaller >= max_rows:
            break
        rows[num_rows] = smaller = bucket
    return {
        rows[num_rows]: time_ms
        for num_rows, time_ms in measure_forward(runner, list(rows), context, num_repeats=num_repeats).items()
    }


LONG_CONTEXT = 2048
"""Most slots of the long contexts that are measured."""
MIN_LONGER = 256
"""Long contexts must be longer than short ones by this many slots: less would be lost in the noise."""


def measure_attention(runner: Runner, context: int, *, num_repeats: int = 7) -> AttentionTimes:
    """Measures how much longer a forward takes after long contexts than after short ones. For a runner without room for
    long ones the result is that they add nothing.

    Args:
        runner: Runner of the model. Nothing else may use it meanwhile.
        context: Slots of the short contexts.
        num_repeats: Forwards of each kind, of which there are four.
    """
    # On a GPU one session's keys and values are read in no time, and few rows are padded to the same number.
    num_sessions, num_more = (1, 8) if runner.device.type == "cpu" else (8, 2)
    block_size = runner.pool.block_size
    room = runner.pool.blocks.num_free // num_sessions * block_size - context - 4 * block_size
    longest = min(LONG_CONTEXT, runner.max_context_len - num_more, room)
    if longest - context < MIN_LONGER:
        return AttentionTimes()
    caches = {length: [_filled(runner, length) for _ in range(num_sessions)] for length in (context, longest)}
    forwards = {
        (length, num_rows): [(cache, num_rows) for cache in of_length]
        for length, of_length in caches.items()
        for num_rows in (1, num_more)
    }
    # The fastest of each: disturbances only add time, and differences of medians would be noise.
    times_ms = _take_turns(runner, forwards, num_repeats, min)
    for cache in (cache for of_length in caches.values() for cache in of_length):
        cache.clear()
    one, more = (times_ms[longest, num_rows] - times_ms[context, num_rows] for num_rows in (1, num_more))
    num_slots = num_sessions * (longest - context)
    # Neither is below 0. If both times cannot be matched, that of more rows is.
    row_slot_ms = max(0.0, min((more - one) / (num_more - 1), more / num_more)) / num_slots
    return AttentionTimes(max(0.0, one / num_slots - row_slot_ms), row_slot_ms, context)


def _filled(runner: Runner, num_slots: int) -> KVCache:
    """Makes a cache with keys and values of no text. Their values do not matter for the time, but they must be written:
    memory that was never written may not be allocated."""
    cache = runner.new_cache()
    cache.reserve(num_slots)
    places = torch.from_numpy(cache.places(np.arange(num_slots))).to(runner.device)
    runner.pool.data.index_fill_(3, places, 0.0)
    cache.append(range(num_slots))
    return cache


@torch.inference_mode()
def measure_products(runner: Runner, rows: Sequence[int], *, num_repeats: int = 15) -> dict[int, float]:
    """Measures the median time of the large products of a forward alone, back to back, in milliseconds: the least that
    a forward can take with these libraries. Empty for a model that runs by the library's own code."""
    products = runner.large_products()
    if not products:
        return {}
    computes = {n: _back_to_back(runner, products, n) for n in rows}
    times: dict[int, list[float]] = {n: [] for n in rows}
    for repeat in range(num_repeats + 2):
        for n, samples in times.items():
            started = time.perf_counter()
            computes[n]()[0][-1, -1].item()  # waits for an accelerator
            if repeat >= 2:
                samples.append(1e3 * (time.perf_counter() - started))
    return {n: statistics.median(samples) for n, samples in times.items()}


def _back_to_back(
    runner: Runner, products: Sequence[tuple[Product, int]], num_rows: int
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Returns a function that computes the products of some rows. On a GPU it is a graph: launching them one by one
    would measure the host."""
    inputs = {size: torch.ones(num_rows, size, dtype=runner.dtype, device=runner.device) for _, size in products}

    def compute() -> tuple[torch.Tensor, ...]:
        for product, size in products:
            out = product(inputs[size])
        return (out,)

    return capture_cuda(runner.device)(compute) if runner.device.type == "cuda" else compute


def measure_sessions(
    runner: Runner, num_sessions: Sequence[int], context: int = 200, *, num_repeats: int = 15
) -> dict[int, float]:
    """Measures the median time of a forward with one row for each session, by the number of sessions, in
    milliseconds."""
    caches = [runner.new_cache() for _ in range(max(num_sessions))]
    for cache in caches:
        runner.forward([Segment(cache, [i % runner.vocab_size for i in range(context)], 0)])
    times_ms = _take_turns(runner, {n: [(cache, 1) for cache in caches[:n]] for n in num_sessions}, num_repeats)
    for cache in caches:
        cache.clear()
    return times_ms


def measure_steps(
    runner: Runner, num_sessions: Sequence[int], context: int, length: int, *, num_repeats: int = 15
) -> dict[int, float]:
    """Measures the median time of a step of a draft model's loop by the number of sessions, in milliseconds. Empty if
    there is no loop.

    Args:
        runner: The draft model.
        num_sessions: Sessions that a loop serves.
        context: Slots before their rows.
        length: Steps of a loop, one of those that `Runner.loop_lens` returns.
        num_repeats: Loops of each number.
    """
    runner.make_loop()
    if not runner.has_loop:
        return {}
    caches = [_filled(runner, context) for _ in range(max(num_sessions))]
    params = [SamplingParams(seed=number) for number in range(len(caches))]
    times: dict[int, list[float]] = {n: [] for n in num_sessions}
    for repeat in range(num_repeats + 2):
        for n, samples in times.items():
            started = time.perf_counter()
            runner.draft([Segment(cache, [1], 1) for cache in caches[:n]], params[:n], [0] * n, length)
            if repeat >= 2:
                samples.append(1e3 * (time.perf_counter() - started) / length)
            for cache in caches[:n]:
                cache.truncate(context)
    for cache in caches:
        cache.clear()
    return {n: statistics.median(samples) for n, samples in times.items()}


def _take_turns(
    runner: Runner,
    forwards: dict[K, list[tuple[KVCache, int]]],
    num_repeats: int,
    choose: Callable[[list[float]], float] = statistics.median,
) -> dict[K, float]:
    times: dict[K, list[float]] = {n: [] for n in forwards}
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
    return {n: choose(samples) for n, samples in times.items()}


def forward_us_of(runner: Runner) -> int:
    """Returns the time of a forward of one row after a short text, in microseconds."""
    context_len = min(200, runner.max_context_len // 2)
    return max(1, int(1e3 * measure_forward(runner, [1], context=context_len, num_repeats=7)[1]))
