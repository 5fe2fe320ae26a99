"""The suite of the papers: every claim about their own methods, in simulated time."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from outrider_bench.bootstrap import intervals_of
from outrider_bench.config import PapersConfig
from outrider_bench.environment import describe_environment
from outrider_bench.experiment import DRAFT, Experiment
from outrider_bench.papers.claims import CLAIMS, Claim
from outrider_bench.papers.experiments import QUICK, Sizes, experiments_of
from outrider_bench.papers.measured import Measured
from outrider_bench.papers.report import report_of
from outrider_bench.papers.turns import run_simulated, start_pair
from outrider_bench.samples import Block
from outrider_bench.statistics import rows_of
from outrider_bench.suite import Log, Suite

NUM_SIMULATING = 2
"""Number of simulating processes if no cores are chosen."""


@dataclass(frozen=True, slots=True)
class Found:
    """A claim with its value; None means that it was not measured."""

    claim: Claim
    value: float | None
    interval: tuple[float, float] | None
    """95 % confidence interval, as far as the choice of prompts decides the value; None means not known."""

    def to_json(self) -> dict[str, Any]:
        """Returns the object that results.json keeps."""
        claim, value = self.claim, self.value
        return {
            "paper": claim.paper,
            "what": claim.what,
            "temperature": claim.temperature,
            "contender": claim.contender,
            "base": claim.base,
            "metric": claim.metric,
            "value": value,
            "interval": None if self.interval is None else list(self.interval),
            "figure": claim.figure,
            "sign": f"{claim.relation} {claim.bound:g}",
            "reaches_figure": None if value is None or claim.figure is None else claim.reaches_figure(value),
            "has_right_sign": None if value is None or not claim.base else claim.has_right_sign(value),
            "source": claim.source,
        }


def found_of(claims: Sequence[Claim], measured: Measured, seed: int) -> list[Found]:
    """Returns the claims with their values, and with intervals if more than one prompt was measured."""

    def values(of: Measured) -> list[float | None]:
        return [of.value_of(claim) for claim in claims]

    def drawn(random: np.random.Generator) -> list[float | None]:
        return values(measured.resampled(random))

    return [Found(*each) for each in zip(claims, values(measured), intervals_of(len(claims), drawn, seed), strict=True)]


class PapersSuite(Suite):
    """Measures the papers' claims."""

    name = "papers"
    report_of = staticmethod(report_of)

    def __init__(self, config: PapersConfig) -> None:
        super().__init__(config.cores)
        self.config = config
        self.experiments = experiments_of(config.papers, QUICK if config.is_quick else Sizes())
        self._blocks: dict[str, list[Block]] = defaultdict(list)

    async def measure(self, log: Log) -> None:
        """Runs all experiments on all cores at once: none of them is timed by a real clock."""
        log(f"{sum(one.num_generations for one in self.experiments)} generations in simulated time")
        waiting = iter(self.experiments)

        async def work(core: int | None) -> None:
            worker = await start_pair(DRAFT, core)
            try:
                for one in waiting:
                    log(f"{one.name}: {one.num_generations} generations")
                    await self._run(one, worker)
            finally:
                await worker.stop()

        async with asyncio.TaskGroup() as group:
            for core in self.config.cores or (None,) * NUM_SIMULATING:
                group.create_task(work(core))

    async def _run(self, experiment: Experiment, worker: Any) -> None:
        config = experiment.config(self.config.seed, self.cores)
        keep = self._blocks[experiment.name].append
        failures: dict[str, str] = {}
        await self.attempt(experiment.name, partial(run_simulated, experiment, config, worker, keep, failures))
        self.failures |= {f"{experiment.name}, {label}": why for label, why in failures.items()}

    def found(self) -> dict[str, Any]:
        config = self.config
        claims = [claim for claim in CLAIMS if claim.paper in config.papers]
        return {
            "environment": describe_environment({}, config.cores),
            "config": {
                "papers": list(config.papers),
                "seed": config.seed,
                "cores": list(config.cores),
                "is_quick": config.is_quick,
            },
            "claims": [one.to_json() for one in found_of(claims, Measured(self._blocks), config.seed)],
            "experiments": {
                one.name: rows_of(self._blocks[one.name], len(one.prompts), one.repeats)
                for one in self.experiments
                if self._blocks[one.name]
            },
        }
