"""One experiment: all contenders warm up, then they take turns, as in `generate`.

If a server refuses a contender's request, or does not answer it, only that contender fails, and the others go on.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider_bench.config import BenchConfig
from outrider_bench.drivers import Driver, GenerationFailed
from outrider_bench.experiment import OFF, Contender, Experiment, label_of
from outrider_bench.samples import Block, Condition, GenerationSample, Request, Sample

GENERATION_TIMEOUT_S = 60.0
"""Ten times what the longest generation takes with `off`."""
MAX_FAILURES = 2
"""Failures after which a contender takes no further part."""
WARM_UP_PROMPT = """import csv


def read_table(path, delimiter=","):
    \"\"\"Return the rows of a file as lists of their fields.\"\"\"
    with open(path, newline="") as file:
"""
"""Not a measured prompt: a service that shares its earlier output would know the answer."""
WARM_UP_TOKENS = 16
AUTO_WARM_UPS, AUTO_WARM_UP_TOKENS = 2, 64
"""Generations that auto learns from at each temperature before it is measured, because it is meant for a server, not
for one request."""
# Far beyond what `seed_of` makes of small seeds: no earlier draw has used this noise when it is measured.
WARM_UP_SEED = 2**31


class TimedDriver:
    """A driver whose generations fail when they take too long: one that hangs must not block the benchmark."""

    def __init__(self, driver: Driver, timeout_s: float = GENERATION_TIMEOUT_S) -> None:
        self._driver = driver
        self._timeout_s = timeout_s

    async def generate(self, request: Request, options: Mapping[str, Any]) -> GenerationSample:
        """See Driver."""
        try:
            # The timeout cancels the read, and with it grpc.aio cancels the call: no server keeps working on it.
            async with asyncio.timeout(self._timeout_s):
                return await self._driver.generate(request, options)
        except TimeoutError:
            raise GenerationFailed(f"it took longer than {self._timeout_s:g} s") from None


class Running:
    """A running experiment."""

    def __init__(
        self, experiment: Experiment, config: BenchConfig, drivers: Mapping[str, Driver], keep: Callable[[Block], None]
    ) -> None:
        """
        Args:
            experiment: What is measured.
            config: The benchmark of that experiment.
            drivers: By the names that contenders use for them.
            keep: Gets each result at once.
        """
        self.failures: dict[str, str] = {}
        """Reasons of failures, by the label of the contender."""
        self._experiment, self._config, self._keep = experiment, config, keep
        self._drivers = {name: TimedDriver(driver) for name, driver in drivers.items()}
        self._counts: Counter[str] = Counter()

    async def warm_up(self, is_cold: Callable[[Contender], bool] = lambda _: True) -> list[Contender]:
        """Makes every cold contender generate a little.

        Returns:
            The contenders that can be measured. Empty if only `off` is left: there would be nothing to compare.
        """
        present: list[Contender] = []
        for one in self._experiment.contenders:
            try:
                if is_cold(one):
                    await self.prepare(one)
            except GenerationFailed as error:
                self.failures[label_of(one)] = str(error)
            else:
                present.append(one)
        return [] if all(one.method == OFF for one in present) else present

    async def prepare(self, contender: Contender) -> None:
        """Makes a contender generate a little. Raises GenerationFailed."""
        driver = self._drivers.get(contender.driver)
        if driver is None:
            raise GenerationFailed(f"{contender.driver} did not start")
        for request in _warm_up_requests(contender, self._config):
            await driver.generate(request, contender.options)

    async def take(self, turns: Iterable[Turn]) -> None:
        """Runs these turns, except those of contenders that have failed too often."""
        for turn in turns:
            label = turn.condition.label
            if self._counts[label] >= MAX_FAILURES:
                continue
            block = await run_turn(turn, self._config, self._drivers[turn.contender.driver], lambda _: None)
            self._keep(block)  # before the next turn: whatever ends the run, this is not lost
            for sample in block.samples:
                if sample.generation is None:
                    self._counts[label] += 1
                    self.failures[label] = sample.error


async def run_experiment(
    experiment: Experiment, config: BenchConfig, drivers: Mapping[str, Driver], keep: Callable[[Block], None]
) -> dict[str, str]:
    """Runs an experiment from beginning to end; see `Running`.

    Returns:
        The reasons of failures, by the label of the contender. Nothing is measured if no contender is left.
    """
    running = Running(experiment, config, drivers, keep)
    await running.take(schedule(config, await running.warm_up(), 0.0))
    return running.failures


def _warm_up_requests(contender: Contender, config: BenchConfig) -> Iterator[Request]:
    """Yields a short request; for `auto`, which learns from its measurements, more of them, at every temperature."""
    yield Request(WARM_UP_PROMPT, config.temperatures[0], WARM_UP_SEED, min(WARM_UP_TOKENS, config.max_tokens))
    if contender.method == "auto":
        tokens = min(AUTO_WARM_UP_TOKENS, config.max_tokens)
        for temperature, number in itertools.product(config.temperatures, range(AUTO_WARM_UPS)):
            yield Request(WARM_UP_PROMPT, temperature, WARM_UP_SEED + number, tokens)


_WARM_UP_TOKENS = 32
_MAX_PROMPTS = 100_000
"""Up to this many prompts, the seeds of two repeats do not overlap."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A contender's turn: these prompts, all at once."""

    contender: Contender
    condition: Condition
    repeat: int
    prompt_indices: tuple[int, ...]


def schedule(config: BenchConfig, contenders: Sequence[Contender], rtt_ms: float) -> Iterator[Turn]:
    """Yields all turns for one round-trip time, in order."""
    # The first contender rotates: a machine that slows down during a prompt would always affect the last one.
    rotation = itertools.count()
    for repeat, concurrency, temperature in itertools.product(
        range(config.repeats), config.concurrencies, config.temperatures
    ):
        everyone = [c for c in contenders if takes_part(c, config, concurrency, rtt_ms)]
        if not everyone:
            continue
        indices = range(len(config.prompts))
        # One at a time, contenders take turns prompt by prompt. Under load a turn is all prompts, to keep up the load.
        for group in [(index,) for index in indices] if concurrency == 1 else [tuple(indices)]:
            first = next(rotation) % len(everyone)
            for contender in everyone[first:] + everyone[:first]:
                condition = Condition(contender.method, contender.setting, temperature, concurrency, rtt_ms)
                yield Turn(contender, condition, repeat, group)


def takes_part(contender: Contender, config: BenchConfig, concurrency: int, rtt_ms: float) -> bool:
    """Returns True if a contender takes part here. Baselines generate one text at a time, without a network."""
    return contender.driver == "stack" or (concurrency == 1 and rtt_ms == config.rtts_ms[0])


def num_generations(config: BenchConfig, contenders: Sequence[Contender]) -> int:
    """Counts the generations of a whole benchmark, except the warm-up."""
    turns = itertools.chain.from_iterable(schedule(config, contenders, rtt_ms) for rtt_ms in config.rtts_ms)
    return sum(len(turn.prompt_indices) for turn in turns)


def seed_of(config: BenchConfig, repeat: int, prompt_index: int) -> int:
    """Returns the seed of a generation: the same for all contenders, another for each repeat and prompt."""
    return (config.seed + repeat) * _MAX_PROMPTS + prompt_index


async def warm_up(config: BenchConfig, contenders: Sequence[Contender], drivers: Mapping[str, Driver]) -> None:
    """Makes all contenders generate a little: caches fill, connections open, lazy imports happen. Raises
    GenerationFailed."""
    for contender in contenders:
        temperature = config.temperatures[0]
        tokens = min(_WARM_UP_TOKENS, config.max_tokens)
        request = Request(config.prompts[0].input, temperature, config.seed, tokens)
        try:
            await drivers[contender.driver].generate(request, contender.options)
        except GenerationFailed as error:
            raise GenerationFailed(f"{contender.method} {contender.setting}: {error}") from None


async def run_turn(turn: Turn, config: BenchConfig, driver: Driver, on_sample: Callable[[Sample], None]) -> Block:
    """Runs a turn: `concurrency` generations at a time until all its prompts are done."""
    # One iterator for all workers: each takes the next prompt when it has finished its own, as clients under load do.
    waiting = iter(turn.prompt_indices)
    samples: list[Sample] = []

    async def work() -> None:
        for index in waiting:
            sample = await _run_one(turn, index, config, driver)
            samples.append(sample)
            on_sample(sample)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(turn.condition.concurrency, len(turn.prompt_indices))):
            group.create_task(work())
    # A single generation is timed where its tokens arrive; the tasks around it are ours, not the contender's.
    duration_s = time.perf_counter() - started
    if len(samples) == 1 and samples[0].generation is not None:
        duration_s = samples[0].generation.duration_s
    return Block(turn.condition, turn.repeat, duration_s, tuple(samples))


async def _run_one(turn: Turn, index: int, config: BenchConfig, driver: Driver) -> Sample:
    prompt = config.prompts[index]
    seed = seed_of(config, turn.repeat, index)
    request = Request(prompt.input, turn.condition.temperature, seed, config.max_tokens)
    sample = Sample(turn.condition, turn.repeat, index, prompt.category, None)
    try:
        return replace(sample, generation=await driver.generate(request, turn.contender.options))
    except GenerationFailed as error:
        return replace(sample, error=str(error))
