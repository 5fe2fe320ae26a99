"""The suite of `serve`: GuideLLM sends requests to a gateway at one rate after another, for each method.

GuideLLM is a separate program: `pip install guidellm` in another environment. It sends requests like any client of
OpenAI's API, so it measures what a user of the gateway gets.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider_bench.config import BenchConfig, ServeConfig
from outrider_bench.drivers import GenerationFailed, running_services, stack_config
from outrider_bench.environment import describe_environment
from outrider_bench.report import Chapter, Report, Table, environment_lines, notes_of, number_cell
from outrider_bench.suite import Log, Suite

_LATENCIES = {"ttft": "time_to_first_token_ms", "tpot": "time_per_output_token_ms", "e2el": "request_latency"}
"""GuideLLM's names of the latencies; the last one is in seconds."""
CAPTION = (
    "GuideLLM's numbers. tok/s and requests/s: of all that were answered. TTFT: time to the first token, TPOT: time by "
    "output token, E2E: whole requests; ms, median and 99th percentile."
)


class ServeSuite(Suite):
    """Offers the same requests at one rate after another, to one method after another."""

    name = "serve"

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config.cores)
        self.config = config
        self._runs: list[dict[str, Any]] = []

    async def measure(self, log: Log) -> None:
        """Runs everything. Raises StackError if services of our own do not start."""
        async with AsyncExitStack() as stack:
            url = self.config.url
            if url is None:
                log("starting the services")
                models = BenchConfig(target=self.config.target, draft=self.config.draft, cores=self.config.cores)
                settings = replace(stack_config(models, 0.0), gateway=True)
                services = await stack.enter_async_context(running_services(settings))
                url = f"http://{services.stack.gateway_address}"
            for method in self.config.methods:
                log(f"{method}: {self.config.num_prompts} requests at each rate")
                await self.attempt(method, partial(self._load, url, method))

    async def _load(self, url: str, method: str) -> None:
        """Makes GuideLLM send all requests. Raises GenerationFailed if it fails."""
        rates = [rate for rate in self.config.request_rates if math.isfinite(rate)]
        profiles: list[dict[str, Any]] = [{"kind": "poisson", "rate": rates}] if rates else []
        profiles += [{"kind": "throughput"}] if math.inf in self.config.request_rates else []
        for profile in profiles:
            with TemporaryDirectory(prefix="outrider-serve-") as folder:
                benchmarks = await _guidellm(self.config, url, method, profile, Path(folder))
            self._runs += [_run_of(method, one) for one in benchmarks]

    def found(self) -> dict[str, Any]:
        config = self.config
        return {
            "environment": describe_environment({}, config.cores),
            "config": {
                "url": config.url,
                "target": None if config.url else config.target,
                "draft": None if config.url else config.draft,
                "methods": list(config.methods),
                "num_prompts": config.num_prompts,
                "max_tokens": config.max_tokens,
                "temperature": config.temperature,
                "seed": config.seed,
            },
            "runs": self._runs,
        }

    @staticmethod
    def report_of(results: Mapping[str, Any]) -> Report:
        """See Suite."""
        config = results["config"]
        run = (
            f"{config['url'] or config['target']}: {config['num_prompts']} requests a run, {config['max_tokens']} "
            f"tokens each, T = {config['temperature']:g}, seed {config['seed']}"
        )
        notes = notes_of(results, interrupted="The run did not come to its end: what is missing was not measured.")
        tables = [_table(results["runs"])] if results["runs"] else []
        return Report("A gateway under load", environment_lines(results, run), notes, [Chapter("Load", tables)])


async def _guidellm(
    config: ServeConfig, url: str, method: str, profile: Mapping[str, Any], folder: Path
) -> Sequence[Mapping[str, Any]]:
    prompts, out = folder / "prompts.jsonl", folder / "out.json"
    texts = (config.prompts[index % len(config.prompts)].text for index in range(config.num_prompts))
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    body = {"max_tokens": config.max_tokens, "temperature": config.temperature, "seed": config.seed, "ignore_eos": True}
    extras = {"body": body | {"speculation": {"method": method}}}
    backend = {"kind": "openai_http", "target": url, "request_format": "/v1/completions", "extras": extras}
    arguments: dict[str, Mapping[str, Any]] = {
        "--backend": backend,
        "--profile": profile,
        "--data": {"kind": "json_file", "path": str(prompts)},
        "--constraint": {"kind": "max_requests", "count": config.num_prompts},
        "--seed": {"kind": "static", "value": config.seed},
        "--output": {"kind": "json", "path": str(out)},
    }
    flags = [word for flag, value in arguments.items() for word in (flag, json.dumps(value))]
    process = await asyncio.create_subprocess_exec(
        config.guidellm,
        "run",
        *flags,
        "--disable-console",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode or not out.exists():
        lines = said.decode(errors="replace").strip().splitlines()
        raise GenerationFailed(f"guidellm: {lines[-1] if lines else f'ended with {process.returncode}'}")
    found: Sequence[Mapping[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["benchmarks"]
    return found


def _run_of(method: str, benchmark: Mapping[str, Any]) -> dict[str, Any]:
    metrics, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]
    run: dict[str, Any] = {
        "method": method,
        "request_rate": benchmark["config"]["strategy"].get("rate"),
        "completed": totals["successful"],
        "failed": totals["errored"] + totals["incomplete"],
        "request_throughput": metrics["requests_per_second"]["successful"]["mean"],
        "output_throughput": metrics["output_tokens_per_second"]["successful"]["mean"],
    }
    for name, theirs in _LATENCIES.items():
        found, scale = metrics[theirs]["successful"], 1e3 if theirs == "request_latency" else 1.0
        run[f"median_{name}_ms"] = scale * found["median"]
        run[f"p99_{name}_ms"] = scale * found["percentiles"]["p99"]
    return run


def _table(runs: Sequence[Mapping[str, Any]]) -> Table:
    columns = ["method", "requests/s asked", "requests/s", "tok/s", "failed"]
    columns += [f"{name} {part}" for name in ("TTFT", "TPOT", "E2E") for part in ("p50", "p99")]
    rows = [
        [
            run["method"],
            "all at once" if run["request_rate"] is None else f"{run['request_rate']:g}",
            number_cell(run["request_throughput"], 2),
            number_cell(run["output_throughput"], 0),
            str(run["failed"]),
            *(number_cell(run[f"{part}_{name}_ms"], 1) for name in _LATENCIES for part in ("median", "p99")),
        ]
        for run in runs
    ]
    return Table("", columns, rows, CAPTION)
