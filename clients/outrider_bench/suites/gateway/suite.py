"""The gateway suite: the same texts over gRPC and over HTTP, in turns."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from outrider_bench.config import GatewayConfig
from outrider_bench.environment import describe_environment
from outrider_bench.suite import Log, Suite
from outrider_bench.suites.gateway.claims import GatewayEvidence, sections_of
from outrider_bench.suites.gateway.experiments import DOORS, METHODS, GatewayServices, running_gateway, sizes_of
from outrider_bench.suites.gateway.flood import flood
from outrider_bench.suites.gateway.report import report_of


class GatewaySuite(Suite):
    """Compares the two doors of a verifier."""

    name, report_name = "gateway", "report.md"
    report_of = staticmethod(report_of)

    def __init__(self, config: GatewayConfig) -> None:
        super().__init__(config.cores)
        self.config = config
        self._sizes, self._evidence = sizes_of(config), GatewayEvidence()

    async def measure(self, log: Log) -> None:
        log("starting the services")
        await self.attempt("services", partial(self._measure_services, log))
        log("a flood")
        await self.attempt("flood", self._flood)

    async def _flood(self) -> None:
        with tempfile.TemporaryDirectory(prefix="outrider-flood-") as folder:
            self._evidence.floods_us = await flood(Path(folder), self._sizes.flood_events, self.config.repeats)

    async def _measure_services(self, log: Log) -> None:
        async with running_gateway(self.config, self.config.seed) as services:
            for method in METHODS:
                for streams in self._sizes.streams:
                    what = f"{method}, {streams} at once"
                    log(what)
                    await self.attempt(what, partial(self._take_turns, services, method, streams))
            log("first texts")
            await self.attempt("first texts", partial(self._time_first_texts, services))
            log("closed connections")
            await self.attempt("closed connections", partial(self._close_connections, services))

    async def _take_turns(self, services: GatewayServices, method: str, streams: int) -> None:
        pairs = self._evidence.turns.setdefault((method, streams), [])
        for number in range(-1, self.config.repeats):  # the first pair warms up
            order = DOORS[::-1] if number % 2 else DOORS
            pair = {
                door: await services.turn(door, method, streams, number + 1, self._sizes.max_tokens) for door in order
            }
            if number >= 0:
                pairs.append(pair)

    async def _time_first_texts(self, services: GatewayServices) -> None:
        for number in range(self.config.repeats * self._sizes.first_bytes):
            order = DOORS[::-1] if number % 2 else DOORS
            self._evidence.firsts_ms.append({door: await services.first_text_ms(door, number) for door in order})

    async def _close_connections(self, services: GatewayServices) -> None:
        for number in range(self.config.repeats * self._sizes.leavings):
            self._evidence.leavings_ms.append(await services.leaving_ms(number))

    def found(self) -> dict[str, Any]:
        config, sizes = self.config, self._sizes
        return {
            "environment": describe_environment({}, config.cores),
            "config": {
                "target": sizes.target,
                "max_tokens": sizes.max_tokens,
                "repeats": config.repeats,
                "seed": config.seed,
                "cores": list(config.cores),
                "is_quick": config.is_quick,
            },
            "sections": [section.to_json() for section in sections_of(self._evidence)],
        }
