"""The suite of the load generator: one run after the other against a verifier that runs already, or one of our own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider_bench.config import BenchConfig, ServeConfig
from outrider_bench.drivers import StackError, describe_server, running_services, stack_config
from outrider_bench.environment import describe_environment
from outrider_bench.running import WARM_UP_PROMPT, WARM_UP_SEED, WARM_UP_TOKENS
from outrider_bench.suite import Log, Suite
from outrider_bench.suites.serve.load import Load, measured_options
from outrider_bench.suites.serve.metrics import run_of
from outrider_bench.suites.serve.report import report_of
from outrider_cli.failures import FAILED, complain, reported
from outrider_client.channel import SecurityOptions
from outrider_client.client import Client


class ServeSuite(Suite):
    """Offers the same requests at one rate after the other."""

    name, report_name = "serve", "report.md"
    report_of = staticmethod(report_of)

    def __init__(self, config: ServeConfig, security: SecurityOptions | None = None) -> None:
        """`security` is that of the connection to the verifier at `config.address`."""
        super().__init__(config.cores)
        self.config = config
        self._security = security or SecurityOptions()
        self._loads: list[Load] = []
        self._models: dict[str, dict[str, Any]] = {}

    def run(self, out: Path | None, console: Console) -> int:
        """See Suite. A server that cannot be reached, or refuses the first request, ends the command with one line.

        Raises:
            typer.Exit: With the exit status of that failure.
        """
        status = FAILED
        with reported():
            try:
                status = super().run(out, console)
            except StackError as error:
                complain(str(error))
        return status

    async def measure(self, log: Log) -> None:
        """Run every rate; the first one at which no request is answered is the last one.

        Raises:
            OutriderError: The server does not answer, or refuses the request that warms it up.
            StackError: Services of our own could not be started.
        """
        async with AsyncExitStack() as stack:
            address, security = self.config.address, self._security
            if address is None:
                log("starting the services")
                models = BenchConfig(target=self.config.target, draft=self.config.draft, cores=self.config.cores)
                services = await stack.enter_async_context(running_services(stack_config(models, 0.0)))
                address, security = services.stack.address, SecurityOptions()
            client = await stack.enter_async_context(Client(address, **security))
            log(f"warming up {address}")
            self._models = describe_server(await client.info())
            await self._warm_up(client)
            for rate in self.config.request_rates:
                if not await self._run_rate(Load(client, self.config, rate), log):
                    break

    def found(self) -> dict[str, Any]:
        config = self.config
        model_id = self._models.get("target", {}).get("model_id", "")
        return {
            "environment": describe_environment(self._models, config.cores),
            "config": {
                "address": config.address,
                "target": None if config.address else config.target,
                "draft": None if config.address else config.draft,
                "arrival": config.arrival,
                "burstiness": config.shape,
                "max_concurrency": config.max_concurrency,
                "num_prompts": config.num_prompts,
                "num_texts": len(config.prompts),
                "options": {
                    name: value.value if isinstance(value, Enum) else value
                    for name, value in config.options.items()
                    if value is not None
                },
                "goodput": dict(config.goodput),
                "percentiles": list(config.percentiles),
                "seed": config.seed,
            },
            "runs": [run_of(load, config, model_id) for load in self._loads],
        }

    @classmethod
    def write(cls, results: Mapping[str, Any], folder: Path) -> list[Path]:
        """Write what every suite does, and a file for each run, for what reads the results of `vllm bench serve`."""
        paths = super().write(results, folder)
        for run in results["runs"]:
            path = folder / f"outrider-{run['request_rate']}qps.json"
            path.write_text(json.dumps(run, allow_nan=False) + "\n", encoding="utf-8")
            paths.append(path)
        return paths

    async def _warm_up(self, client: Client) -> None:
        """Have the server answer once: what it refuses of all requests shows here, in its own words."""
        options = measured_options(self.config, WARM_UP_SEED)
        asked = options.get("max_tokens")
        options["max_tokens"] = WARM_UP_TOKENS if asked is None else min(WARM_UP_TOKENS, asked)
        await client.complete(WARM_UP_PROMPT, **options)

    async def _run_rate(self, load: Load, log: Log) -> bool:
        """Run one rate; return True if any request was answered."""
        self._loads.append(load)
        log(f"{len(load.times)} requests, {load.rate:g} a second: the last one is due after {load.times[-1]:.1f} s")
        await load.offer()
        log(f"{load.num_completed} of {len(load.times)} completed in {load.duration_s:.1f} s")
        if not load.num_completed:
            first = next(load.failures())
            why = f"no request was answered ({first.error}: {first.message}), so no other rate was tried"
            self.failures[f"{load.rate:g} req/s"] = why
        return bool(load.num_completed)

    def _leave(self, out: Path | None, console: Console) -> None:
        # Without a run every table would be empty.
        if self._loads:
            super()._leave(out, console)
