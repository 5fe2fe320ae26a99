"""The base of all suites: run, end when told to, keep what is known, print and write it.

A part that fails does not take the others with it, and Ctrl-C ends the run, not the report of what was measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import grpc
from rich.console import Console

from outrider_bench.drivers import GenerationFailed, StackError
from outrider_bench.report import Report
from outrider_bench.workers.client import WorkerError
from outrider_cli.failures import FAILED, INTERRUPTED
from outrider_cli.local.process import ProcessFailed
from outrider_cli.local.redis import RedisFailed, RedisNotFound
from outrider_cli.local.stack import termination_as_exit
from outrider_client.errors import OutriderError

FORMAT_VERSION = 3
"""The format of results.json."""
Log = Callable[[str], None]
"""Takes one line about what is going on."""

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
"""Ways in which something that is measured can fail; anything else is a mistake in this program."""


class Suite(ABC):
    """A `Suite` is one run. However the run ends, the values measured so far are kept."""

    name: ClassVar[str]
    """Name of the subcommand, and of the suite's package."""

    def __init__(self, cores: tuple[int, ...] = ()) -> None:
        """`cores`: the first is for what is measured, the last for everything else; empty means not pinned."""
        self.cores = cores
        self.failures: dict[str, str] = {}
        """Reasons of what went wrong, by what it was."""
        self.is_complete = False
        self.duration_s = 0.0

    @abstractmethod
    async def measure(self, log: Log) -> None:
        """Measure everything."""

    @abstractmethod
    def found(self) -> dict[str, Any]:
        """Return what is known so far: the part of results.json that is this suite's own."""

    @staticmethod
    @abstractmethod
    def report_of(results: Mapping[str, Any]) -> Report:
        """Make the report of what results.json keeps."""

    @property
    def has_failures(self) -> bool:
        """True if anything could not be measured."""
        return bool(self.failures)

    def results(self) -> dict[str, Any]:
        """Return everything that results.json keeps."""
        return {
            "format": FORMAT_VERSION,
            "suite": self.name,
            "interrupted": not self.is_complete,
            "duration_s": self.duration_s,
            "failures": self.failures,
            **self.found(),
        }

    @classmethod
    def write(cls, results: Mapping[str, Any], folder: Path) -> list[Path]:
        """Writes results and report into a folder; returns the paths."""
        folder.mkdir(parents=True, exist_ok=True)
        data, text = folder / "results.json", folder / "report.md"
        # First of all the numbers: whatever goes wrong with the rest, they are kept.
        # `allow_nan`: Python would write NaN and Infinity, which no other reader of JSON takes.
        data.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        text.write_text(cls.report_of(results).to_markdown(), encoding="utf-8")
        return [data, text]

    def run(self, out: Path | None, console: Console) -> int:
        """Measure, then print and write.

        Args:
            out: Folder for what is written; None means that nothing is.
            console: Takes the report.

        Returns:
            The exit status: missed targets are results, what could not be measured is a failure.
        """
        is_interrupted, mistake = False, None
        began = time.perf_counter()
        if self.cores:
            # Children inherit this; those that are measured then move to the core of their own.
            os.sched_setaffinity(0, {self.cores[-1]})

        def log(text: str) -> None:
            print(f"{time.perf_counter() - began:5.0f} s  {text}", file=sys.stderr, flush=True)

        try:
            with termination_as_exit():
                asyncio.run(self._measure(log, began))
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C, and what `termination_as_exit` makes of SIGTERM and SIGHUP
            is_interrupted = True
        except Exception as error:
            mistake = error  # in this program: its traceback comes after what has been measured
        self._leave(out, console)
        if mistake is not None:
            raise mistake
        return INTERRUPTED if is_interrupted else FAILED if self.has_failures else 0

    async def _measure(self, log: Log, began: float) -> None:
        try:
            await self.measure(log)
        finally:
            self.duration_s = time.perf_counter() - began
        self.is_complete = True

    def _leave(self, out: Path | None, console: Console) -> None:
        results = self.results()
        paths = self.write(results, out) if out is not None else []
        self.report_of(results).print(console)
        for path in paths:
            console.print(f"wrote {path}", highlight=False)

    async def attempt(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        """Do something that may fail in one of the ways of FAILURES; `failures` then has the reason under its name."""
        try:
            await work()
        except FAILURES as error:
            self.failures[name] = _reason_of(error)
        except BaseExceptionGroup as group:
            # A group in which a mistake of ours is hidden goes on as it is.
            _, others = group.split(FAILURES)
            if others is not None:
                raise
            self.failures[name] = _reason_of(group.exceptions[0])


def _reason_of(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}".strip(": ")
