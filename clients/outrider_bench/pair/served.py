"""A running verifier, measured from outside: which method is worth it there, and in which setting."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from outrider_bench.config import BenchConfig, PairConfig
from outrider_bench.drivers import describe_server, running_stack
from outrider_bench.experiment import PLAIN, Contender, Experiment, contender
from outrider_bench.pair.comparison import Comparison, comparisons_of, token_times
from outrider_bench.pair.settings import AUTO, METHODS, Setting, flags_of
from outrider_bench.pair.study import NAME
from outrider_bench.running import run_experiment
from outrider_bench.samples import Block
from outrider_bench.statistics import rows_of
from outrider_bench.suite import Log
from outrider_client.channel import ChannelSecurity


class Served:
    """Has every method take turns at a verifier. Nothing is predicted, since its models are not at hand."""

    def __init__(self, address: str, config: PairConfig, security: ChannelSecurity) -> None:
        """`security` is that of the channel to the verifier."""
        self.address, self.config = address, config
        self.models: dict[str, dict[str, Any]] = {}
        self.contender_failures: dict[str, str] = {}
        """Reasons by the label of a contender."""
        self._security = security
        self._blocks: list[Block] = []

    @property
    def comparisons(self) -> list[Comparison]:
        """Returns the measurements so far."""
        return comparisons_of(token_times(self._blocks), [])

    async def run(self, log: Log) -> None:
        """Measures every setting.

        Raises:
            StackError: The verifier does not answer.
            PromptError: A prompt is a chat, and its target has no template for chats.
        """
        log(f"connecting to {self.address}")
        experiment = self._experiment()
        config = self._bench_config(experiment)
        async with running_stack(config, 0.0, self._security) as (driver, info):
            self.models = describe_server(info)
            log(f"{experiment.num_generations} generations")
            self.contender_failures = await run_experiment(experiment, config, {"stack": driver}, self._blocks.append)

    def to_json(self) -> dict[str, Any]:
        """Returns the object that results.json keeps: that of a study, without the fields that need the models."""
        config = self.config
        return {
            "title": self.address,
            "target": self.models.get("target", {}).get("model_id", ""),
            "draft": "",
            "stand_in": "",
            "models": self.models,
            "acceptances": [],
            "costs": None,
            "later_costs": None,
            "predictions": [],
            "later_predictions": [],
            "best": self._best(),
            "failures": self.contender_failures,
            "rows": rows_of(self._blocks, len(config.prompts), config.repeats),
            "comparisons": [one.to_json() for one in self.comparisons],
        }

    @property
    def _contenders(self) -> list[Contender]:
        settings = itertools.product(METHODS, self.config.num_speculative_tokens)
        return [PLAIN, *(Setting(*each).contender for each in settings), contender(AUTO)]

    def _experiment(self) -> Experiment:
        config = self.config
        return Experiment(
            name=NAME,
            contenders=tuple(self._contenders),
            temperatures=config.temperatures,
            prompts=config.prompts,
            max_tokens=config.max_tokens,
            repeats=config.repeats,
        )

    def _bench_config(self, experiment: Experiment) -> BenchConfig:
        config = experiment.config(self.config.seed, ())
        return replace(config, address=self.address, prompt_set=self.config.prompt_set)

    def _best(self) -> list[dict[str, Any]]:
        """Returns the fastest contender at each temperature; `off` if nothing is faster."""
        found = []
        for temperature in self.config.temperatures:
            here = [one for one in self.comparisons if one.temperature == temperature and one.measured > 1]
            best = max(here, key=lambda one: one.measured, default=None)
            labels = {(one.method, one.setting): one for one in self._contenders}
            if here or self._blocks:
                one = PLAIN if best is None else labels[best.method, best.setting]
                speedup = 1.0 if best is None else best.measured
                found.append({"temperature": temperature, "flags": flags_of(one), "speedup": speedup})
        return found
