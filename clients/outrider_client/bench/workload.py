"""Who runs when.

A machine warms up, throttles and is disturbed, so a method measured in the morning cannot be compared with one measured
in the evening. All contenders therefore take the same prompt (or, with several generations at once, the same set of
prompts) directly one after the other, and the order rotates so that none of them is always first.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider_client.bench.config import BenchConfig
from outrider_client.bench.contenders import Contender
from outrider_client.bench.drivers import Driver, GenerationFailed
from outrider_client.bench.samples import Block, Condition, Request, Sample

_WARM_UP_TOKENS = 32
_MAX_PROMPTS = 100_000
"""Seeds of two repeats do not meet below this many prompts."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A contender's turn: these prompts, all at once."""

    contender: Contender
    condition: Condition
    repeat: int
    prompt_indices: tuple[int, ...]


def schedule(config: BenchConfig, contenders: Sequence[Contender], rtt_ms: float) -> Iterator[Turn]:
    """All turns for one round-trip time, in order."""
    rotation = itertools.count()
    for repeat, concurrency, temperature in itertools.product(
        range(config.repeats), config.concurrencies, config.temperatures
    ):
        everyone = [c for c in contenders if takes_part(c, config, concurrency, rtt_ms)]
        indices = range(len(config.prompts))
        for group in [(index,) for index in indices] if concurrency == 1 else [tuple(indices)]:
            first = next(rotation) % len(everyone)
            for contender in everyone[first:] + everyone[:first]:
                condition = Condition(contender.method, contender.setting, temperature, concurrency, rtt_ms)
                yield Turn(contender, condition, repeat, group)


def takes_part(contender: Contender, config: BenchConfig, concurrency: int, rtt_ms: float) -> bool:
    """Whether a contender has something to show here. Baselines generate one text at a time, without a network."""
    return contender.driver == "stack" or (concurrency == 1 and rtt_ms == config.rtts_ms[0])


def num_generations(config: BenchConfig, contenders: Sequence[Contender]) -> int:
    """Generations that a whole benchmark runs, warm-up aside."""
    turns = itertools.chain.from_iterable(schedule(config, contenders, rtt_ms) for rtt_ms in config.rtts_ms)
    return sum(len(turn.prompt_indices) for turn in turns)


def seed_of(config: BenchConfig, repeat: int, prompt_index: int) -> int:
    """The seed of a generation: the same for all contenders, another for each repeat and prompt."""
    return (config.seed + repeat) * _MAX_PROMPTS + prompt_index


async def warm_up(config: BenchConfig, contenders: Sequence[Contender], drivers: Mapping[str, Driver]) -> None:
    """Has everyone generate a little: caches fill, connections open, lazy imports happen. Raises GenerationFailed."""
    for contender in contenders:
        temperature = config.temperatures[0]
        tokens = min(_WARM_UP_TOKENS, config.max_tokens)
        request = Request(config.prompts[0].text, temperature, config.seed, tokens)
        try:
            await drivers[contender.driver].generate(request, contender.options)
        except GenerationFailed as error:
            raise GenerationFailed(f"{contender.method} {contender.setting}: {error}") from None


async def run_turn(turn: Turn, config: BenchConfig, driver: Driver, on_sample: Callable[[Sample], None]) -> Block:
    """Runs a turn: `concurrency` generations at a time until all its prompts are done."""
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
    # One generation is timed where its tokens arrive; the tasks around it are ours, not the contender's.
    duration_s = time.perf_counter() - started
    if len(samples) == 1 and samples[0].generation is not None:
        duration_s = samples[0].generation.duration_s
    return Block(turn.condition, turn.repeat, duration_s, tuple(samples))


async def _run_one(turn: Turn, index: int, config: BenchConfig, driver: Driver) -> Sample:
    prompt = config.prompts[index]
    seed = seed_of(config, turn.repeat, index)
    request = Request(prompt.text, turn.condition.temperature, seed, config.max_tokens)
    sample = Sample(turn.condition, turn.repeat, index, prompt.category, None)
    try:
        return replace(sample, generation=await driver.generate(request, turn.contender.options))
    except GenerationFailed as error:
        return replace(sample, error=str(error))
