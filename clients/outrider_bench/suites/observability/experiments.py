"""The variants that are compared, how often, and the services that they run on."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from outrider_bench.config import ObservabilityConfig
from outrider_bench.drivers import StackDriver, running_services
from outrider_bench.result import Target
from outrider_bench.samples import Request
from outrider_cli.local.process import ManagedProcess
from outrider_cli.local.redis import free_port
from outrider_cli.local.stack import ANY_PORT, LOOPBACK, StackConfig
from outrider_cli.prompts import default_prompts

NOTHING, AGAIN, METRICS, SOME_TRACES, ALL_TRACES = (
    "nothing",
    "nothing, once more",
    "metrics, read every second",
    "traces of 10 %",
    "traces of 100 %",
)
VARIANTS = (NOTHING, AGAIN, METRICS, SOME_TRACES, ALL_TRACES)
"""Turns of the same services: two processes that do the same differ by some percent all their lives. The second shows
what a comparison of equals comes to."""
RATIOS = {SOME_TRACES: 0.1, ALL_TRACES: 1.0}
"""Share of the generations that are recorded; none in other turns."""
TARGETS = {METRICS: Target("<=", 1), SOME_TRACES: Target("<=", 2)}
"""Loss of speed in percent."""
SPEED, CPU_TIME = "tokens/s", "ms of CPU time a token"
"""Measurements of a turn, named by their units. CPU time is that of all services but Redis: less disturbed by other
work of the machine, though not what a caller notices."""
METHODS = ("off", "auto")
SCRAPE_S = 1.0


@dataclass(frozen=True, slots=True)
class ObservabilitySizes:
    """Says how much is done."""

    target: str
    concurrency: int
    """Generations at once."""
    max_tokens: int
    rounds_per_repeat: int
    """Rounds of a repeat; in each, every variant has one turn."""


SIZES = ObservabilitySizes("demo/target-100m", concurrency=4, max_tokens=48, rounds_per_repeat=8)
QUICK_SIZES = ObservabilitySizes("demo/target", concurrency=2, max_tokens=8, rounds_per_repeat=1)


def sizes_of(config: ObservabilityConfig) -> ObservabilitySizes:
    """Choose the sizes of a run."""
    return QUICK_SIZES if config.is_quick else SIZES


def order_of(variants: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Order the variants of a round: each is first equally often, and every other round goes backwards, so that none
    always runs behind the same one."""
    first = number // 2 % len(variants)  # each beginning serves two rounds, one in either direction
    order = variants[first:] + variants[:first]
    return order[::-1] if number % 2 else order


@dataclass(frozen=True, slots=True)
class ObservabilityServices:
    """They have metrics, and a collector to which what is recorded goes."""

    driver: StackDriver
    processes: tuple[psutil.Process, ...]
    metrics: tuple[str, ...]
    """URLs."""

    async def take_turn(self, variant: str, method: str, seed: int, sizes: ObservabilitySizes) -> dict[str, float]:
        """Run some generations at once; return SPEED and CPU_TIME. Raises GenerationFailed."""
        prompts = list(itertools.islice(itertools.cycle(default_prompts()), sizes.concurrency))
        # The variants of a round have the same seeds, and so the same texts to generate.
        requests = [
            Request(prompt.text, 0.7, seed * sizes.concurrency + number, sizes.max_tokens)
            for number, prompt in enumerate(prompts)
        ]
        scraping = asyncio.create_task(self._scrape(self.metrics if variant == METRICS else ()))
        try:
            began, busy_s = time.perf_counter(), self._busy_s()
            made = await asyncio.gather(
                *(
                    self.driver.generate(each, {"method": method}, decision(each.seed, RATIOS.get(variant, 0.0)))
                    for each in requests
                )
            )
            num_tokens = sum(len(each.token_ids) for each in made)
            return {
                SPEED: num_tokens / (time.perf_counter() - began),
                CPU_TIME: 1e3 * (self._busy_s() - busy_s) / num_tokens,
            }
        finally:
            scraping.cancel()
            with suppress(asyncio.CancelledError):
                await scraping

    def _busy_s(self) -> float:
        """Return the seconds of the cores that the services have used so far."""
        times = [process.cpu_times() for process in self.processes]
        return float(sum(each.user + each.system for each in times))

    async def _scrape(self, urls: tuple[str, ...]) -> None:
        """Read the metrics as Prometheus does, and more often: once a second, beginning with the turn."""
        while urls:
            # In threads: urllib blocks, and this loop also reads the tokens that are timed.
            await asyncio.gather(*(asyncio.to_thread(_read, url) for url in urls))
            await asyncio.sleep(SCRAPE_S)


def decision(seed: int, ratio: float) -> tuple[tuple[str, str], ...]:
    """Make the metadata of a caller that traces, and records that share of its generations: W3C's `traceparent`."""
    chance = random.Random(seed)
    is_recorded = chance.random() < ratio
    # W3C Trace Context: version, trace id, parent id, flags. The last bit of the flags says that it is recorded, and
    # services follow the caller's decision in either way.
    return (("traceparent", f"00-{chance.getrandbits(128):032x}-{chance.getrandbits(64):016x}-{is_recorded:02x}"),)


@asynccontextmanager
async def running_span_collector(folder: Path) -> AsyncIterator[str]:
    """The URL of a collector."""
    log = folder / "span-collector.log"
    collector = ManagedProcess("span collector", "outrider_bench.workers.span_collector", (), log, listen=ANY_PORT)
    collector.start()
    try:
        yield f"http://{collector.address}"
    finally:
        collector.stop()


async def start(
    config: ObservabilityConfig, sizes: ObservabilitySizes, collector: str, folder: Path, stack: AsyncExitStack
) -> ObservabilityServices:
    """The services, until the stack is unwound. Raises StackError."""
    addresses = [f"{LOOPBACK}:{free_port()}" for _ in range(3)]
    verifier, speculator, datastore = (
        ("--otlp-endpoint", collector, "--metrics-listen", address) for address in addresses
    )
    services = await stack.enter_async_context(
        running_services(
            StackConfig(
                target=sizes.target,
                cores=config.cores,
                verifier_arguments=verifier,
                speculator_arguments=speculator,
                datastore_arguments=datastore,
                log_folder=folder,
            )
        )
    )
    processes = tuple(psutil.Process(process.pid) for process in services.stack.processes)
    return ObservabilityServices(
        services.driver, processes, tuple(f"http://{address}/metrics" for address in addresses)
    )


def _read(url: str) -> None:
    with urllib.request.urlopen(url, timeout=5.0) as answer:
        answer.read()
