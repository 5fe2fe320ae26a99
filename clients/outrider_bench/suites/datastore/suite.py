"""What is measured, in which order, and what is left behind."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider_bench import suite as suites
from outrider_bench.config import DatastoreConfig
from outrider_bench.environment import describe_environment
from outrider_bench.result import Section
from outrider_bench.suite import Say, attempt, run_suite
from outrider_bench.suites.datastore.generation import measure_generation
from outrider_bench.suites.datastore.inprocess import (
    made_up_files,
    measure_local_tiers,
    measure_replay,
    measure_ring,
)
from outrider_bench.suites.datastore.lookup import measure_lookups
from outrider_bench.suites.datastore.outages import measure_outages
from outrider_bench.suites.datastore.plan import Plan, sizes_of
from outrider_bench.suites.datastore.replicas import measure_replicas
from outrider_bench.suites.datastore.report import print_report, write_report
from outrider_bench.suites.datastore.sessions import measure_sessions
from outrider_bench.suites.datastore.streams import NoAnswer
from outrider_bench.workers.client import Worker

WORKER_MODULE = "outrider_bench.workers.datastore"

FAILURES = (*suites.FAILURES, NoAnswer)


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
            await attempt("worker", partial(self._run_with_worker, plan), self.failures)
        self._is_complete = "worker" not in self.failures

    @property
    def has_failures(self) -> bool:
        """Whether a part could not be measured."""
        return bool(self.failures)

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

    async def _run_with_worker(self, plan: Plan) -> None:
        worker = await Worker.start(WORKER_MODULE, [], plan.client_cores[0] if plan.client_cores else None)
        try:
            await self._run_parts(plan, worker)
        finally:
            await worker.stop()

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
        async def run() -> None:
            self._sections += await measure()

        began = time.perf_counter()
        await attempt(name, run, self.failures, FAILURES)
        self._durations_s[name] = time.perf_counter() - began


def run_and_report(config: DatastoreConfig, out: Path | None, console: Console) -> int:
    """Runs, prints and, into the folder `out`, writes; see `run_suite`."""
    write = None if out is None else partial(write_report, folder=out)
    return run_suite(DatastoreSuite(config), config.cores, console, print_report, write)
