"""One experiment: everybody warms up, then all take turns, as in the generation suite.

A server may refuse what a contender asks, or not answer it: that is the contender's failure, and the others go on.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from outrider_client.bench.config import BenchConfig
from outrider_client.bench.contenders import OFF, Contender
from outrider_client.bench.drivers import Driver, GenerationFailed
from outrider_client.bench.experiment import Experiment, label_of
from outrider_client.bench.samples import Block, Condition, Generation, Request
from outrider_client.bench.workload import Turn, run_turn, schedule

GENERATION_TIMEOUT_S = 60.0
"""Ten times what the longest one takes with `off`."""
MAX_FAILURES = 2
"""A contender that has failed so often takes no further part."""
WARM_UP_PROMPT = """import csv


def read_table(path, delimiter=","):
    \"\"\"Return the rows of a file as lists of their fields.\"\"\"
    with open(path, newline="") as file:
"""
"""Not one that is measured: a service that shares what it has said would know the answer then."""
WARM_UP_TOKENS = 16
AUTO_WARM_UPS, AUTO_WARM_UP_TOKENS = 2, 64
"""Generations that auto learns from at each temperature, before it is measured: it lives in a server, not in one
request."""
_WARM_UP_SEED = 2**31


class TimedDriver:
    """A driver whose generations fail when they take too long: one that hangs should not hang the benchmark."""

    def __init__(self, driver: Driver, timeout_s: float = GENERATION_TIMEOUT_S) -> None:
        self._driver = driver
        self._timeout_s = timeout_s

    async def generate(self, request: Request, options: Mapping[str, Any]) -> Generation:
        """See Driver."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._driver.generate(request, options)
        except TimeoutError:
            raise GenerationFailed(f"it took longer than {self._timeout_s:g} s") from None


class Running:
    """An experiment that is under way."""

    def __init__(
        self, experiment: Experiment, config: BenchConfig, drivers: Mapping[str, Driver], keep: Callable[[Block], None]
    ) -> None:
        """
        Args:
            experiment: What is measured.
            config: The benchmark that it is.
            drivers: By the names that contenders call them by.
            keep: Gets what was measured, at once.
        """
        self.failures: dict[str, str] = {}
        """Why contenders failed, by their label."""
        self._experiment, self._config, self._keep = experiment, config, keep
        self._drivers = {name: TimedDriver(driver) for name, driver in drivers.items()}
        self._counts: Counter[str] = Counter()

    async def warm_up(self, is_cold: Callable[[Contender], bool] = lambda _: True) -> list[Contender]:
        """Has everyone who is cold generate a little. Returns who can be measured; `off` alone is nobody."""
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
        """Has a contender generate a little. Raises GenerationFailed."""
        for request in _warm_up_requests(contender, self._config):
            await self._drivers[contender.driver].generate(request, contender.options)

    async def take(self, turns: Iterable[Turn]) -> None:
        """Runs these turns, but those of contenders that have failed too often."""
        for turn in turns:
            label = turn.condition.label
            if self._counts[label] >= MAX_FAILURES:
                continue
            block = await run_turn(turn, self._config, self._drivers[turn.contender.driver], lambda _: None)
            self._keep(block)
            for sample in block.samples:
                if sample.generation is None:
                    self._counts[label] += 1
                    self.failures[label] = sample.error


async def run_experiment(
    experiment: Experiment, config: BenchConfig, driver: Driver, keep: Callable[[Block], None]
) -> dict[str, str]:
    """Runs an experiment from beginning to end, all on the services; see `Running`.

    Returns:
        Why contenders failed, by their label. Where nobody is left to be measured, nothing is.
    """
    running = Running(experiment, config, {"stack": driver}, keep)
    await running.take(turns_of(experiment, config, await running.warm_up()))
    return running.failures


def turns_of(experiment: Experiment, config: BenchConfig, contenders: Sequence[Contender]) -> Iterator[Turn]:
    """All turns, in order: as `schedule` has them, or the prompts once in theirs where `off` sits out at some."""
    if not contenders:
        return
    if experiment.off_at is None:
        yield from schedule(config, contenders, experiment.rtt_ms)
        return
    rotation = itertools.count()
    for index in range(len(experiment.prompts)):
        everyone = [one for one in contenders if one.method != OFF or index in experiment.off_at]
        first = next(rotation) % len(everyone)
        for one in everyone[first:] + everyone[:first]:
            condition = Condition(one.method, one.setting, experiment.temperatures[0])
            yield Turn(one, condition, 0, (index,))


def _warm_up_requests(contender: Contender, config: BenchConfig) -> Iterator[Request]:
    """A few tokens; of `auto`, which learns from what it has measured, more, at every temperature."""
    yield Request(WARM_UP_PROMPT, config.temperatures[0], _WARM_UP_SEED, min(WARM_UP_TOKENS, config.max_tokens))
    if contender.method == "auto":
        tokens = min(AUTO_WARM_UP_TOKENS, config.max_tokens)
        for temperature, number in itertools.product(config.temperatures, range(AUTO_WARM_UPS)):
            yield Request(WARM_UP_PROMPT, temperature, _WARM_UP_SEED + number, tokens)
