"""The observability suite: services with and without metrics and traces, in turns."""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from outrider_bench.config import ObservabilityConfig
from outrider_bench.environment import describe_environment
from outrider_bench.suite import Log, Suite
from outrider_bench.suites.observability.claims import sections_of
from outrider_bench.suites.observability.experiments import (
    METHODS,
    VARIANTS,
    ObservabilityServices,
    order_of,
    running_span_collector,
    sizes_of,
    start,
)
from outrider_bench.suites.observability.report import report_of


class ObservabilitySuite(Suite):
    """Compares what is read and recorded with nothing, round by round."""

    name, report_name = "observability", "report.md"
    report_of = staticmethod(report_of)

    def __init__(self, config: ObservabilityConfig) -> None:
        super().__init__(config.cores)
        self.config = config
        self._sizes = sizes_of(config)
        self._rounds: dict[str, list[dict[str, dict[str, float]]]] = {method: [] for method in METHODS}
        self._services: ObservabilityServices | None = None

    async def measure(self, log: Log) -> None:
        with tempfile.TemporaryDirectory(prefix="outrider-observability-") as folder:
            async with AsyncExitStack() as stack:
                collector = await stack.enter_async_context(running_span_collector(Path(folder)))
                log("starting the services")
                await self.attempt("services", partial(self._start, collector, Path(folder) / "logs", stack))
                if self._services is not None:
                    await self.attempt("turns", partial(self._take_turns, self._services, log))

    def found(self) -> dict[str, Any]:
        config, sizes = self.config, self._sizes
        return {
            "environment": describe_environment({}, config.cores),
            "config": {
                "target": sizes.target,
                "concurrency": sizes.concurrency,
                "max_tokens": sizes.max_tokens,
                "num_rounds": config.repeats * sizes.rounds_per_repeat,
                "seed": config.seed,
                "cores": list(config.cores),
                "is_quick": config.is_quick,
            },
            "sections": [section.to_json() for section in sections_of(self._rounds)],
            "rounds": self._rounds,
        }

    async def _start(self, collector: str, folder: Path, stack: AsyncExitStack) -> None:
        services = await start(self.config, self._sizes, collector, folder, stack)
        for variant in VARIANTS:
            for method in METHODS:
                # Everything is warm from here on, and `auto` has learned.
                await services.take_turn(variant, method, self.config.seed, self._sizes)
        self._services = services

    async def _take_turns(self, services: ObservabilityServices, log: Log) -> None:
        for number in range(self.config.repeats * self._sizes.rounds_per_repeat):
            log(f"round {number + 1} of {self.config.repeats * self._sizes.rounds_per_repeat}")
            for method in METHODS:
                turns = {
                    variant: await services.take_turn(variant, method, self.config.seed + number, self._sizes)
                    for variant in order_of(VARIANTS, number)
                }
                # Only a whole round: its turns are compared with each other.
                self._rounds[method].append(turns)
