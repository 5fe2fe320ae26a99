"""Print how long a forward takes by its number of rows: ``python -m outrider_bench.workers.forward``."""

from __future__ import annotations

import argparse

import torch

from outrider.models.loading import load_model
from outrider.models.timing import measure_forward, measure_sessions


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
    for name, measure, counts in (
        ("rows of one session", measure_forward, options.rows),
        ("sessions of one row", measure_sessions, options.sessions),
    ):
        numbers = [int(n) for n in counts.split(",")]
        times = measure(runner, numbers, options.context, num_repeats=options.repeats)
        print(f"{name:>20}  " + "".join(f"{n:>8}" for n in times))
        print(f"{'ms':>20}  " + "".join(f"{ms:>8.2f}" for ms in times.values()))


if __name__ == "__main__":
    main()
