"""The faults suite: sessions that generate while everything around them fails."""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from outrider_bench.config import FaultsConfig
from outrider_bench.environment import describe_environment
from outrider_bench.suite import Log, Suite
from outrider_bench.suites.faults.claims import sections_of
from outrider_bench.suites.faults.experiments import Fault, duration_s, faults_of, sizes_of
from outrider_bench.suites.faults.fault_stack import FaultStack
from outrider_bench.suites.faults.observed import Holdings, Observed, Suffered, holdings_of
from outrider_bench.suites.faults.report import report_of
from outrider_bench.suites.faults.sessions import Case, cases_of, run_session, with_answers


class FaultsSuite(Suite):
    """Counts what callers notice of faults, and what the faults leave behind."""

    name, report_name, essential = "faults", "report.md", frozenset({"run"})
    report_of = staticmethod(report_of)

    def __init__(self, config: FaultsConfig) -> None:
        super().__init__()
        self.config = config
        self._sizes = sizes_of(config)
        self._observed = Observed(time.monotonic())
        self._snapshots: list[Holdings] = []

    async def measure(self, log: Log) -> None:
        with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
            await self.attempt("run", partial(self._run, Path(folder), log))

    def found(self) -> dict[str, Any]:
        config = self.config
        return {
            "environment": describe_environment({}, ()),
            "config": {
                "minutes": duration_s(config) / 60,
                "num_faults": len(faults_of(config)),
                "num_sessions": config.num_sessions,
                "seed": config.seed,
                "is_quick": config.is_quick,
                "sizes": asdict(self._sizes),
            },
            "sections": [section.to_json() for section in sections_of(self._observed, self._snapshots)],
            "holdings": [holdings.to_json() for holdings in self._snapshots],
            **self._observed.to_json(),
        }

    async def _run(self, folder: Path, log: Log) -> None:
        log("starting Redis, the datastore, the speculator and two verifiers")
        async with FaultStack(folder, self.config.seed) as stack:
            cases = cases_of(self._sizes, self.config.seed)
            log(f"generating {len(cases)} texts by plain decoding")
            cases = await with_answers(cases, stack.verifiers[0].address)
            self._observed = Observed(time.monotonic())
            await self._phase("calm", stack, cases, [], self._sizes.calm_s, log)
            await self._phase("faults", stack, cases, faults_of(self.config), duration_s(self.config), log)
            await self._phase("calm again", stack, cases, [], self._sizes.calm_s, log)

    async def _phase(
        self, name: str, stack: FaultStack, cases: list[Case], faults: list[Fault], lasting_s: float, log: Log
    ) -> None:
        """Has sessions generate for some time while faults happen; records what is held once all have ended."""
        log(f"{name}: {lasting_s:.0f} s, {len(faults)} faults")
        addresses = [verifier.address for verifier in stack.verifiers]
        over, began = asyncio.Event(), time.monotonic()
        async with asyncio.TaskGroup() as sessions:
            for number in range(self.config.num_sessions):
                seed = f"{self.config.seed} {name} {number}"
                sessions.create_task(run_session(addresses, cases, seed, self._observed, over))
            async with asyncio.TaskGroup() as hurting:
                hurting.create_task(asyncio.sleep(lasting_s))
                for fault in faults:
                    hurting.create_task(self._suffer(stack, fault, began, log))
            # After the last fault is healed: sessions generate until then, and end by themselves, uncancelled.
            over.set()
        self._snapshots.append(await holdings_of(stack))

    async def _suffer(self, stack: FaultStack, fault: Fault, began: float, log: Log) -> None:
        await asyncio.sleep(max(0.0, began + fault.due_s - time.monotonic()))
        observed = self._observed
        suffered: list[Suffered] = []

        def on_begin() -> None:
            log(f"fault {fault.number + 1}: {fault.kind} of the {fault.part}")
            suffered.append(Suffered(fault, time.monotonic() - observed.began))
            observed.suffered += suffered

        def on_return() -> None:
            suffered[0].returned_s = time.monotonic() - observed.began

        await stack.suffer(fault, on_begin, on_return)
