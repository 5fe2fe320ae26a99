"""What happens in which order, and what is left behind."""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider_bench.config import FaultsConfig
from outrider_bench.environment import describe_environment
from outrider_bench.suite import Say, attempt, run_suite
from outrider_bench.suites.faults.leaks import Holdings, holdings_of
from outrider_bench.suites.faults.observed import Observed, Suffered
from outrider_bench.suites.faults.plan import Fault, duration_s, faults_of, sizes_of
from outrider_bench.suites.faults.report import print_report, write_report
from outrider_bench.suites.faults.sessions import Case, answered, cases_of, run_session
from outrider_bench.suites.faults.stage import Stage
from outrider_bench.suites.faults.verdicts import sections_of


class FaultsSuite:
    """One run. What has been seen is kept however it ends."""

    def __init__(self, config: FaultsConfig) -> None:
        self.config = config
        self.failures: dict[str, str] = {}
        """What went wrong with the suite itself, by what it was."""
        self._sizes = sizes_of(config)
        self._observed = Observed(time.monotonic())
        self._snapshots: list[Holdings] = []
        self._is_complete = False

    @property
    def has_failures(self) -> bool:
        """Whether something could not be done."""
        return bool(self.failures)

    async def run(self, say: Say) -> None:
        """Starts everything, hurts it, and looks at what is left."""
        with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
            await attempt("run", partial(self._run, Path(folder), say), self.failures)
        self._is_complete = "run" not in self.failures

    def results(self) -> dict[str, Any]:
        """What is known so far, as results.json has it."""
        config = self.config
        return {
            "suite": "faults",
            "environment": describe_environment({}, ()),
            "config": {
                "minutes": duration_s(config) / 60,
                "num_faults": len(faults_of(config)),
                "num_sessions": config.num_sessions,
                "seed": config.seed,
                "is_quick": config.is_quick,
                "sizes": asdict(self._sizes),
            },
            "interrupted": not self._is_complete,
            "failures": self.failures,
            "sections": [section.to_json() for section in sections_of(self._observed, self._snapshots)],
            "holdings": [holdings.to_json() for holdings in self._snapshots],
            **self._observed.to_json(),
        }

    async def _run(self, folder: Path, say: Say) -> None:
        say("starting Redis, the datastore, the speculator and two verifiers")
        async with Stage(folder, self.config.seed) as stage:
            cases = cases_of(self._sizes, self.config.seed)
            say(f"generating {len(cases)} texts by plain decoding")
            cases = await answered(cases, stage.verifiers[0].address)
            self._observed = Observed(time.monotonic())
            await self._phase("calm", stage, cases, [], self._sizes.calm_s, say)
            await self._phase("faults", stage, cases, faults_of(self.config), duration_s(self.config), say)
            await self._phase("calm again", stage, cases, [], self._sizes.calm_s, say)

    async def _phase(
        self, name: str, stage: Stage, cases: list[Case], faults: list[Fault], lasting_s: float, say: Say
    ) -> None:
        """Sessions generate, for some time, while faults happen; when all have ended, what they have left is noted."""
        say(f"{name}: {lasting_s:.0f} s, {len(faults)} faults")
        addresses = [verifier.address for verifier in stage.verifiers]
        over, began = asyncio.Event(), time.monotonic()
        async with asyncio.TaskGroup() as sessions:
            for number in range(self.config.num_sessions):
                seed = f"{self.config.seed} {name} {number}"
                sessions.create_task(run_session(addresses, cases, seed, self._observed, over))
            async with asyncio.TaskGroup() as hurting:
                hurting.create_task(asyncio.sleep(lasting_s))
                for fault in faults:
                    hurting.create_task(self._suffer(stage, fault, began, say))
            over.set()
        self._snapshots.append(await holdings_of(stage))

    async def _suffer(self, stage: Stage, fault: Fault, began: float, say: Say) -> None:
        await asyncio.sleep(max(0.0, began + fault.due_s - time.monotonic()))
        observed = self._observed
        suffered: list[Suffered] = []

        def on_begin() -> None:
            say(f"fault {fault.number + 1}: {fault.kind} of the {fault.part}")
            suffered.append(Suffered(fault, time.monotonic() - observed.began))
            observed.suffered += suffered

        def on_return() -> None:
            suffered[0].returned_s = time.monotonic() - observed.began

        await stage.suffer(fault, on_begin, on_return)


def run_and_report(config: FaultsConfig, out: Path | None, console: Console) -> int:
    """Runs, prints and, into the folder `out`, writes; see `run_suite`."""
    write = None if out is None else partial(write_report, folder=out)
    return run_suite(FaultsSuite(config), (), console, print_report, write)
