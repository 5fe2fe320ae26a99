"""The suite of generations: runs it under a progress bar, prints and writes its report."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider_bench.config import BenchConfig
from outrider_bench.drivers import GenerationFailed
from outrider_bench.samples import Sample
from outrider_bench.servers import StackError
from outrider_bench.suites.generation.benchmark import Benchmark
from outrider_bench.suites.generation.report import print_report, write_report
from outrider_bench.workers.client import WorkerError
from outrider_cli.failures import FAILED, INTERRUPTED, UNREACHABLE
from outrider_cli.local.stack import termination_as_exit
from outrider_client.channel import NO_SECURITY, ChannelSecurity


def run_and_report(
    config: BenchConfig, out: Path | None, console: Console, security: ChannelSecurity = NO_SECURITY
) -> int:
    """Runs what the config asks for; see `run_benchmark`."""
    return run_benchmark(Benchmark(config, security), out, console)


def run_benchmark(benchmark: Benchmark, out: Path | None, console: Console) -> int:
    """Runs, then prints and writes. Ctrl-C and failures end the run, not the report of what has been measured. Returns
    the exit status."""
    status, failure = 0, None
    if benchmark.config.cores:
        # Children inherit this; the verifier and the workers then move to the core of their own.
        os.sched_setaffinity(0, {benchmark.config.cores[1]})
    try:
        with termination_as_exit():
            asyncio.run(_run(benchmark, console))
    except (KeyboardInterrupt, SystemExit):
        status = INTERRUPTED
    except (GenerationFailed, WorkerError, StackError) as error:
        failure = error
        status = UNREACHABLE if isinstance(error, StackError) and benchmark.config.address else FAILED
    if benchmark.has_samples:
        results = benchmark.results()
        paths = write_report(results, out) if out is not None else []
        print_report(results, console)
        for path in paths:
            console.print(f"wrote {path}", highlight=False)
    if failure is not None:
        print(f"error: {failure}", file=sys.stderr)
    return status


async def _run(benchmark: Benchmark, console: Console) -> None:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    total, done = benchmark.num_generations, 0
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        task = progress.add_task("", total=total)

        def log(text: str) -> None:
            if not console.is_terminal:  # a log has no progress bar
                console.print(text, markup=False, highlight=False)

        def say(text: str) -> None:
            progress.update(task, description=text)
            log(text)

        def on_sample(sample: Sample) -> None:
            nonlocal done
            done += 1
            made = sample.generation
            speed = f"{len(made.token_ids) / made.duration_s:.0f} tok/s" if made else f"failed: {sample.error}"
            text = f"{sample.condition.label}, temperature {sample.condition.temperature:g}: {speed}"
            progress.update(task, completed=done, description=text)
            if done * 10 // total > (done - 1) * 10 // total:
                log(f"{done} of {total} generations")

        await benchmark.run(say, on_sample)
