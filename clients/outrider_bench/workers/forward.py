"""Print how long a forward takes by its number of rows: ``python -m outrider_bench.workers.forward``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from statistics import median

import torch

from outrider.models.loading import load_model
from outrider.models.timing import measure_forward, measure_products, measure_sessions

REPEATS_IN_TURN = 5


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo/target-100m")
    parser.add_argument("--rows", default="1,2,4,8,16,32")
    parser.add_argument("--sessions", default="1,2,4,8", help="sessions with one row each")
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    runner = load_model(options.model, dtype=options.dtype, device=options.device).runner
    print(f"{options.model}, {runner.dtype}, {options.device}, {options.threads} threads, context {options.context}")
    rows, sessions = ([int(n) for n in counts.split(",")] for counts in (options.rows, options.sessions))
    # A few repeats of one, then of the other: so both have the same share of the machine's busy moments.
    forwards: dict[int, list[float]] = {n: [] for n in rows}
    products: dict[int, list[float]] = {n: [] for n in rows}
    for _ in range(max(1, options.repeats // REPEATS_IN_TURN)):
        for n, ms in measure_forward(runner, rows, options.context, num_repeats=REPEATS_IN_TURN).items():
            forwards[n].append(ms)
        for n, ms in measure_products(runner, rows, num_repeats=REPEATS_IN_TURN).items():
            products[n].append(ms)
    _print_line("rows of one session", rows, "8d")
    _print_line("ms", map(median, forwards.values()), "8.2f")
    if products[rows[0]]:
        _print_line("large products alone", map(median, products.values()), "8.2f")
        _print_line("ratio", (median(forwards[n]) / median(products[n]) for n in rows), "8.2f")
    _print_line("sessions of one row", sessions, "8d")
    times = measure_sessions(runner, sessions, options.context, num_repeats=options.repeats)
    _print_line("ms", times.values(), "8.2f")


def _print_line(name: str, values: Iterable[float], form: str) -> None:
    print(f"{name:>20}  " + "".join(format(value, form) for value in values))


if __name__ == "__main__":
    main()
