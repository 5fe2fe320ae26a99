"""An application at the edge: it asks a speculator beside it, or a distant verifier that decodes plainly."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from outrider_bench.config import BenchConfig
from outrider_bench.drivers import Driver
from outrider_bench.servers import StackError, connected, running_services, stack_config
from outrider_bench.suites.network.plan import EDGE_RTT_MS
from outrider_cli.links.line import LinkSettings, flags_of
from outrider_cli.local.process import ManagedProcess, ProcessFailed
from outrider_cli.local.stack import ANY_PORT, Service, wait_drafting

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
            async with connected(proxy.address) as (far, _), connected(edge.address) as (near, _):
                yield {"stack": far, "edge": near}
