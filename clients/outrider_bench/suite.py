"""The base of all suites: run, end on request, keep all results, print and write them.

A part that fails does not end the others, and Ctrl-C ends the run, but not the report of what was measured.
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
"""Takes one line about the progress."""

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
"""Possible failures of what is measured; anything else is a mistake in this program."""


class Suite(ABC):
    """A `Suite` is one run. However the run ends, the values measured so far are kept."""

    name: ClassVar[str]
    """Name of the subcommand, and of the suite's package."""

    def __init__(self, cores: tuple[int, ...] = ()) -> None:
        """`cores`: the first is for what is measured, the last for everything else; empty means not pinned."""
        self.cores = cores
        self.failures: dict[str, str] = {}
        """Reasons of failures, by what has failed."""
        self.is_complete = False
        self.duration_s = 0.0

    @abstractmethod
    async def measure(self, log: Log) -> None:
        """Measures everything."""

    @abstractmethod
    def found(self) -> dict[str, Any]:
        """Returns the results so far: the suite's own part of results.json."""

    @staticmethod
    @abstractmethod
    def report_of(results: Mapping[str, Any]) -> Report:
        """Makes the report of what results.json keeps."""

    @property
    def has_failures(self) -> bool:
        """True if anything could not be measured."""
        return bool(self.failures)

    def results(self) -> dict[str, Any]:
        """Returns everything that results.json keeps."""
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
        # The numbers first: they are kept, whatever goes wrong with the rest.
        # `allow_nan`: Python would write NaN and Infinity, which no other reader of JSON accepts.
        data.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        text.write_text(cls.report_of(results).to_markdown(), encoding="utf-8")
        return [data, text]

    def run(self, out: Path | None, console: Console) -> int:
        """Measures, then prints and writes.

        Args:
            out: Folder for the files; None means none.
            console: Takes the report.

        Returns:
            The exit status. Missed targets are results; a failed measurement is a failure.
        """
        is_interrupted, mistake = False, None
        began = time.perf_counter()
        if self.cores:
            # Children inherit this; those that are measured then move to their own core.
            os.sched_setaffinity(0, {self.cores[-1]})

        def log(text: str) -> None:
            print(f"{time.perf_counter() - began:5.0f} s  {text}", file=sys.stderr, flush=True)

        try:
            with termination_as_exit():
                asyncio.run(self._measure(log, began))
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C, and what `termination_as_exit` makes of SIGTERM and SIGHUP
            is_interrupted = True
        except Exception as error:
            mistake = error  # in this program: its traceback comes after the results
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
        """Does something that may fail as FAILURES lists; `failures[name]` then has the reason."""
        try:
            await work()
        except FAILURES as error:
            self.failures[name] = _reason_of(error)
        except BaseExceptionGroup as group:
            # A group that contains a mistake of ours is raised again.
            _, others = group.split(FAILURES)
            if others is not None:
                raise
            self.failures[name] = _reason_of(group.exceptions[0])


def _reason_of(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}".strip(": ")
