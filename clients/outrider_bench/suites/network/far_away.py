"""Services far away: behind a network of real packets that loses some, and an application at the edge.

Without root the speculator is behind a proxy instead, which loses nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from outrider_bench.config import BenchConfig
from outrider_bench.drivers import Driver, StackError, connected, running_services, stack_config
from outrider_bench.suites.network.experiments import EDGE_RTT_MS, LOSSY, WITHOUT_LOSS
from outrider_bench.workers.client import Worker
from outrider_cli.links.direction import LinkSettings, flags_of
from outrider_cli.links.namespaces import WanNotPossible
from outrider_cli.links.wan import Wan, running_wan
from outrider_cli.local.process import ManagedProcess, ProcessFailed
from outrider_cli.local.stack import ANY_PORT, Service, wait_drafting

WORKER_MODULE = "outrider_bench.workers.wan"


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
        # The verifier listens in the cloud's namespace, which from out here cannot be reached.
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
    # Whichever side dials, only the way from the speculator to the verifier is limited.
    rate = settings.rate_up_mbit or settings.rate_down_mbit
    return (
        f"Round trip {2 * settings.delay_ms:g} ms, up to {settings.jitter_ms:g} ms more each way, {settings.loss:.0%} "
        f"of the packets lost, {rate:g} Mbit/s from the speculator to the verifier"
    )


EDGE_MODULE = "outrider.edge"


@asynccontextmanager
async def drivers_at_edge(config: BenchConfig) -> AsyncIterator[dict[str, Driver]]:
    """Drivers while the block runs: "stack" asks the cloud over a long way, "edge" what stands beside it, and is at the
    other end of the same way. The cloud has neither a speculator nor a datastore. Raises StackError."""
    cores = set(config.cores[-1:])
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as name, ExitStack() as exits:
        folder = Path(name)
        cloud = replace(stack_config(config, 0.0), draft=None, datastore=False)
        async with running_services(cloud) as services:
            link = flags_of(LinkSettings(delay_ms=EDGE_RTT_MS / 2))
            flags = ["--to", services.stack.address, *link]
            proxy = ManagedProcess(
                "proxy", "outrider_cli.links.delay_proxy", flags, folder / "proxy.log", listen=ANY_PORT, cores=cores
            )
            exits.callback(proxy.stop)
            try:
                proxy.start()
                flags = ["--upstream", proxy.address, "--model", config.draft]
                edge = Service("edge", EDGE_MODULE, flags, folder / "edge.log", listen=ANY_PORT, cores=cores)
                exits.callback(edge.stop)
                edge.start()
                edge.wait_serving()
                wait_drafting(edge)
            except ProcessFailed as error:
                raise StackError(str(error)) from None
            # Both cross the same proxy: one application with its tokens, the other's edge with drafts and commits.
            async with connected(proxy.address) as (far, _), connected(edge.address) as (near, _):
                yield {"stack": far, "edge": near}
