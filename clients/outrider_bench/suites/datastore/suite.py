"""The datastore suite: beside models, over gRPC, in process, and when something fails."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from outrider_bench.config import DatastoreConfig
from outrider_bench.environment import describe_environment
from outrider_bench.result import Section
from outrider_bench.suite import Log, Suite
from outrider_bench.suites.datastore.generation import measure_generation
from outrider_bench.suites.datastore.inprocess import (
    made_up_files,
    measure_local_tiers,
    measure_replay,
    measure_ring,
)
from outrider_bench.suites.datastore.lookup import measure_lookups
from outrider_bench.suites.datastore.outages import measure_outages
from outrider_bench.suites.datastore.replicas import measure_replicas
from outrider_bench.suites.datastore.report import report_of
from outrider_bench.suites.datastore.sessions import measure_sessions
from outrider_bench.suites.datastore.sizes import DatastoreRun, sizes_of
from outrider_bench.workers.client import Worker

WORKER_MODULE = "outrider_bench.workers.datastore"


class DatastoreSuite(Suite):
    """Measures the retrieval datastore beside its targets and what the machine could do."""

    name, report_name, essential = "datastore", "report.md", frozenset({"worker"})
    report_of = staticmethod(report_of)

    def __init__(self, config: DatastoreConfig) -> None:
        super().__init__(config.cores)
        self.config = config
        self._sections: list[Section] = []
        self._durations_s: dict[str, float] = {}

    async def measure(self, log: Log) -> None:
        with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
            run = DatastoreRun(self.config, sizes_of(self.config), Path(folder), log)
            log("starting")
            await self.attempt("worker", partial(self._run_with_worker, run))

    def found(self) -> dict[str, Any]:
        config = self.config
        return {
            "environment": describe_environment({}, config.cores),
            "config": {
                "repeats": config.repeats,
                "seed": config.seed,
                "cores": list(config.cores),
                "is_quick": config.is_quick,
                "sizes": asdict(sizes_of(config)),
            },
            "durations_s": self._durations_s,
            "sections": [section.to_json() for section in self._sections],
        }

    async def _run_with_worker(self, run: DatastoreRun) -> None:
        worker = await Worker.start(WORKER_MODULE, [], run.client_cores[0] if run.client_cores else None)
        try:
            await self._run_parts(run, worker)
        finally:
            await worker.stop()

    async def _run_parts(self, run: DatastoreRun, worker: Worker) -> None:
        files = made_up_files(run)

        async def generation() -> list[Section]:
            nonlocal files
            sections, files = await measure_generation(run)
            return sections

        # First what shows real text to the others.
        await self._run_part("generation", generation)
        await self._run_part("lookup", lambda: measure_lookups(run, worker))
        await self._run_part("local tiers", lambda: measure_local_tiers(run, worker, files))
        await self._run_part("ring", lambda: measure_ring(run, worker))
        await self._run_part("replicas", lambda: measure_replicas(run))
        await self._run_part("outages", lambda: measure_outages(run))
        await self._run_part("sessions", lambda: measure_sessions(run))
        await self._run_part("replay", lambda: measure_replay(run, worker, files))

    async def _run_part(self, name: str, measure: Callable[[], Awaitable[list[Section]]]) -> None:
        async def keep() -> None:
            self._sections += await measure()

        began = time.perf_counter()
        await self.attempt(name, keep)
        self._durations_s[name] = time.perf_counter() - began
