"""The stack that faults happen to: services as processes, and a link between them that can fail and change bytes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from outrider_bench.suites.faults.experiments import (
    CUT,
    DATASTORE,
    GARBAGE,
    KILL,
    PARTITION,
    REDIS,
    RESTART,
    SLOW,
    SPECULATOR,
    STOP,
    VERIFIER,
    Fault,
)
from outrider_cli.links.delay_proxy import DelayProxy
from outrider_cli.links.direction import LinkSettings
from outrider_cli.local.redis import LocalRedis, find_program, free_port
from outrider_cli.local.stack import Service

GARBAGE_SHARE = 0.2
"""Share of the chunks that are changed while the wire changes bytes."""


class FaultProxy(DelayProxy):
    """Forwards connections to a target. Lives in one event loop."""

    def __init__(self, target: str, seed: int = 0) -> None:
        super().__init__(target)
        self._random = random.Random(seed)
        self._is_garbled = False

    def garble(self) -> None:
        """Changes a byte in some of the chunks of either direction, until `heal`."""
        self._is_garbled = True

    async def heal(self) -> None:
        """Lets everything pass unchanged again."""
        self._is_garbled = False
        await super().heal()

    def _arriving(self, data: bytes) -> bytes:
        if not self._is_garbled or self._random.random() >= GARBAGE_SHARE:
            return data
        changed = bytearray(data)
        # Exclusive or with 0 would leave the byte as it is.
        changed[self._random.randrange(len(data))] ^= self._random.randrange(1, 256)
        return bytes(changed)


PARTS = (REDIS, DATASTORE, SPECULATOR, VERIFIER)
REST_S = 3.0
"""After a fault, before the next one of the same part: what it recovers within can be seen."""
_MODEL_FLAGS = ("--dtype", "float32", "--num-threads", "1")

T = TypeVar("T")


class FaultStack:
    """Everything that runs. One fault of a part at a time; those of different parts may overlap."""

    def __init__(self, folder: Path, seed: int) -> None:
        """`folder` takes logs and data."""
        self._folder = folder
        self._seed = seed
        self._locks = {part: asyncio.Lock() for part in PARTS}
        self._exits = AsyncExitStack()
        # A process dies with the thread that has started it: each part has one that stays.
        self._hands = {part: ThreadPoolExecutor(1, f"{part}-hand") for part in PARTS}
        self.redis = LocalRedis(find_program(), folder)
        self.services: dict[str, Service] = {}
        """Services by name: datastore, speculator, verifier-0, verifier-1."""

    @property
    def verifiers(self) -> list[Service]:
        """The replicas."""
        return [self.services["verifier-0"], self.services["verifier-1"]]

    @property
    def process_ids(self) -> dict[str, int]:
        """Return process ids by the name of the service, Redis included."""
        return {"redis": self.redis.pid, **{name: service.pid for name, service in self.services.items()}}

    async def suffer(self, fault: Fault, on_begin: Callable[[], None], on_return: Callable[[], None]) -> None:
        """Waits until the part is free, hurts it until it is back, and leaves it alone for a while.

        Raises ProcessFailed and RedisFailed.
        """
        async with self._locks[fault.part]:
            on_begin()
            if fault.kind in (PARTITION, CUT, GARBAGE, SLOW):
                await self._hurt_wire(fault)
            elif fault.part == REDIS:
                await self._hurt_redis(fault)
            else:
                name = f"{VERIFIER}-{fault.replica}" if fault.part == VERIFIER else fault.part
                await self._hurt_service(fault, self.services[name])
            on_return()
            # With the lock held: the next fault of the part waits for it.
            await asyncio.sleep(REST_S)

    async def _hurt_wire(self, fault: Fault) -> None:
        wire = self._wire
        if fault.kind == SLOW:
            wire.settings = LinkSettings(delay_ms=fault.delay_ms)
        elif fault.kind == CUT:
            await wire.cut()
        elif fault.kind == PARTITION:
            wire.blackhole()
        else:
            wire.garble()
        await asyncio.sleep(fault.lasting_s)
        # Whatever the fault was: healing what is whole does nothing.
        wire.settings = LinkSettings()
        await wire.heal()

    async def _hurt_redis(self, fault: Fault) -> None:
        if fault.kind == STOP:
            os.kill(self.redis.pid, signal.SIGSTOP)
            await asyncio.sleep(fault.lasting_s)
            os.kill(self.redis.pid, signal.SIGCONT)
            return
        await self._do(REDIS, self.redis.kill)
        await asyncio.sleep(fault.lasting_s if fault.kind == KILL else 0.0)
        await self._do(REDIS, self.redis.start)

    async def _hurt_service(self, fault: Fault, service: Service) -> None:
        if fault.kind == STOP:
            os.kill(service.pid, signal.SIGSTOP)
            await asyncio.sleep(fault.lasting_s)
            os.kill(service.pid, signal.SIGCONT)
        elif fault.kind == RESTART:
            await self._do(fault.part, service.stop)
            await self._do(fault.part, partial(_restart, service))
        else:
            await self._do(fault.part, service.kill)
            await asyncio.sleep(fault.lasting_s)
            await self._do(fault.part, partial(_restart, service))

    async def _do(self, part: str, action: Callable[[], T]) -> T:
        """Does something that blocks, on the part's own thread."""
        return await asyncio.get_running_loop().run_in_executor(self._hands[part], action)

    async def _start(self) -> None:
        self._exits.push_async_callback(self._do, REDIS, self.redis.kill)
        await self._do(REDIS, self.redis.start)
        datastore = await self._spawn(DATASTORE, DATASTORE, "--redis-url", self.redis.url)
        peers: tuple[str, ...] = ("--datastore", datastore.address)
        speculator = await self._spawn(SPECULATOR, SPECULATOR, "--model", "demo/draft", *_MODEL_FLAGS, *peers)
        self._wire = await self._exits.enter_async_context(FaultProxy(speculator.address, self._seed))
        peers += ("--speculator", self._wire.address)
        for number in range(2):
            await self._spawn(VERIFIER, f"{VERIFIER}-{number}", "--model", "demo/target", *_MODEL_FLAGS, *peers)
        for part, service in zip((DATASTORE, SPECULATOR, VERIFIER, VERIFIER), self.services.values(), strict=True):
            await self._do(part, partial(_wait, service))

    async def _spawn(self, part: str, name: str, *flags: str) -> Service:
        """Starts a service without waiting for it: they load at the same time, knowing each other's addresses."""
        listen, log = f"127.0.0.1:{free_port()}", self._folder / f"{name}.log"
        service = Service(name, f"outrider.{part}", flags, log, listen=listen)
        self.services[name] = service
        self._exits.push_async_callback(self._do, part, service.stop)
        await self._do(part, service.spawn)
        return service

    async def _stop(self) -> None:
        try:
            await self._exits.aclose()
        finally:
            # Last: the exits above run on these threads, and a process dies with the one that has started it.
            for hand in self._hands.values():
                hand.shutdown()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()


def _restart(service: Service) -> None:
    service.spawn()
    _wait(service)


def _wait(service: Service) -> None:
    service.wait_listening()
    service.wait_serving()
