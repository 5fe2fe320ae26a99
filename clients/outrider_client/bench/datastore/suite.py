"""What is measured, in which order, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console

from outrider_client.bench.config import DatastoreConfig
from outrider_client.bench.datastore.generation import measure_generation
from outrider_client.bench.datastore.inprocess import (
    made_up_files,
    measure_local_tiers,
    measure_replay,
    measure_ring,
)
from outrider_client.bench.datastore.lookup import measure_lookups
from outrider_client.bench.datastore.numbers import Section
from outrider_client.bench.datastore.outages import measure_outages
from outrider_client.bench.datastore.plan import Plan, Say, sizes_of
from outrider_client.bench.datastore.replicas import measure_replicas
from outrider_client.bench.datastore.report import print_report, write_report
from outrider_client.bench.datastore.sessions import measure_sessions
from outrider_client.bench.datastore.streams import NoAnswer
from outrider_client.bench.drivers import GenerationFailed
from outrider_client.bench.environment import describe_environment
from outrider_client.bench.workers import Worker, WorkerError
from outrider_client.child import ChildFailed
from outrider_client.errors import OutriderError
from outrider_client.failures import FAILED, INTERRUPTED
from outrider_client.local_redis import RedisFailed, RedisNotFound
from outrider_client.stack import termination_as_exit

WORKER_MODULE = "outrider.datastore.bench_worker"

FAILURES = (
    ChildFailed,
    GenerationFailed,
    NoAnswer,
    OutriderError,
    RedisFailed,
    RedisNotFound,
    TimeoutError,
    WorkerError,
    grpc.aio.AioRpcError,
)
"""What can go wrong with something that is measured. One part that fails does not take the others with it."""


class DatastoreSuite:
    """One run. What has been measured is kept however it ends."""

    def __init__(self, config: DatastoreConfig) -> None:
        self.config = config
        self.failures: dict[str, str] = {}
        """What went wrong, by part."""
        self._sections: list[Section] = []
        self._durations_s: dict[str, float] = {}
        self._is_complete = False

    async def run(self, say: Say) -> None:
        """Runs all parts. `say` hears what is going on."""
        with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
            plan = Plan(self.config, sizes_of(self.config), Path(folder), say)
            say("starting")
            worker = await Worker.start(WORKER_MODULE, [], plan.client_cores[0] if plan.client_cores else None)
            try:
                await self._run_parts(plan, worker)
            finally:
                await worker.stop()
        self._is_complete = True

    def results(self) -> dict[str, Any]:
        """What is known so far, as results.json has it."""
        config = self.config
        return {
            "suite": "datastore",
            "environment": describe_environment({}, config.cores),
            "config": {
                "repeats": config.repeats,
                "seed": config.seed,
                "cores": list(config.cores),
                "is_quick": config.is_quick,
                "sizes": asdict(sizes_of(config)),
            },
            "interrupted": not self._is_complete,
            "failures": self.failures,
            "durations_s": self._durations_s,
            "sections": [section.to_json() for section in self._sections],
        }

    async def _run_parts(self, plan: Plan, worker: Worker) -> None:
        files = made_up_files(plan)

        async def generation() -> list[Section]:
            nonlocal files
            sections, files = await measure_generation(plan)
            return sections

        # First what shows real text to the others.
        await self._run_part("generation", generation)
        await self._run_part("lookup", lambda: measure_lookups(plan, worker))
        await self._run_part("local tiers", lambda: measure_local_tiers(plan, worker, files))
        await self._run_part("ring", lambda: measure_ring(plan, worker))
        await self._run_part("replicas", lambda: measure_replicas(plan))
        await self._run_part("outages", lambda: measure_outages(plan))
        await self._run_part("sessions", lambda: measure_sessions(plan))
        await self._run_part("replay", lambda: measure_replay(plan, worker, files))

    async def _run_part(self, name: str, measure: Callable[[], Awaitable[list[Section]]]) -> None:
        began = time.perf_counter()
        try:
            self._sections += await measure()
        except FAILURES as error:
            self.failures[name] = _reason_of(error)
        except BaseExceptionGroup as group:
            _, others = group.split(FAILURES)
            if others is not None:
                raise
            self.failures[name] = _reason_of(group.exceptions[0])
        self._durations_s[name] = time.perf_counter() - began


def run_and_report(config: DatastoreConfig, out: Path | None, console: Console) -> int:
    """Runs, then prints and writes. Ctrl-C ends the run, not the report of what has been measured. Returns the exit
    status: missed targets are results, parts that failed are failures."""
    suite = DatastoreSuite(config)
    interrupted = False
    mistake: Exception | None = None
    if config.cores:
        os.sched_setaffinity(0, {config.cores[-1]})

    def say(text: str) -> None:
        print(f"{time.perf_counter() - began:5.0f} s  {text}", file=sys.stderr, flush=True)

    began = time.perf_counter()
    try:
        with termination_as_exit():
            asyncio.run(suite.run(say))
    except (KeyboardInterrupt, SystemExit):
        interrupted = True
    except WorkerError as error:
        suite.failures["worker"] = str(error)
    except Exception as error:
        mistake = error  # in this program: its traceback comes after what has been measured
    results = suite.results()
    paths = write_report(results, out) if out is not None else []
    print_report(results, console)
    for path in paths:
        console.print(f"wrote {path}", highlight=False)
    if mistake is not None:
        raise mistake
    return INTERRUPTED if interrupted else FAILED if suite.failures else 0


def _reason_of(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}".strip(": ")
