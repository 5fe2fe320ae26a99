"""What is measured, in which order, and what is left behind."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.v1 import verifier_pb2
from outrider_bench.config import MethodsConfig
from outrider_bench.drivers import Driver, GenerationFailed
from outrider_bench.environment import describe_environment
from outrider_bench.experiment import TARGET, Experiment
from outrider_bench.measured import Measured
from outrider_bench.running import run_experiment
from outrider_bench.samples import Block
from outrider_bench.servers import describe_server, running_stack
from outrider_bench.suite import Say, attempt, run_suite
from outrider_bench.suites.methods.asked import MethodsEvidence, claims_of
from outrider_bench.suites.methods.estimate import seconds_of, total_seconds
from outrider_bench.suites.methods.parts import experiments_of
from outrider_bench.suites.methods.plan import DRAFT_C2_5, DRAFT_C5, sizes_of
from outrider_bench.suites.methods.prior import BuiltPrior, build_prior, load
from outrider_bench.suites.methods.provenance import check_prompts
from outrider_bench.suites.methods.replay import Replay, analyse
from outrider_bench.suites.methods.replay import to_json as replay_to_json
from outrider_bench.suites.methods.report import print_report, write_report
from outrider_bench.workers.client import Worker

_FORWARD_WORKER = "outrider_bench.workers.bare"
_COMPARED_DRAFTS = (DRAFT_C5, DRAFT_C2_5)
"""Whose speed ratio claims are about."""
_CONTEXT_LEN = 192
_SETTLE_S = 2.5
"""After a prior was loaded: verifier and speculator copy it in the background, for themselves."""


class MethodsSuite:
    """One run. What has been measured is kept however it ends."""

    def __init__(self, config: MethodsConfig) -> None:
        self.config = config
        self.sizes = sizes_of(config)
        self.experiments: Sequence[Experiment] = experiments_of(config.parts, self.sizes, config.repeats)
        self.failures: dict[str, str] = {}
        """What went wrong, by what it was."""
        self._blocks: dict[str, list[Block]] = {}
        self._failures_of: dict[str, dict[str, str]] = {}
        self._speed_ratios: dict[str, float] = {}
        self._models: dict[str, dict[str, Any]] = {}
        self._checks: list[str] = []
        self._prior: BuiltPrior | None = None
        self._loaded: float = 0.0
        self._duration_s = 0.0
        self._is_complete = False

    @property
    def has_failures(self) -> bool:
        """Whether anything could not be measured."""
        return bool(self.failures) or any(self._failures_of.values())

    async def run(self, say: Say) -> None:
        """Runs all experiments. `say` hears what is going on."""
        began = time.perf_counter()
        num_generations = sum(experiment.num_generations for experiment in self.experiments)
        minutes = total_seconds(self.experiments, self.sizes) / 60
        say(f"{num_generations} generations in {len(self.experiments)} experiments, about {minutes:.1f} minutes")
        try:
            prompts = {prompt.text for one in self.experiments if one.off_at is None for prompt in one.prompts}
            if prompts:
                say("looking for the prompts in the training text")
                self._checks += check_prompts(sorted(prompts)).sentences
            for draft, group in itertools.groupby(self.experiments, key=lambda experiment: experiment.draft):
                await self._attempt(f"everything with {draft}", partial(self._run_group, draft, list(group), say))
        finally:
            self._duration_s = time.perf_counter() - began
        self._is_complete = True

    def keep(self, experiment: str, blocks: Iterable[Block]) -> None:
        """What an experiment has measured, at once: nothing of it is lost when the run ends."""
        self._blocks.setdefault(experiment, []).extend(blocks)

    def results(self) -> dict[str, Any]:
        """What is known so far, as results.json has it."""
        config, measured = self.config, Measured(self._blocks)
        replay = self._replay()
        evidence = MethodsEvidence(measured, self.sizes, replay, self._speed_ratios)
        return {
            "suite": "methods",
            "environment": describe_environment(self._models, config.cores),
            "config": {
                "parts": list(config.parts),
                "target": TARGET,
                "repeats": config.repeats,
                "seed": config.seed,
                "cores": list(config.cores),
                "is_quick": config.is_quick,
            },
            "interrupted": not self._is_complete,
            "duration_s": self._duration_s,
            "failures": self.failures,
            "checks": self._checks,
            "speed_ratios": self._speed_ratios,
            "experiments": [self._experiment_to_json(one, measured) for one in self.experiments if self._is_known(one)],
            "replay": replay_to_json(replay) if replay is not None else None,
            "claims": [claim.to_json() for claim in claims_of(config.parts, evidence)],
        }

    def _is_known(self, experiment: Experiment) -> bool:
        return experiment.name in self._blocks or experiment.name in self._failures_of

    def _experiment_to_json(self, experiment: Experiment, measured: Measured) -> dict[str, Any]:
        return {
            "name": experiment.name,
            "part": experiment.part,
            "title": experiment.title,
            "draft": experiment.draft,
            "prior_share": experiment.prior_share,
            "num_prompts": len(experiment.prompts),
            "max_tokens": experiment.max_tokens,
            "repeats": experiment.repeats,
            "note": experiment.note,
            "failures": self._failures_of.get(experiment.name, {}),
            "rows": measured.rows(
                experiment.name,
                len(experiment.prompts),
                experiment.repeats,
                None if experiment.off_at is None else len(experiment.off_at),
            ),
        }

    def _replay(self) -> Replay | None:
        for experiment in self.experiments:
            if experiment.off_at is not None:
                blocks = self._blocks.get(experiment.name, [])
                return analyse(blocks, len(experiment.prompts), self.sizes.replay_cold)
        return None

    async def _run_group(self, draft: str, experiments: Sequence[Experiment], say: Say) -> None:
        """The experiments of one draft model, on services that they share."""
        if draft in _COMPARED_DRAFTS:
            await self._attempt(f"speed ratio of {draft}", partial(self._measure_speed_ratio, experiments[0], say))
        if any(experiment.prior_share for experiment in experiments):
            await self._attempt("prior", partial(self._build_prior, experiments, say))
        say(f"starting the services with {draft}")
        self._loaded = 0.0
        config = experiments[0].config(self.config.seed, self.config.cores)
        async with running_stack(config, 0.0) as (driver, info):
            self._models = describe_server(info) | self._models
            for experiment in experiments:
                say(f"{experiment.name}: {experiment.num_generations} generations, {seconds_of(experiment):.0f} s")
                await self._attempt(experiment.title, partial(self._run_experiment, experiment, driver, info))

    async def _run_experiment(self, experiment: Experiment, driver: Driver, info: verifier_pb2.GetInfoResponse) -> None:
        if experiment.prior_share and experiment.prior_share != self._loaded:
            if self._prior is None:
                raise GenerationFailed("there is no prior")
            await load(info.datastore.address, self._prior, experiment.prior_share)
            self._loaded = experiment.prior_share
            await asyncio.sleep(_SETTLE_S)
        config = experiment.config(self.config.seed, self.config.cores)
        failures = await run_experiment(experiment, config, driver, lambda block: self.keep(experiment.name, [block]))
        self._failures_of[experiment.name] = failures

    async def _build_prior(self, experiments: Sequence[Experiment], say: Say) -> None:
        say("building the prior of double")
        with_prior = [experiment for experiment in experiments if experiment.prior_share]
        prompts = sorted({prompt.text for experiment in with_prior for prompt in experiment.prompts})
        longest = max(experiment.max_tokens for experiment in with_prior)
        self._prior = await build_prior(self.sizes, prompts, longest, self.config.cores)
        self._checks.append(self._prior.sentence)

    async def _measure_speed_ratio(self, experiment: Experiment, say: Say) -> None:
        """C: forwards of the draft model, one row each, that fit into one of the target."""
        say(f"measuring forwards of {experiment.draft}")
        config = experiment.config(self.config.seed, self.config.cores)
        arguments = ["--target", config.target, "--draft", config.draft]
        arguments += ["--dtype", config.dtype, "--draft-dtype", config.draft_dtype]
        worker = await Worker.start(_FORWARD_WORKER, arguments, config.cores[0] if config.cores else None)
        try:
            times = await worker.call("measure", target_rows=[1], draft_rows=[1], context=_CONTEXT_LEN)
        finally:
            await worker.stop()
        self._models |= {"target": worker.hello["target"], experiment.draft: worker.hello["draft"]}
        self._speed_ratios[experiment.draft] = times["target_forward_ms"]["1"] / times["draft_forward_ms"]["1"]

    async def _attempt(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        await attempt(what, work, self.failures)


def run_and_report(config: MethodsConfig, out: Path | None, console: Console) -> int:
    """Runs, prints and, into the folder `out`, writes; see `run_suite`."""
    write = None if out is None else partial(write_report, folder=out)
    return run_suite(MethodsSuite(config), config.cores, console, print_report, write)
