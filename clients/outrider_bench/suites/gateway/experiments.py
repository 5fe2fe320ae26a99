"""The turns that are taken through either door, and the services that they are taken on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from outrider_bench.config import GatewayConfig
from outrider_bench.drivers import GenerationFailed
from outrider_bench.suites.gateway.doors import GRPC, HTTP, Door, GrpcDoor, HttpDoor, Sample
from outrider_cli.local.stack import LocalStack, StackConfig
from outrider_cli.prompts import default_prompts
from outrider_client.client import Client

DOORS = (GRPC, HTTP)
METHODS = ("off", "auto")
LEAVING_S = 5.0
"""Longest wait for a session to end whose client has gone."""


@dataclass(frozen=True, slots=True)
class GatewaySizes:
    """Says how much is done."""

    target: str
    streams: tuple[int, ...]
    """Generations at once."""
    max_tokens: int
    first_bytes: int
    """Requests of a repeat whose first byte is timed."""
    leavings: int
    """Connections of a repeat that are closed on the way."""
    flood_events: int
    """Events of a stream as fast as it goes."""


SIZES = GatewaySizes("demo/target-100m", (1, 8, 32), max_tokens=96, first_bytes=20, leavings=5, flood_events=20_000)
QUICK_SIZES = GatewaySizes("demo/target", (1, 4), max_tokens=16, first_bytes=3, leavings=2, flood_events=2_000)


def sizes_of(config: GatewayConfig) -> GatewaySizes:
    """Choose the sizes of a run."""
    return QUICK_SIZES if config.is_quick else SIZES


@dataclass(frozen=True, slots=True)
class Turn:
    """Holds what came of generations at once through one door."""

    num_tokens: int
    num_events: int
    duration_s: float
    cpu_s: float
    """CPU time of whoever turns the verifier's messages into what an application reads: the gateway, or this program
    with its SDK."""
    texts: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all generations by the time until the last one ended."""
        return self.num_tokens / self.duration_s

    @property
    def cpu_us_per_event(self) -> float:
        """Microseconds of CPU time for each event."""
        return 1e6 * self.cpu_s / self.num_events


class GatewayServices:
    """Holds services with a gateway before them, and asks through both doors."""

    def __init__(self, stack: LocalStack, client: Client, seed: int) -> None:
        self._client = client
        self._http = HttpDoor(stack.gateway_address)
        self._doors: dict[str, Door] = {GRPC: GrpcDoor(client), HTTP: self._http}
        assert stack.gateway is not None
        self._gateway, self._own = psutil.Process(stack.gateway.pid), psutil.Process()
        self._prompts = [prompt.text for prompt in default_prompts()]
        self._seed = seed

    async def turn(self, door: str, method: str, streams: int, number: int, max_tokens: int) -> Turn:
        """Generate at once through one door; the texts of a number are the same through the other. Raises
        GenerationFailed."""
        process = self._gateway if door == HTTP else self._own
        before_s, began = cpu_s(process), time.perf_counter()
        samples: list[Sample] = await asyncio.gather(
            *(
                self._doors[door].generate(self._options(method, number * streams + index, max_tokens))
                for index in range(streams)
            )
        )
        duration_s = time.perf_counter() - began
        return Turn(
            sum(sample.num_tokens for sample in samples),
            sum(sample.num_events for sample in samples),
            duration_s,
            cpu_s(process) - before_s,
            tuple(sample.text for sample in samples),
        )

    async def first_text_ms(self, door: str, number: int) -> float:
        """Return the milliseconds from a request to its first text. Raises GenerationFailed."""
        return 1e3 * (await self._doors[door].generate(self._options("off", number, 2))).first_s

    async def leaving_ms(self, number: int) -> float:
        """Close a connection in the middle of its stream; return the milliseconds until the verifier's session is gone.

        Raises:
            GenerationFailed: It stays.
        """
        # It must not end by itself meanwhile.
        reader, writer = await self._http.open(self._options("off", number, 1500))
        await reader.readuntil(b"data: ")
        writer.close()
        began = time.perf_counter()
        while (await self._client.info()).num_sessions:
            if time.perf_counter() - began > LEAVING_S:
                raise GenerationFailed(f"a session is still there {LEAVING_S:g} s after its client has gone")
            await asyncio.sleep(0.002)
        return 1e3 * (time.perf_counter() - began)

    def _options(self, method: str, number: int, max_tokens: int) -> Mapping[str, Any]:
        return {
            "prompt": self._prompts[number % len(self._prompts)],
            "temperature": 0.7,
            "seed": self._seed * 100_000 + number,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "speculation": {"method": method},
        }


@asynccontextmanager
async def running_gateway(config: GatewayConfig, seed: int) -> AsyncIterator[GatewayServices]:
    """Run services with a gateway while the body does. Raises ProcessFailed, RedisFailed, RedisNotFound."""
    sizes = sizes_of(config)
    stack = LocalStack(StackConfig(target=sizes.target, gateway=True, cores=config.cores))
    # A stack is started by a thread that lives as long as it shall: this one.
    stack.start()
    try:
        async with Client(stack.address) as client:
            yield GatewayServices(stack, client, seed)
    finally:
        stack.stop()


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time that a process has taken so far, in seconds."""
    times = process.cpu_times()
    return float(times.user + times.system)
