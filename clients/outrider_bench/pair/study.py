"""A study of one pair: watch the models, time them, replay the methods, and measure the important ones."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider_bench.config import BenchConfig, PairConfig
from outrider_bench.drivers import GenerationFailed, StackDriver, check_prompts, running_stack
from outrider_bench.experiment import PLAIN, Contender, Experiment, contender
from outrider_bench.pair.acceptance import Acceptance, acceptances_of
from outrider_bench.pair.comparison import Claim, Comparison, claims_of, comparisons_of, token_times
from outrider_bench.pair.costs import DRAFT_ROWS, PROBES, TARGET_ROWS, PairCosts, costs_of
from outrider_bench.pair.settings import (
    AUTO,
    METHODS,
    Prediction,
    Setting,
    best_of,
    flags_of,
    measured_settings,
)
from outrider_bench.running import Running, run_experiment, schedule, seed_of
from outrider_bench.samples import Block
from outrider_bench.statistics import rows_of
from outrider_bench.suite import Log
from outrider_bench.workers.client import Worker

WORKER = "outrider_bench.workers.pair"
NAME = "pair"
"""Name of the experiment that a study is."""
CONTEXT_LEN = 192
PROBE_PROMPTS, PROBE_TOKENS, PROBE_REPEATS = 2, 24, 3


class PairRefused(ValueError):
    """The two models are no pair, or one of them cannot be used. The message is one line."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two models, and their names."""

    title: str
    target: str
    draft: str
    dtype: str = "auto"
    draft_dtype: str = "auto"
    stand_in: str = ""
    """A cheaper draft model with the same output, only for the replay; empty means the draft itself."""


class Study:
    """Studies one pair, and keeps all results so far, whatever ends it."""

    def __init__(self, pair: Pair, config: PairConfig) -> None:
        self.pair, self.config = pair, config
        self.models: dict[str, dict[str, Any]] = {}
        self.acceptances: list[Acceptance] = []
        self.predictions: list[Prediction] = []
        """Predictions for the whole grid, at the costs that were probed before anything was measured."""
        self.later_predictions: list[Prediction] = []
        """Predictions for the measured settings, at the costs that probes had in the same turns."""
        self.contender_failures: dict[str, str] = {}
        """Reasons by the label of a contender."""
        self._costs: PairCosts | None = None
        self._later_costs: PairCosts | None = None
        self._times: dict[str, Any] = {}
        self._texts: dict[float, list[dict[str, Any]]] = {}
        self._blocks: list[Block] = []

    @property
    def comparisons(self) -> list[Comparison]:
        """Returns the measurements so far, with their predictions."""
        return comparisons_of(token_times(self._blocks), self.later_predictions or self.predictions)

    def claims(self) -> list[Claim]:
        """Returns the claims of all predictions, with intervals over the prompts."""
        predictions, config = self.later_predictions or self.predictions, self.config
        return claims_of(self.pair.title, token_times(self._blocks), predictions, len(config.prompts), config.seed)

    async def run(self, log: Log) -> None:
        """Studies the pair from beginning to end.

        Raises:
            PairRefused: The models have different tokenizers, or cannot be loaded.
            PromptError: A prompt is a chat, and the target has no template for chats.
            GenerationFailed: A worker or a probe failed.
            StackError: The services did not start.
            WorkerError: A worker died.
        """
        log(f"{self.pair.title}: loading {self.pair.target} and {self.pair.draft}")
        self._times = await self._watch(log)
        log("starting the services")
        async with running_stack(self._bench_config(self._experiment(())), 0.0) as (driver, _):
            log("probing what a round costs")
            self._costs = await self._probe(driver)
            log(f"replaying {len(self._settings)} settings at {len(self.config.temperatures)} temperatures")
            grid = [(setting, t) for t in self.config.temperatures for setting in self._settings]
            self.predictions = await self._predict(grid, self._costs)
            await self._measure(driver, log)
            log("replaying what was measured, at the costs it had meanwhile")
            self._later_costs = self._costs_of(self._blocks)
            self.later_predictions = await self._predict(self._measured_grid, self._later_costs)

    def to_json(self) -> dict[str, Any]:
        """Returns the object that results.json keeps."""
        config = self.config
        best = {temperature: best_of(self.predictions, temperature) for temperature in config.temperatures}
        return {
            "title": self.pair.title,
            "target": self.pair.target,
            "draft": self.pair.draft,
            "stand_in": self.pair.stand_in,
            "models": self.models,
            "acceptances": [one.to_json() for one in self.acceptances],
            "costs": self._costs and self._costs.to_json(),
            "later_costs": self._later_costs and self._later_costs.to_json(),
            "predictions": [one.to_json() for one in self.predictions],
            "later_predictions": [one.to_json() for one in self.later_predictions],
            "best": [
                {"temperature": temperature, "flags": one.setting.flags if one else flags_of(PLAIN)}
                | {"speedup": one.speedup if one else 1.0}
                for temperature, one in best.items()
                if self.predictions
            ],
            "failures": self.contender_failures,
            "rows": rows_of(self._blocks, len(config.prompts), config.repeats),
            "comparisons": [one.to_json() for one in self.comparisons],
        }

    @property
    def _settings(self) -> list[Setting]:
        return [Setting(*each) for each in itertools.product(METHODS, self.config.num_speculative_tokens)]

    def _experiment(self, contenders: Sequence[Contender], temperatures: Sequence[float] = (0.0,)) -> Experiment:
        config = self.config
        return Experiment(
            name=NAME,
            contenders=tuple(contenders),
            temperatures=tuple(temperatures),
            prompts=config.prompts,
            max_tokens=config.max_tokens,
            repeats=1,
            target=self.pair.target,
            draft=self.pair.draft,
            dtype=self.pair.dtype,
        )

    def _bench_config(self, experiment: Experiment) -> BenchConfig:
        """Returns the configuration of an experiment, for the code that takes turns and starts services."""
        config = experiment.config(self.config.seed, self.config.cores)
        return replace(config, draft_dtype=self.pair.draft_dtype)

    async def _watch(self, log: Log) -> dict[str, Any]:
        """Compares the models on all texts, and returns the times of their forwards."""
        pair, config = self.pair, self.config
        models = ["--target", pair.target, "--draft", pair.draft]
        dtypes = ["--dtype", pair.dtype, "--draft-dtype", pair.draft_dtype]
        worker = await Worker.start(WORKER, [*models, *dtypes], config.cores[0] if config.cores else None)
        try:
            if refused := worker.hello.get("refused"):
                raise PairRefused(refused)
            check_prompts(config, has_chat_template=worker.hello["has_chat_template"])
            self.models = {role: worker.hello[role] for role in ("target", "draft")}
            log("watching both models")
            longest = max(config.num_speculative_tokens)
            for temperature in config.temperatures:
                self._texts[temperature] = [
                    await self._watched(worker, temperature, index, config.max_tokens + longest + 1)
                    for index in range(len(config.prompts))
                ]
                categories = [prompt.category for prompt in config.prompts]
                self.acceptances += acceptances_of(self._texts[temperature], categories, temperature, longest)
            log("timing forwards")
            return await worker.call(
                "measure",
                target_rows=list(TARGET_ROWS),
                draft_rows=list(DRAFT_ROWS),
                context=CONTEXT_LEN,
                num_turns=config.num_timed_turns,
            )
        finally:
            await worker.stop()

    async def _watched(self, worker: Worker, temperature: float, index: int, num_tokens: int) -> dict[str, Any]:
        seed = self._seed(index)
        prompt = self.config.prompts[index].input
        request = {"prompt": prompt, "temperature": temperature, "seed": seed, "max_tokens": num_tokens}
        return await worker.call("watch", request=request) | {"seed": seed}

    def _seed(self, index: int) -> int:
        """Returns the seed of a prompt: that of the measured generations, so that their texts are the same."""
        return seed_of(self._bench_config(self._experiment(())), 0, index)

    async def _probe(self, driver: StackDriver) -> PairCosts:
        config, blocks = self.config, list[Block]()
        probes = replace(
            self._experiment(PROBES),
            prompts=config.prompts[:PROBE_PROMPTS],
            max_tokens=PROBE_TOKENS,
            repeats=PROBE_REPEATS,
        )
        failures = await run_experiment(probes, self._bench_config(probes), {"stack": driver}, blocks.append)
        for label, reason in failures.items():
            raise GenerationFailed(f"the probe {label} failed: {reason}")
        return self._costs_of(blocks)

    def _costs_of(self, blocks: Sequence[Block]) -> PairCosts:
        try:
            return costs_of(self._times, blocks)
        except ValueError as error:
            raise GenerationFailed(str(error)) from None

    @property
    def _measured_grid(self) -> list[tuple[Setting, float]]:
        temperatures = self.config.temperatures
        return [(setting, t) for t in temperatures for setting in measured_settings(self.predictions, t)]

    async def _predict(self, grid: Sequence[tuple[Setting, float]], costs: PairCosts) -> list[Prediction]:
        """Replays settings at temperatures. The services are idle meanwhile, so both cores are free for it."""
        pair, cores = self.pair, self.config.cores
        dtype = self.models["draft"]["dtype"]
        arguments = ["--draft", pair.stand_in or pair.draft, "--draft-dtype", dtype]
        # The longest chains first; otherwise the last worker would still run one of them when all others have ended.
        waiting = iter(sorted(grid, key=lambda one: -one[0].num_speculative_tokens))
        found: dict[tuple[Setting, float], Prediction] = {}

        async def work(core: int | None) -> None:
            worker = await Worker.start(WORKER, arguments, core)
            try:
                if refused := worker.hello.get("refused"):
                    raise GenerationFailed(refused)
                for setting, temperature in waiting:
                    found[setting, temperature] = await self._replayed(worker, setting, temperature, costs)
            finally:
                await worker.stop()

        async with asyncio.TaskGroup() as group:
            for core in dict.fromkeys(cores) if cores else (None, None):
                group.create_task(work(core))
        return [found[key] for key in grid]

    async def _replayed(self, worker: Worker, setting: Setting, temperature: float, costs: PairCosts) -> Prediction:
        max_tokens = self.config.max_tokens
        texts = [
            {name: text[name] for name in ("prompt_token_ids", "token_ids", "seed")}
            for text in self._texts[temperature]
        ]
        answer = await worker.call(
            "replay",
            texts=texts,
            temperature=temperature,
            max_tokens=max_tokens,
            options=dict(setting.contender.options),
            costs=costs.of(setting.method),
            policy_ms=max(0.0, costs.step_ms - costs.draft_ms[1]),
        )
        plain_ms = costs.plain_round_ms * max_tokens
        return Prediction(setting, temperature, answer["tokens_per_round"], plain_ms, tuple(answer["text_ms"]))

    async def _measure(self, driver: StackDriver, log: Log) -> None:
        """Has `off`, the probes, the important settings and `auto` take turns; every repeat has the same texts."""
        runs: list[tuple[Experiment, Running, Sequence[Contender]]] = []
        repeat = 0

        def keep(block: Block) -> None:
            self._blocks.append(replace(block, repeat=repeat))

        log("warming up")
        for temperature in self.config.temperatures:
            settings = [one.contender for one in measured_settings(self.predictions, temperature)]
            experiment = self._experiment([*PROBES, *settings, contender(AUTO)], [temperature])
            running = Running(experiment, self._bench_config(experiment), {"stack": driver}, keep)
            runs.append((experiment, running, await running.warm_up()))
        for repeat in range(self.config.repeats):
            log(f"measuring: repeat {repeat + 1} of {self.config.repeats}")
            for experiment, running, present in runs:
                await running.take(schedule(self._bench_config(experiment), present, 0.0))
        for experiment, running, _ in runs:
            for label, reason in running.failures.items():
                self.contender_failures[f"T = {experiment.temperatures[0]:g}, {label}"] = reason
