"""What all suites of measurements do alike: fail in parts, end when they are told to, and leave what they know."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import grpc
from rich.console import Console

from outrider_bench.drivers import GenerationFailed
from outrider_bench.servers import StackError
from outrider_bench.workers.client import WorkerError
from outrider_cli.failures import FAILED, INTERRUPTED
from outrider_cli.local.process import ProcessFailed
from outrider_cli.local.redis import RedisFailed, RedisNotFound
from outrider_cli.local.stack import termination_as_exit
from outrider_client.errors import OutriderError

Say = Callable[[str], None]

FAILURES: tuple[type[Exception], ...] = (
    ProcessFailed,
    GenerationFailed,
    OutriderError,
    RedisFailed,
    RedisNotFound,
    StackError,
    TimeoutError,
    WorkerError,
    grpc.aio.AioRpcError,
)
"""What can go wrong with something that is measured. A part that fails does not take the others with it."""


class Suite(Protocol):
    """One run. What has been measured is kept however it ends."""

    async def run(self, say: Say) -> None:
        """Measures everything. `say` hears what is going on."""

    def results(self) -> dict[str, Any]:
        """What is known so far, as results.json has it."""

    @property
    def has_failures(self) -> bool:
        """Whether anything could not be measured."""


async def attempt(
    what: str,
    work: Callable[[], Awaitable[None]],
    failures: dict[str, str],
    kinds: tuple[type[Exception], ...] = FAILURES,
) -> None:
    """Does something that may fail in one of these ways; `failures` then has the reason."""
    try:
        await work()
    except kinds as error:
        failures[what] = _reason_of(error)
    except BaseExceptionGroup as group:
        _, others = group.split(kinds)
        if others is not None:
            raise
        failures[what] = _reason_of(group.exceptions[0])


def run_suite(
    suite: Suite,
    cores: tuple[int, ...],
    console: Console,
    print_report: Callable[[Mapping[str, Any], Console], None],
    write: Callable[[Mapping[str, Any]], list[Path]] | None,
) -> int:
    """Runs on the last of the cores, then prints and writes. Ctrl-C ends the run, not the report of what has been
    measured. Returns the exit status: missed targets are results, what could not be measured is a failure."""
    interrupted = False
    mistake: Exception | None = None
    if cores:
        # Children inherit this; those that are measured then move to the core of their own.
        os.sched_setaffinity(0, {cores[-1]})

    def say(text: str) -> None:
        print(f"{time.perf_counter() - began:5.0f} s  {text}", file=sys.stderr, flush=True)

    began = time.perf_counter()
    try:
        with termination_as_exit():
            asyncio.run(suite.run(say))
    except (KeyboardInterrupt, SystemExit):
        interrupted = True
    except Exception as error:
        mistake = error  # in this program: its traceback comes after what has been measured
    results = suite.results()
    paths = write(results) if write is not None else []
    print_report(results, console)
    for path in paths:
        console.print(f"wrote {path}", highlight=False)
    if mistake is not None:
        raise mistake
    return INTERRUPTED if interrupted else FAILED if suite.has_failures else 0


def _reason_of(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}".strip(": ")
