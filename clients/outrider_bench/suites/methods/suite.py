"""The methods suite: experiments that share a draft model share their services."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from outrider.v1 import verifier_pb2
from outrider_bench.bootstrap import with_intervals
from outrider_bench.config import MethodsConfig
from outrider_bench.drivers import Driver, GenerationFailed, describe_server, merge_models, running_stack
from outrider_bench.environment import describe_environment
from outrider_bench.experiment import DRAFT, LLAMA_CPP, TARGET, Experiment
from outrider_bench.llama_cpp import running_llama_cpp
from outrider_bench.measured import Measured
from outrider_bench.result import Measurement
from outrider_bench.running import run_experiment
from outrider_bench.samples import Block
from outrider_bench.suite import ExperimentSuite, Log
from outrider_bench.suites.methods.claims import MethodsEvidence, claims_of
from outrider_bench.suites.methods.estimate import NUM_SIMULATING, seconds_of, total_seconds
from outrider_bench.suites.methods.experiments import DRAFT_C2_5, DRAFT_C5, experiments_of, sizes_of
from outrider_bench.suites.methods.prior import BuiltPrior, build_prior, check_prompts, load
from outrider_bench.suites.methods.replay import Replay, analyse
from outrider_bench.suites.methods.replay import to_json as replay_to_json
from outrider_bench.suites.methods.report import report_of
from outrider_bench.suites.methods.simulated.turns import run_simulated, start_pair
from outrider_bench.workers.client import Worker

_FORWARD_WORKER = "outrider_bench.workers.bare"
_COMPARED_DRAFTS = (DRAFT_C5, DRAFT_C2_5)
"""Draft models whose speed ratio the claims are about."""
_CONTEXT_LEN = 192
_SETTLE_S = 2.5
"""After a prior was loaded: verifier and speculator copy it in the background, for themselves."""


class MethodsSuite(ExperimentSuite):
    """Measures all methods, and an ablation for each paper's own claims."""

    name = "methods"
    report_of = staticmethod(report_of)

    def __init__(self, config: MethodsConfig) -> None:
        self.config = config
        self.sizes = sizes_of(config)
        experiments = experiments_of(config.parts, self.sizes, config.repeats)
        # Models that are not pinned share no core: what is claimed of that stays unmeasured.
        experiments = [one for one in experiments if config.cores or not one.shares_core]
        super().__init__(config.cores, config.seed, experiments)
        self._speed_ratios: dict[str, float] = {}
        self._checks: list[str] = []
        self._prior: BuiltPrior | None = None
        self._loaded: float = 0.0

    async def measure(self, log: Log) -> None:
        num_generations = sum(experiment.num_generations for experiment in self.experiments)
        minutes = total_seconds(self.experiments, self.sizes) / 60
        log(f"{num_generations} generations in {len(self.experiments)} experiments, about {minutes:.1f} minutes")
        # Requests of the replay are cut from held-out files here and now: there is nothing to look for.
        prompts = {prompt.text for one in self.experiments if one.off_at is None for prompt in one.prompts}
        if prompts:
            log("looking for the prompts in the training text")
            self._checks += check_prompts(sorted(prompts)).sentences
        simulated = [one for one in self.experiments if one.costs is not None]
        served = [one for one in self.experiments if one.costs is None]
        if simulated:
            await self.attempt("simulated time", partial(self._simulate, simulated, log))
        # Experiments with the same services stand together: they start once for each group.
        for (draft, shares_core), group in itertools.groupby(served, key=lambda one: one.services):
            name = f"everything with {draft}{' on one core' if shares_core else ''}"
            await self.attempt(name, partial(self._run_group, draft, list(group), log))

    def found(self) -> dict[str, Any]:
        config, measured = self.config, self.measured
        evidence = self._evidence(measured, None)
        return {
            "environment": describe_environment(self.models, config.cores),
            "config": {
                "parts": list(config.parts),
                "target": TARGET,
                "repeats": config.repeats,
                "seed": config.seed,
                "cores": list(config.cores),
                "is_quick": config.is_quick,
                "llama_server": config.llama_server,
            },
            "checks": self._checks,
            "speed_ratios": self._speed_ratios,
            "experiments": self.experiments_to_json(),
            "replay": replay_to_json(evidence.replay) if evidence.replay is not None else None,
            "claims": [claim.to_json() for claim in self._claims(measured, evidence)],
        }

    def _claims(self, measured: Measured, evidence: MethodsEvidence) -> list[Measurement]:
        """Return the claims, with intervals where more than one prompt was measured."""

        def drawn(random: np.random.Generator) -> list[Measurement]:
            return claims_of(self.config.parts, self._evidence(measured.resampled(random), random))

        claims = claims_of(self.config.parts, evidence)
        return with_intervals(claims, drawn, self.config.seed) if measured.can_vary else claims

    def _evidence(self, measured: Measured, random: np.random.Generator | None) -> MethodsEvidence:
        """Return all that was measured; with a generator, as a draw of the prompts and of the replay's requests."""
        return MethodsEvidence(measured, self.sizes, self._replay(random), self._speed_ratios)

    def _replay(self, random: np.random.Generator | None) -> Replay | None:
        for experiment in self.experiments:
            if experiment.off_at is not None:
                blocks = self._blocks.get(experiment.name, [])
                return analyse(blocks, len(experiment.prompts), self.sizes.replay_cold, random)
        return None

    async def _simulate(self, experiments: Sequence[Experiment], log: Log) -> None:
        """Run experiments in simulated time, on all cores at once: nothing of it is timed."""
        waiting = iter(experiments)

        async def work(core: int | None) -> None:
            worker = await start_pair(DRAFT, core)
            try:
                for one in waiting:
                    log(f"{one.name}: {one.num_generations} generations in simulated time, {seconds_of(one):.0f} s")
                    keep = partial(self._keep_block, one.name)
                    failures = await run_simulated(one, self.config_of(one), worker, keep)
                    self.contender_failures[one.name] = failures
            finally:
                await worker.stop()

        async with asyncio.TaskGroup() as group:
            for core in self.config.cores or (None,) * NUM_SIMULATING:
                group.create_task(work(core))

    async def _run_group(self, draft: str, experiments: Sequence[Experiment], log: Log) -> None:
        """Run the experiments of one draft model, on services that they share."""
        # On a core that both share there is no ratio of speeds side by side.
        if draft in _COMPARED_DRAFTS and not experiments[0].shares_core:
            await self.attempt(f"speed ratio of {draft}", partial(self._measure_speed_ratio, experiments[0], log))
        if self._prior is None and any(experiment.prior_share for experiment in experiments):
            await self.attempt("prior", partial(self._build_prior, log))
        log(f"starting the services with {draft}")
        # What was loaded is gone with the last Redis, unless REDIS_URL names one that stays.
        self._loaded = 0.0
        config = self.config_of(experiments[0])
        async with running_stack(config, 0.0) as (driver, info):
            self.models = merge_models(describe_server(info), self.models)
            for experiment in experiments:
                log(f"{experiment.name}: {experiment.num_generations} generations, {seconds_of(experiment):.0f} s")
                await self.attempt(experiment.title, partial(self._run_experiment, experiment, driver, info))

    async def _run_experiment(self, experiment: Experiment, driver: Driver, info: verifier_pb2.GetInfoResponse) -> None:
        if experiment.prior_share and experiment.prior_share != self._loaded:
            if self._prior is None:
                raise GenerationFailed("there is no prior")
            await load(info.datastore.address, self._prior, experiment.prior_share)
            self._loaded = experiment.prior_share
            await asyncio.sleep(_SETTLE_S)
        drivers: dict[str, Driver] = {"stack": driver}
        config = self.config_of(experiment)
        async with AsyncExitStack() as stack:
            if any(one.driver == LLAMA_CPP for one in experiment.contenders):
                await self.attempt(LLAMA_CPP, partial(self._start_llama_cpp, experiment, stack, drivers))
            failures = await run_experiment(experiment, config, drivers, partial(self._keep_block, experiment.name))
        self.contender_failures[experiment.name] = failures

    async def _start_llama_cpp(self, experiment: Experiment, stack: AsyncExitStack, drivers: dict[str, Driver]) -> None:
        config = replace(self.config_of(experiment), llama_server=self.config.llama_server)
        drivers[LLAMA_CPP] = await stack.enter_async_context(running_llama_cpp(config))

    def _keep_block(self, name: str, block: Block) -> None:
        self.keep(name, [block])

    async def _build_prior(self, log: Log) -> None:
        log("building the prior of double")
        with_prior = [experiment for experiment in self.experiments if experiment.prior_share]
        prompts = sorted({prompt.text for experiment in with_prior for prompt in experiment.prompts})
        longest = max(experiment.max_tokens for experiment in with_prior)
        self._prior = await build_prior(self.sizes, prompts, longest, self.config.cores)
        self._checks.append(self._prior.sentence)

    async def _measure_speed_ratio(self, experiment: Experiment, log: Log) -> None:
        """C: forwards of the draft model, one row each, that fit into one of the target."""
        log(f"measuring forwards of {experiment.draft}")
        config = self.config_of(experiment)
        worker = await Worker.start_pair(_FORWARD_WORKER, config, config.cores[0] if config.cores else None)
        try:
            times = await worker.call("measure", target_rows=[1], draft_rows=[1], context=_CONTEXT_LEN)
        finally:
            await worker.stop()
        self.models |= {"target": worker.hello["target"], experiment.draft: worker.hello["draft"]}
        self._speed_ratios[experiment.draft] = times["target_forward_ms"]["1"] / times["draft_forward_ms"]["1"]
