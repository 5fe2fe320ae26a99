"""What is measured, in which order, and what is left behind."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider_bench.config import BenchConfig, NetworkConfig
from outrider_bench.environment import describe_environment
from outrider_bench.experiment import Experiment
from outrider_bench.measured import Measured
from outrider_bench.running import Running, run_experiment, turns_of
from outrider_bench.samples import Block
from outrider_bench.servers import Services, describe_server, running_services, stack_config
from outrider_bench.suite import Say, attempt, run_suite
from outrider_bench.suites.network.asked import NetworkEvidence, claims_of
from outrider_bench.suites.network.bound import (
    USUAL_LATENCY_MS,
    USUAL_OVERHEAD_MS,
    Bound,
    MeasuredCosts,
    bound_of,
    measure_forwards,
    watch,
)
from outrider_bench.suites.network.edge import drivers_at_edge
from outrider_bench.suites.network.parts import experiments_of, rtt_name
from outrider_bench.suites.network.plan import sizes_of
from outrider_bench.suites.network.report import print_report, write_report
from outrider_bench.suites.network.round_trips import run_round_trips
from outrider_bench.suites.network.traffic import CountingDriver, TrafficCount
from outrider_bench.suites.network.wan import driver_over_wan
from outrider_cli.links.line import LinkSettings


class NetworkSuite:
    """One run. What has been measured is kept however it ends."""

    def __init__(self, config: NetworkConfig) -> None:
        self.config = config
        self.sizes = sizes_of(config)
        self.experiments = experiments_of(config.parts, self.sizes, config.repeats)
        self.failures: dict[str, str] = {}
        """What went wrong, by what it was."""
        self.traffic = TrafficCount()
        self.bounds: dict[float, Bound] = {}
        self.links: dict[str, str] = {}
        """What stood between the services of a part, in words."""
        self._blocks: dict[str, list[Block]] = {}
        self._failures_of: dict[str, dict[str, str]] = {}
        self._models: dict[str, dict[str, Any]] = {}
        self._duration_s = 0.0
        self._is_complete = False

    @property
    def has_failures(self) -> bool:
        """Whether anything could not be measured."""
        return bool(self.failures) or any(self._failures_of.values())

    async def run(self, say: Say) -> None:
        """Runs all parts. `say` hears what is going on."""
        began = time.perf_counter()
        alone = {"simulation": self._simulate, "wan": self._run_over_wan, "edge": self._run_at_edge}
        try:
            if {"rtt", "bytes"} & set(self.config.parts):
                await attempt("services", partial(self._run_behind_proxy, say), self.failures)
            for part, run in alone.items():
                if part in self.config.parts:
                    say(part)
                    await attempt(part, partial(run, say), self.failures)
        finally:
            self._duration_s = time.perf_counter() - began
        self._is_complete = True

    def keep(self, experiment: str, block: Block) -> None:
        """What an experiment has measured, at once: nothing of it is lost when the run ends."""
        self._blocks.setdefault(experiment, []).append(block)

    def results(self) -> dict[str, Any]:
        """What is known so far, as results.json has it."""
        config, measured = self.config, Measured(self._blocks)
        evidence = NetworkEvidence(measured, self.experiments, self.traffic, self.bounds)
        return {
            "suite": "network",
            "environment": describe_environment(self._models, config.cores),
            "config": {
                "parts": list(config.parts),
                "target": self.sizes.target,
                "repeats": config.repeats,
                "seed": config.seed,
                "cores": list(config.cores),
                "is_quick": config.is_quick,
            },
            "interrupted": not self._is_complete,
            "duration_s": self._duration_s,
            "failures": self.failures,
            "links": self.links,
            "experiments": [self._experiment_to_json(one, measured) for one in self.experiments if self._is_known(one)],
            "traffic": [each.to_json() for each in self.traffic.all],
            "bounds": [bound.to_json() for bound in self.bounds.values()],
            "claims": [claim.to_json() for claim in claims_of(config.parts, evidence)],
        }

    def _of(self, part: str) -> list[Experiment]:
        return [experiment for experiment in self.experiments if experiment.part == part]

    def _is_known(self, experiment: Experiment) -> bool:
        return experiment.name in self._blocks or bool(self._failures_of.get(experiment.name))

    def _experiment_to_json(self, experiment: Experiment, measured: Measured) -> dict[str, Any]:
        return {
            "name": experiment.name,
            "part": experiment.part,
            "title": experiment.title,
            "rtt_ms": experiment.rtt_ms,
            "target": experiment.target,
            "draft": experiment.draft,
            "num_prompts": len(experiment.prompts),
            "max_tokens": experiment.max_tokens,
            "repeats": experiment.repeats,
            "note": experiment.note,
            "failures": self._failures_of.get(experiment.name, {}),
            "rows": measured.rows(experiment.name, len(experiment.prompts), experiment.repeats),
        }

    def _config_of(self, experiment: Experiment) -> BenchConfig:
        return experiment.config(self.config.seed, self.config.cores)

    async def _run_behind_proxy(self, say: Say) -> None:
        """Round trips and bytes: the same services, with a proxy between them that can be told and asked."""
        say("starting the services")
        some = next(experiment for experiment in self.experiments if experiment.part in ("rtt", "bytes"))
        config = replace(stack_config(self._config_of(some), 0.0), link=LinkSettings())
        async with running_services(config) as services:
            self._models = describe_server(services.info)
            for part, run in (("rtt", self._run_round_trips), ("bytes", self._count_bytes)):
                if part in self.config.parts:
                    await attempt(part, partial(run, services, say), self.failures)

    async def _run_round_trips(self, services: Services, say: Say) -> None:
        assert services.stack.link is not None
        config = self.config
        self._failures_of |= await run_round_trips(
            self._of("rtt"), config.seed, config.cores, services.driver, services.stack.link, say, self.keep
        )

    async def _count_bytes(self, services: Services, say: Say) -> None:
        link = services.stack.link
        assert link is not None
        link.change(delay_ms=0)
        driver = CountingDriver(services.driver, link)
        for experiment in self._of("bytes"):
            say(experiment.title)

            def keep(block: Block, experiment: Experiment = experiment) -> None:
                self.keep(experiment.name, block)
                self.traffic.add(block, driver)

            config = self._config_of(experiment)
            running = Running(experiment, config, {"stack": driver}, keep)
            # Nothing is timed: one who opens the connection, and one who chooses by what it knows, will do.
            some = [one for one in experiment.contenders if one.method == "auto"] + [experiment.contenders[0]]
            present = await running.warm_up(some.__contains__)
            await running.take(turns_of(experiment, config, present))
            self._failures_of[experiment.name] = running.failures

    async def _simulate(self, say: Say) -> None:
        core = self.config.cores[0] if self.config.cores else None
        say("measuring forwards")
        target_ms, draft_ms = await measure_forwards(self.sizes.target, core)
        rtts_ms = {0.0: self.sizes.rtts_ms, 1.0: self.sizes.sampled_rtts_ms}
        say("watching the draft model")
        odds = await watch(list(rtts_ms), self.sizes, self.config.seed, core)
        overhead_ms, latency_ms = self._measured_latencies()
        costs = MeasuredCosts(target_ms, draft_ms, overhead_ms, latency_ms)
        for temperature, rtts in rtts_ms.items():
            say(f"simulating T = {temperature:g}")
            self.bounds[temperature] = await bound_of(temperature, odds[temperature], costs, rtts, self.sizes)

    def _measured_latencies(self) -> tuple[float, float]:
        """What a round takes beside its forward, and a message and its answer without a round trip, in milliseconds:
        as best-first had them."""
        name = rtt_name(0.0, 0.0)
        rows = Measured(self._blocks).rows(name, self.sizes.num_prompts, self.config.repeats)
        for row in rows:
            if row["method"] == "best-first" and row["overhead_ms_p50"] is not None:
                latency_ms = row["draft_latency_ms_p50"] - row["draft_forward_ms_p50"]
                return row["overhead_ms_p50"], max(0.0, latency_ms)
        return USUAL_OVERHEAD_MS, USUAL_LATENCY_MS

    async def _run_over_wan(self, say: Say) -> None:
        for experiment in self._of("wan"):
            say(f"starting the services: {experiment.title}")
            config = self._config_of(experiment)
            async with driver_over_wan(config) as (driver, link):
                self.links["wan"] = link
                failures = await run_experiment(experiment, config, driver, partial(self.keep, experiment.name))
                self._failures_of[experiment.name] = failures

    async def _run_at_edge(self, say: Say) -> None:
        for experiment in self._of("edge"):
            config = self._config_of(experiment)
            async with drivers_at_edge(config) as drivers:
                running = Running(experiment, config, drivers, partial(self.keep, experiment.name))
                await running.take(turns_of(experiment, config, await running.warm_up()))
                self._failures_of[experiment.name] = running.failures


def run_and_report(config: NetworkConfig, out: Path | None, console: Console) -> int:
    """Runs, prints and, into the folder `out`, writes; see `run_suite`."""
    write = None if out is None else partial(write_report, folder=out)
    return run_suite(NetworkSuite(config), config.cores, console, print_report, write)
