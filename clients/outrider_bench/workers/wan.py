"""A process that lives in the cloud's namespace: it starts the services there, the speculator at the edge, and asks.

Services can only be reached from where they are, so who measures them must be there too. One JSON object a line, as
`outrider_bench.workers.worker` has it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

from outrider_bench.drivers import Services, describe_server, running_services
from outrider_bench.samples import GenerationSample, Request
from outrider_bench.suites.network.experiments import LOSSY
from outrider_bench.workers.worker import Handler, serve
from outrider_cli.links.namespaces import Namespace
from outrider_cli.local.stack import StackConfig


def generation_to_json(generation: GenerationSample) -> dict[str, Any]:
    """Return the object that `samples.generation_from_json` reads."""
    chunks = [(chunk.at_s, chunk.num_tokens) for chunk in generation.chunks]
    return asdict(generation) | {"chunks": chunks}


def _config(options: argparse.Namespace) -> StackConfig:
    cores = tuple(int(core) for core in options.cores.split(",") if core)
    return StackConfig(
        target=options.target,
        target_dtype=options.dtype,
        draft=options.draft,
        # Redis and the datastore would be a third node; what retrieves nothing does not miss them.
        datastore=False,
        cores=cores,
        speculator_at=Namespace(options.edge, options.edge_address),
    )


def main() -> None:
    """Runs the worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("target", "dtype", "draft", "edge", "edge-address"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--cores", default="", help="the verifier's, then the speculator's")
    parser.add_argument("--core", type=int, help="of this process")
    options = parser.parse_args()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    # One event loop for all requests: the channel of the driver lives in it, and rests while a line is waited for.
    with asyncio.Runner() as runner:
        exits = AsyncExitStack()

        def load() -> tuple[dict[str, Any], Mapping[str, Handler]]:
            services: Services = runner.run(exits.enter_async_context(running_services(_config(options))))

            def generate(request: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
                return generation_to_json(runner.run(services.driver.generate(Request(**request), options)))

            return {"models": describe_server(services.info), "link": asdict(LOSSY)}, {"generate": generate}

        try:
            serve(load)
        finally:
            runner.run(exits.aclose())


if __name__ == "__main__":
    main()
