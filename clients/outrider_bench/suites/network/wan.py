"""The speculator behind a network of real packets that loses some; without root, behind the proxy, which does not."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from outrider_bench.config import BenchConfig
from outrider_bench.drivers import Driver
from outrider_bench.servers import running_services, stack_config
from outrider_bench.suites.network.plan import LOSSY, WITHOUT_LOSS
from outrider_bench.workers.client import Worker
from outrider_cli.links.line import LinkSettings
from outrider_cli.links.namespaces import WanNotPossible
from outrider_cli.links.wan import Wan, running_wan
from outrider_cli.local.process import ProcessFailed

WORKER_MODULE = "outrider_bench.suites.network.wan_worker"


@asynccontextmanager
async def driver_over_wan(config: BenchConfig) -> AsyncIterator[tuple[Driver, str]]:
    """A driver for services with such a link between them while the block runs, and a sentence about the link.

    Raises StackError, WorkerError.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder, ExitStack() as exits:
        try:
            wan = exits.enter_context(running_wan(LOSSY, Path(folder)))
        except (WanNotPossible, ProcessFailed) as error:
            async with _driver_over_proxy(config) as driver:
                yield driver, f"{_described(WITHOUT_LOSS)}; a TCP proxy, because {str(error).splitlines()[0]}."
            return
        core = config.cores[-1] if config.cores else None
        worker = await Worker.start(WORKER_MODULE, _arguments(config, wan), core, wan.cloud.name)
        try:
            yield worker, f"{_described(LOSSY)}; real packets between two network namespaces."
        finally:
            await worker.stop()


@asynccontextmanager
async def _driver_over_proxy(config: BenchConfig) -> AsyncIterator[Driver]:
    async with running_services(replace(stack_config(config, 0.0), link=WITHOUT_LOSS, datastore=False)) as services:
        yield services.driver


def _arguments(config: BenchConfig, wan: Wan) -> list[str]:
    arguments = ["--target", config.target, "--dtype", config.dtype, "--draft", config.draft]
    arguments += ["--edge", wan.edge.name, "--edge-address", wan.edge.address]
    return [*arguments, "--cores", ",".join(map(str, config.cores))]


def _described(settings: LinkSettings) -> str:
    rate = settings.rate_up_mbit or settings.rate_down_mbit
    return (
        f"Round trip {2 * settings.delay_ms:g} ms, up to {settings.jitter_ms:g} ms more each way, {settings.loss:.0%} "
        f"of the packets lost, {rate:g} Mbit/s from the speculator to the verifier"
    )
