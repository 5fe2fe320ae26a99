"""The network suite: behind a proxy, in simulated time, over a lossy network, at the edge."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from outrider_bench.config import NetworkConfig
from outrider_bench.drivers import Services, describe_server, running_services, stack_config
from outrider_bench.environment import describe_environment
from outrider_bench.experiment import Experiment
from outrider_bench.running import Running, run_experiment, turns_of
from outrider_bench.samples import Block
from outrider_bench.suite import ExperimentSuite, Log
from outrider_bench.suites.network.bound import (
    USUAL_LATENCY_MS,
    USUAL_OVERHEAD_MS,
    Bound,
    MeasuredCosts,
    bound_of,
    measure_forwards,
    watch,
)
from outrider_bench.suites.network.claims import NetworkEvidence, claims_of
from outrider_bench.suites.network.experiments import experiments_of, rtt_name, sizes_of
from outrider_bench.suites.network.far_away import driver_over_wan, drivers_at_edge
from outrider_bench.suites.network.report import report_of
from outrider_bench.suites.network.round_trips import run_round_trips
from outrider_bench.suites.network.traffic import CountingDriver, TrafficCount
from outrider_cli.links.direction import LinkSettings


class NetworkSuite(ExperimentSuite):
    """Measures the methods over networks: longer, slower, lossy, and from the edge."""

    name = "network"
    report_of = staticmethod(report_of)

    def __init__(self, config: NetworkConfig) -> None:
        self.config = config
        self.sizes = sizes_of(config)
        super().__init__(config.cores, config.seed, experiments_of(config.parts, self.sizes, config.repeats))
        self.traffic = TrafficCount()
        self.bounds: dict[float, Bound] = {}
        self.links: dict[str, str] = {}
        """Sentences about what stood between the services of a part."""

    async def measure(self, log: Log) -> None:
        alone = {"simulation": self._simulate, "wan": self._run_over_wan, "edge": self._run_at_edge}
        if {"rtt", "bytes"} & set(self.config.parts):
            await self.attempt("services", partial(self._run_behind_proxy, log))
        for part, run in alone.items():
            if part in self.config.parts:
                log(part)
                await self.attempt(part, partial(run, log))

    def found(self) -> dict[str, Any]:
        config = self.config
        evidence = NetworkEvidence(self.measured, self.experiments, self.traffic, self.bounds)
        return {
            "environment": describe_environment(self.models, config.cores),
            "config": {
                "parts": list(config.parts),
                "target": self.sizes.target,
                "repeats": config.repeats,
                "seed": config.seed,
                "cores": list(config.cores),
                "is_quick": config.is_quick,
            },
            "links": self.links,
            "experiments": self.experiments_to_json(),
            "traffic": [each.to_json() for each in self.traffic.all],
            "bounds": [bound.to_json() for bound in self.bounds.values()],
            "claims": [claim.to_json() for claim in claims_of(config.parts, evidence)],
        }

    def _keep_block(self, experiment: str, block: Block) -> None:
        self.keep(experiment, [block])

    def _of(self, part: str) -> list[Experiment]:
        return [experiment for experiment in self.experiments if experiment.part == part]

    async def _run_behind_proxy(self, log: Log) -> None:
        """Measure round trips and bytes: the same services, with a proxy between them that can be steered and read."""
        log("starting the services")
        some = next(experiment for experiment in self.experiments if experiment.part in ("rtt", "bytes"))
        # A proxy also where there is no distance, so that it costs the same at every round trip.
        config = replace(stack_config(self.config_of(some), 0.0), link=LinkSettings())
        async with running_services(config) as services:
            self.models = describe_server(services.info)
            for part, run in (("rtt", self._run_round_trips), ("bytes", self._count_bytes)):
                if part in self.config.parts:
                    await self.attempt(part, partial(run, services, log))

    async def _run_round_trips(self, services: Services, log: Log) -> None:
        assert services.stack.link is not None
        config = self.config
        self.contender_failures |= await run_round_trips(
            self._of("rtt"), config.seed, config.cores, services.driver, services.stack.link, log, self._keep_block
        )

    async def _count_bytes(self, services: Services, log: Log) -> None:
        link = services.stack.link
        assert link is not None
        link.change(delay_ms=0)
        driver = CountingDriver(services.driver, link)
        for experiment in self._of("bytes"):
            log(experiment.title)

            # The default binds this round's experiment: a closure would see the loop's last one.
            def keep(block: Block, experiment: Experiment = experiment) -> None:
                self._keep_block(experiment.name, block)
                self.traffic.add(block, driver)

            config = self.config_of(experiment)
            running = Running(experiment, config, {"stack": driver}, keep)
            # Nothing is timed: one who opens the connection, and one who chooses by what it knows, will do.
            some = [one for one in experiment.contenders if one.method == "auto"] + [experiment.contenders[0]]
            present = await running.warm_up(some.__contains__)
            await running.take(turns_of(experiment, config, present))
            self.contender_failures[experiment.name] = running.failures

    async def _simulate(self, log: Log) -> None:
        core = self.config.cores[0] if self.config.cores else None
        log("measuring forwards")
        target_ms, draft_ms = await measure_forwards(self.sizes.target, core)
        rtts_ms = {0.0: self.sizes.rtts_ms, 1.0: self.sizes.sampled_rtts_ms}
        log("watching the draft model")
        odds = await watch(list(rtts_ms), self.sizes, self.config.seed, core)
        overhead_ms, latency_ms = self._measured_latencies()
        costs = MeasuredCosts(target_ms, draft_ms, overhead_ms, latency_ms)
        for temperature, rtts in rtts_ms.items():
            log(f"simulating T = {temperature:g}")
            self.bounds[temperature] = await bound_of(temperature, odds[temperature], costs, rtts, self.sizes)

    def _measured_latencies(self) -> tuple[float, float]:
        """Return milliseconds of a round beside its forward, and of a message and its answer without a round trip.

        Both are those of best-first.
        """
        name = rtt_name(0.0, 0.0)
        rows = self.measured.rows(name, self.sizes.num_prompts, self.config.repeats)
        for row in rows:
            if row["method"] == "best-first" and row["overhead_ms_p50"] is not None:
                # The latency has the draft model's forwards in it, whose time the simulation adds itself.
                latency_ms = row["draft_latency_ms_p50"] - row["draft_forward_ms_p50"]
                return row["overhead_ms_p50"], max(0.0, latency_ms)
        return USUAL_OVERHEAD_MS, USUAL_LATENCY_MS

    async def _run_over_wan(self, log: Log) -> None:
        for experiment in self._of("wan"):
            log(f"starting the services: {experiment.title}")
            config = self.config_of(experiment)
            async with driver_over_wan(config) as (driver, link):
                self.links["wan"] = link
                failures = await run_experiment(
                    experiment, config, {"stack": driver}, partial(self._keep_block, experiment.name)
                )
                self.contender_failures[experiment.name] = failures

    async def _run_at_edge(self, log: Log) -> None:
        for experiment in self._of("edge"):
            config = self.config_of(experiment)
            async with drivers_at_edge(config) as drivers:
                running = Running(experiment, config, drivers, partial(self._keep_block, experiment.name))
                await running.take(turns_of(experiment, config, await running.warm_up()))
                self.contender_failures[experiment.name] = running.failures
