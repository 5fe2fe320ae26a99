"""A load: the times at which requests arrive, the generator that sends them then, and what came of each.

The loop is open: no request waits for the end of another one, unless --max-concurrency bounds how many run.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from outrider.core.params import Source
from outrider_bench.config import ServeConfig
from outrider_bench.drivers import timed_generation
from outrider_bench.samples import GenerationSample
from outrider_client.client import Client
from outrider_client.errors import OutriderError
from outrider_client.generation import Chunk
from outrider_client.requests import GenerateOptions

_SEEDS_PER_RUN = 2**32
"""Seeds of generations of two --seed do not meet."""


def arrival_times(rate: float, count: int, burstiness: float, seed: int) -> list[float]:
    """Draw the times at which requests arrive, in seconds since the run began, in order.

    The gaps are drawn from a gamma distribution and then scaled so that the last request arrives at count / rate: even
    a few requests arrive at the very rate that was asked for, as those of `vllm bench serve` do.

    Args:
        rate: Requests a second; infinity means that all arrive at once.
        count: How many there are.
        burstiness: The shape of the distribution: 1 makes the arrivals a Poisson process, infinity all gaps equal.
        seed: Keys the draw. The gaps of two rates with the same seed are proportional.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.ones(count) if math.isinf(burstiness) else np.random.default_rng(seed).gamma(burstiness, size=count)
    ends = np.cumsum(gaps)
    return [float(end) for end in ends * (count / rate / ends[-1])]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as the generator saw it to its end. Times are seconds since the run began."""

    index: int
    """Place among the arrivals of the run."""
    due_s: float
    """The time at which it was to arrive."""
    arrived_s: float
    """The time at which the generator came to it: later than `due_s` where the generator itself was late."""
    sent_s: float
    """The time at which it was sent: later than `arrived_s` where others had to end first under --max-concurrency."""
    ended_s: float
    generation: GenerationSample | None
    """Its times are seconds since `sent_s`. None means that the request failed."""
    kept: tuple[int, ...] = ()
    """Drafted tokens kept in each round that had a draft."""
    error: str = ""
    """The kind of a failure: the name of its gRPC status."""
    message: str = ""
    """The words of a failure."""


class Load:
    """Sends the requests of one run, and keeps the outcomes in the order in which the requests end."""

    def __init__(self, client: Client, config: ServeConfig, rate: float) -> None:
        """`rate`: requests a second; infinity means that all arrive at once."""
        self.rate = rate
        self.times = arrival_times(rate, config.num_prompts, config.burstiness, config.seed)
        """Times at which the requests arrive, in seconds since the run began."""
        self.outcomes: list[Outcome] = []
        self.began_at = datetime.now()
        self.duration_s = 0.0
        self.cpu_s = 0.0
        """CPU time of this process in the run."""
        self._client, self._config = client, config
        self._began = 0.0
        self._room = asyncio.Semaphore(config.max_concurrency or config.num_prompts)

    async def offer(self) -> None:
        """Send every request when it is due, and wait for all of them.

        What has ended is kept however the run ends; requests that still run when it is cancelled are given up.
        """
        self._began, cpu_s = asyncio.get_running_loop().time(), time.process_time()
        try:
            async with asyncio.TaskGroup() as group:
                for index, due_s in enumerate(self.times):
                    if (wait_s := due_s - self._now()) > 0:
                        await asyncio.sleep(wait_s)
                    group.create_task(self._follow(index, due_s))
        finally:
            self.duration_s, self.cpu_s = self._now(), time.process_time() - cpu_s

    def failures(self) -> Iterator[Outcome]:
        """Yield the outcomes of requests that failed."""
        return (outcome for outcome in self.outcomes if outcome.generation is None)

    @property
    def num_completed(self) -> int:
        """Count the requests that came to their end."""
        return sum(outcome.generation is not None for outcome in self.outcomes)

    async def _follow(self, index: int, due_s: float) -> None:
        """Keep the outcome of a request, be it a failure; of one that is cancelled there is none."""
        arrived_s = self._now()
        async with self._room:
            sent_s = self._now()
            generation, kept, error, message = None, list[int](), "", ""
            try:
                generation = await self._generate(index, kept)
            except OutriderError as failure:
                error, message = failure.code.name, failure.message
            outcome = Outcome(
                index, due_s, arrived_s, sent_s, self._now(), generation, tuple(kept), error=error, message=message
            )
            self.outcomes.append(outcome)

    async def _generate(self, index: int, kept: list[int]) -> GenerationSample:
        """Generate to the end. `kept` gets the drafted tokens kept in each round with a draft. Raises OutriderError."""

        def count(chunk: Chunk) -> None:
            if chunk.num_drafted:
                kept.append(sum(source is not Source.TARGET for source in chunk.sources))

        prompt = self._config.prompts[index % len(self._config.prompts)].text
        seed = self._config.seed * _SEEDS_PER_RUN + index
        return await timed_generation(self._client, prompt, measured_options(self._config, seed), count)

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._began


def measured_options(config: ServeConfig, seed: int) -> GenerateOptions:
    """Return the options of a generation.

    A generation that breaks is a failure here, not a pause in a longer one; and a server may be silent for as long as
    its queue is, which is what is to be measured: only --timeout-s ends a request.
    """
    return {**config.options, "seed": seed, "resume": False, "stall_timeout_s": math.inf}
