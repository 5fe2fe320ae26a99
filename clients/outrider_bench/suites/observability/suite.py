"""What is measured, in which order, and what is left behind."""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider_bench.config import ObservabilityConfig
from outrider_bench.environment import describe_environment
from outrider_bench.suite import Say, attempt, run_suite
from outrider_bench.suites.observability.plan import METHODS, VARIANTS, order_of, sizes_of
from outrider_bench.suites.observability.report import print_report, write_report
from outrider_bench.suites.observability.services import ObservabilityServices, running_sink, start
from outrider_bench.suites.observability.verdicts import sections_of


class ObservabilitySuite:
    """One run. What has been measured is kept however it ends."""

    def __init__(self, config: ObservabilityConfig) -> None:
        self.config = config
        self.failures: dict[str, str] = {}
        """What went wrong, by what it was."""
        self._sizes = sizes_of(config)
        self._rounds: dict[str, list[dict[str, dict[str, float]]]] = {method: [] for method in METHODS}
        self._services: ObservabilityServices | None = None
        self._is_complete = False

    @property
    def has_failures(self) -> bool:
        """Whether anything could not be measured."""
        return bool(self.failures)

    async def run(self, say: Say) -> None:
        """Runs everything. `say` hears what is going on."""
        with tempfile.TemporaryDirectory(prefix="outrider-observability-") as folder:
            async with AsyncExitStack() as stack:
                collector = await stack.enter_async_context(running_sink(Path(folder)))
                say("starting the services")
                await attempt("services", partial(self._start, collector, Path(folder) / "logs", stack), self.failures)
                if self._services is not None:
                    await attempt("turns", partial(self._take_turns, self._services, say), self.failures)
        self._is_complete = True

    def results(self) -> dict[str, Any]:
        """What is known so far, as results.json has it."""
        config, sizes = self.config, self._sizes
        return {
            "suite": "observability",
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
            "interrupted": not self._is_complete,
            "failures": self.failures,
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

    async def _take_turns(self, services: ObservabilityServices, say: Say) -> None:
        for number in range(self.config.repeats * self._sizes.rounds_per_repeat):
            say(f"round {number + 1} of {self.config.repeats * self._sizes.rounds_per_repeat}")
            for method in METHODS:
                turns = {
                    variant: await services.take_turn(variant, method, self.config.seed + number, self._sizes)
                    for variant in order_of(VARIANTS, number)
                }
                self._rounds[method].append(turns)


def run_and_report(config: ObservabilityConfig, out: Path | None, console: Console) -> int:
    """Runs, prints and, into the folder `out`, writes; see `run_suite`."""
    write = None if out is None else partial(write_report, folder=out)
    return run_suite(ObservabilitySuite(config), config.cores, console, print_report, write)
