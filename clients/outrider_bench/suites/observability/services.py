"""The services, and a turn of a variant: what is read meanwhile, and what of it is recorded."""

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
from outrider_bench.drivers import StackDriver
from outrider_bench.samples import Request
from outrider_bench.servers import running_services
from outrider_bench.suites.observability.plan import CPU_TIME, METRICS, RATIOS, SCRAPE_S, SPEED, ObservabilitySizes
from outrider_cli.local.process import ManagedProcess
from outrider_cli.local.redis import free_port
from outrider_cli.local.stack import ANY_PORT, LOOPBACK, StackConfig
from outrider_cli.prompts import default_prompts


@dataclass(frozen=True, slots=True)
class ObservabilityServices:
    """They have metrics, and a collector to which what is recorded goes."""

    driver: StackDriver
    processes: tuple[psutil.Process, ...]
    metrics: tuple[str, ...]
    """URLs."""

    async def take_turn(self, variant: str, method: str, seed: int, sizes: ObservabilitySizes) -> dict[str, float]:
        """What some generations at once have measured: SPEED and CPU_TIME. Raises GenerationFailed."""
        prompts = list(itertools.islice(itertools.cycle(default_prompts()), sizes.concurrency))
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
        """What the services have had of the cores so far."""
        times = [process.cpu_times() for process in self.processes]
        return float(sum(each.user + each.system for each in times))

    async def _scrape(self, urls: tuple[str, ...]) -> None:
        """As Prometheus does, and more often: once a second, beginning with the turn."""
        while urls:
            await asyncio.gather(*(asyncio.to_thread(_read, url) for url in urls))
            await asyncio.sleep(SCRAPE_S)


def decision(seed: int, ratio: float) -> tuple[tuple[str, str], ...]:
    """What a caller says who traces, and records that share of its generations: W3C's `traceparent`."""
    chance = random.Random(seed)
    is_recorded = chance.random() < ratio
    return (("traceparent", f"00-{chance.getrandbits(128):032x}-{chance.getrandbits(64):016x}-{is_recorded:02x}"),)


@asynccontextmanager
async def running_sink(folder: Path) -> AsyncIterator[str]:
    """The URL of a collector."""
    sink = ManagedProcess("sink", "outrider_bench.suites.observability.sink", (), folder / "sink.log", listen=ANY_PORT)
    sink.start()
    try:
        yield f"http://{sink.address}"
    finally:
        sink.stop()


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
                cores=config.cores or None,
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
