"""Print how long a forward takes by its number of rows and threads: ``python -m outrider_bench.workers.forward``.

On a CPU it prints its kernels one by one, too, next to the bandwidth at which the machine reads memory: at one row a
forward cannot be faster than its weights are read.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from statistics import median
from typing import Any

import torch

from outrider.models.cpu import bfloat16, contenders, kernels
from outrider.models.cpu.kernels import Kernel
from outrider.models.loading import load_model
from outrider.models.runner import Runner, Segment
from outrider.models.timing import measure_forward, measure_products, measure_sessions

REPEATS_IN_TURN = 5
BANDWIDTH_BYTES = 2**28
"""Bytes that are read to measure the bandwidth: more than fit into a cache."""

Times = dict[tuple[int, int], float]
"""Milliseconds by threads and rows."""


def main() -> None:
    """Prints tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo/target-100m")
    parser.add_argument("--rows", default="1,2,4,8,16,32")
    parser.add_argument("--sessions", default="1,2,4,8", help="sessions with one row each")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args()
    rows, sessions, threads = (
        [int(n) for n in counts.split(",")] for counts in (options.rows, options.sessions, options.threads)
    )
    torch.set_num_threads(threads[0])
    runner = load_model(options.model, dtype=options.dtype, device=options.device).runner
    print(f"{options.model}, {runner.dtype}, {options.device}, context {options.context}, torch {torch.__version__}")
    forwards: dict[tuple[int, int], list[float]] = defaultdict(list)
    products: dict[tuple[int, int], list[float]] = defaultdict(list)
    # A few repeats of one, then of the other, so that all get an equal share of the machine's busy moments.
    for _ in range(max(3, options.repeats // REPEATS_IN_TURN)):
        for num_threads in threads:
            torch.set_num_threads(num_threads)
            for n, ms in measure_forward(runner, rows, options.context, num_repeats=REPEATS_IN_TURN).items():
                forwards[num_threads, n].append(ms)
            for n, ms in measure_products(runner, rows, num_repeats=REPEATS_IN_TURN).items():
                products[num_threads, n].append(ms)
    _print_line("rows of one session", rows, "8d")
    _print_by_threads("ms", {key: median(samples) for key, samples in forwards.items()}, threads, rows)
    _print_by_threads("large products", {key: median(samples) for key, samples in products.items()}, threads, rows)
    _print_line("sessions of one row", sessions, "8d")
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        times = measure_sessions(runner, sessions, options.context, num_repeats=options.repeats)
        _print_line(f"ms, {num_threads} threads", times.values(), "8.2f")
    if options.device == "cpu":
        _print_kernels(runner, threads, rows, options.context)
        for num_threads in threads:
            print(f"memory is read at {_bandwidth(num_threads):.1f} GB/s by {num_threads} threads")


def _print_kernels(runner: Runner, threads: list[int], rows: list[int], context: int) -> None:
    """Prints the milliseconds of a forward by kernel. A kernel that another one calls counts as part of its caller."""
    cache = runner.new_cache()
    runner.forward([Segment(cache, [i % runner.vocab_size for i in range(context)], 0)])
    samples: dict[str, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    with _kernel_times() as spent:
        for _ in range(1 + REPEATS_IN_TURN):
            for num_threads, n in product(threads, rows):
                torch.set_num_threads(num_threads)
                spent.clear()
                runner.forward([Segment(cache, [1] * n, n)])
                cache.truncate(context)
                for name, seconds in spent.items():
                    samples[name][num_threads, n].append(1e3 * seconds)
    cache.clear()
    for name, times in samples.items():
        # The first run of each warms caches.
        _print_by_threads(name, {key: median(each[1:]) for key, each in times.items()}, threads, rows)


@contextmanager
def _kernel_times() -> Iterator[dict[str, float]]:
    """Counts the seconds that each kernel takes."""
    spent: dict[str, float] = defaultdict(float)
    modules = kernels, bfloat16, contenders
    names = {value: name for module in modules for name, value in vars(module).items() if isinstance(value, Kernel)}
    call = Kernel.__call__

    def timed(kernel: Kernel, *arguments: Any) -> None:
        started = time.perf_counter()
        call(kernel, *arguments)
        spent[names[kernel]] += time.perf_counter() - started

    setattr(Kernel, "__call__", timed)  # noqa: B010
    try:
        yield spent
    finally:
        setattr(Kernel, "__call__", call)  # noqa: B010


def _bandwidth(num_threads: int) -> float:
    torch.set_num_threads(num_threads)
    numbers = torch.ones(BANDWIDTH_BYTES // 4)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        numbers.sum().item()
        seconds.append(time.perf_counter() - started)
    return BANDWIDTH_BYTES / min(seconds) / 1e9


def _print_by_threads(name: str, times: Times, threads: list[int], rows: list[int]) -> None:
    """Prints a line for each number of threads, and the speeds relative to the first one."""
    for num_threads in threads if times else ():
        _print_line(f"{name}, {num_threads} threads", (times[num_threads, n] for n in rows), "8.2f")
    for num_threads in threads[1:] if times else ():
        _print_line("times as fast", (times[threads[0], n] / times[num_threads, n] for n in rows), "8.2f")


def _print_line(name: str, values: Iterable[float], form: str) -> None:
    print(f"{name:>28}  " + "".join(format(value, form) for value in values))


if __name__ == "__main__":
    main()
