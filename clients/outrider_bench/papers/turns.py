"""Turns in simulated time: the same contenders, prompts and seeds as with services, and the same blocks.

A worker process runs the internals of both services under a simulated clock. So the numbers depend on a method, the
demo pair and made-up costs, but neither on the machine nor on the order of the turns.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import asdict

from outrider_bench.config import BenchConfig
from outrider_bench.drivers import GenerationFailed
from outrider_bench.experiment import Experiment
from outrider_bench.running import Turn, schedule, seed_of
from outrider_bench.samples import Block, Request, Sample, generation_from_json
from outrider_bench.workers.client import Worker

_WORKER = "outrider_bench.workers.simulated"
TARGET = "demo/target"
"""The target's trained parameters, without those that inflate its cost: only its output counts."""


async def start_pair(draft: str, core: int | None) -> Worker:
    """Starts the process that generates."""
    return await Worker.start(_WORKER, ["--target", TARGET, "--draft", draft], core)


async def run_simulated(
    experiment: Experiment,
    config: BenchConfig,
    worker: Worker,
    keep: Callable[[Block], None],
    failures: MutableMapping[str, str],
) -> None:
    """Runs an experiment from beginning to end.

    Args:
        experiment: One with costs.
        config: The benchmark of that experiment.
        worker: See `start_pair`.
        keep: Gets each result at once.
        failures: Gets the reasons of failures, by the label of the contender.
    """
    for turn in schedule(config, experiment.contenders, 0.0):
        # A request that was refused once is refused again: simulated turns are all alike.
        if turn.condition.label in failures:
            continue
        try:
            keep(await _take(turn, config, experiment, worker))
        except GenerationFailed as error:
            failures[turn.condition.label] = str(error)


async def _take(turn: Turn, config: BenchConfig, experiment: Experiment, worker: Worker) -> Block:
    assert experiment.costs is not None
    temperature, num_tokens = turn.condition.temperature, config.max_tokens
    requests = [
        Request(config.prompts[index].text, temperature, seed_of(config, turn.repeat, index), num_tokens)
        for index in turn.prompt_indices
    ]
    answer = await worker.call(
        "take_turn",
        experiment=experiment.name,
        has_prior=experiment.has_prior,
        options=dict(turn.contender.options),
        costs=experiment.costs.to_json(),
        requests=[asdict(request) for request in requests],
        num_at_once=turn.condition.concurrency,
    )
    samples = [
        Sample(turn.condition, turn.repeat, index, config.prompts[index].category, generation_from_json(each))
        for index, each in zip(turn.prompt_indices, answer["generations"], strict=True)
    ]
    return Block(turn.condition, turn.repeat, answer["time_ms"] / 1e3, tuple(samples))
