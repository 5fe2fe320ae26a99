"""Bytes between verifier and speculator, counted at a proxy: TCP payload, with all frames of HTTP/2 and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from outrider_bench.drivers import Driver
from outrider_bench.samples import Block, GenerationSample, Request
from outrider_cli.links.control import LinkControl, LinkReport

SETTLED_S = 0.05
"""Seconds without a byte after which a generation's traffic is complete."""
MAX_SETTLING_S = 2.0


@dataclass(slots=True)
class Traffic:
    """Counts what a contender has sent and received, and what it was for. Up is to the speculator."""

    label: str
    temperature: float
    bytes_up: int = 0
    bytes_down: int = 0
    num_rounds: int = 0
    num_tokens: int = 0
    num_accepted: int = 0
    """Drafted tokens that were kept."""

    @property
    def num_bytes(self) -> int:
        """Both ways."""
        return self.bytes_up + self.bytes_down

    @property
    def per_accepted(self) -> float | None:
        """Bytes for each drafted token that was accepted; None means that no token was."""
        return self.num_bytes / self.num_accepted if self.num_accepted else None

    @property
    def per_round(self) -> float | None:
        """Bytes for each forward of the target."""
        return self.num_bytes / self.num_rounds if self.num_rounds else None

    def to_json(self) -> dict[str, Any]:
        """Return the object that results.json keeps."""
        return asdict(self) | {"per_accepted": self.per_accepted, "per_round": self.per_round}


class CountingDriver:
    """A driver that knows what its last generation had cost, the opening of its stream included."""

    def __init__(self, driver: Driver, link: LinkControl) -> None:
        self._driver, self._link = driver, link
        self.bytes_up = 0
        self.bytes_down = 0

    async def generate(self, request: Request, options: Mapping[str, Any]) -> GenerationSample:
        """See Driver."""
        # Drafts and their acknowledgements are still under way when a text has ended: they belong to that text.
        before = await self._settled()
        generation = await self._driver.generate(request, options)
        after = await self._settled()
        self.bytes_up = after.bytes_up - before.bytes_up
        self.bytes_down = after.bytes_down - before.bytes_down
        return generation

    async def _settled(self) -> LinkReport:
        known = self._link.report()
        for _ in range(round(MAX_SETTLING_S / SETTLED_S)):
            await asyncio.sleep(SETTLED_S)
            last, known = known, self._link.report()
            if last.num_bytes == known.num_bytes:
                break
        return known


class TrafficCount:
    """The traffic of all contenders, in the order in which they came."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, float], Traffic] = {}

    def add(self, block: Block, driver: CountingDriver) -> None:
        """Counts a block of one generation, the last one of the driver; one that failed does not count."""
        condition, (sample,) = block.condition, block.samples
        if (made := sample.generation) is None:
            return
        key = condition.label, condition.temperature
        traffic = self._found.setdefault(key, Traffic(*key))
        traffic.bytes_up += driver.bytes_up
        traffic.bytes_down += driver.bytes_down
        traffic.num_rounds += made.rounds.num_rounds
        traffic.num_accepted += made.rounds.num_accepted
        traffic.num_tokens += len(made.token_ids)

    def of(self, label: str, temperature: float) -> Traffic | None:
        """Return the traffic of a contender; None means that it was not measured."""
        return self._found.get((label, temperature))

    @property
    def all(self) -> list[Traffic]:
        """Traffic of all contenders."""
        return list(self._found.values())
