"""Redis as the datastore uses it: Functions that are where they are needed, and no waiting for a Redis that is away.

redis-py connects, signs in, encrypts and pools. What is added here: an answer to a lookup comes within milliseconds or
not at all, so whether Redis answers is known beforehand, from a PING now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import resources
from typing import Any

import hiredis
import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from outrider.datastore.redis.layout import LIBRARY
from outrider.datastore.types import StoreFull, StoreUnavailable
from outrider.telemetry.tracing import NO_SPAN, Span, current_span, peer_attributes

log = structlog.get_logger(__name__)

Command = Sequence[str | bytes | int]
Reply = Any
"""bytes, int, None, or a list of these; what redis-py makes of it where it knows the command."""

RETRY_S = 0.2
"""Between two attempts to reach a Redis that is away."""
CHECK_S = 1.0
"""Between two questions whether a Redis that is there still answers."""
MAX_SMALL_LOOKUPS_UNDER_WAY = 4
MAX_LARGE_LOOKUPS_UNDER_WAY = 1
"""Lookups that Redis is sent before it has answered; a large one, of several commands, keeps it busy for up to two
milliseconds. The others wait here: what counts as late is Redis, not the queue before it."""
MAX_LOOKUPS_WAITING = 32
"""More than that, and no answer would come in time."""
NUM_ATTEMPTS_WHEN_FULL = 5
RETRY_WHEN_FULL_S = 0.02
"""What Redis evicts it may free a little later, in a thread of its own."""


class RedisClient:
    """See the module. Every method raises StoreUnavailable, and StoreFull if Redis is out of memory."""

    def __init__(self, url: str, *, lookup_timeout_s: float, timeout_s: float, memory_budget_bytes: int = 0) -> None:
        """Connects when used. ValueError: the URL is none that redis-py knows."""
        self._timeout_s = timeout_s
        self._redis = self._client_for(url, timeout_s)
        # For those who limit the time themselves: followers, who wait for entries, and lookups.
        self.unhurried = self._client_for(url, None)
        self._idle: list[Any] = []
        """Connections for lookups."""
        where = self._redis.connection_pool.connection_kwargs  # not the URL: it may hold a password
        self._address = where.get("path") or f"{where.get('host', 'localhost')}:{where.get('port', 6379)}"
        self._lookup_timeout_s = lookup_timeout_s
        self._memory_budget_bytes = memory_budget_bytes
        self._source = resources.files(__package__).joinpath("ngrams.lua").read_text()
        self._keeper: asyncio.Task[None] | None = None
        self._is_up = True
        self._problem = ""
        """Why the keeper could not reach it the last time; empty = it could."""
        self._small_lookups = asyncio.Semaphore(MAX_SMALL_LOOKUPS_UNDER_WAY)
        self._large_lookups = asyncio.Semaphore(MAX_LARGE_LOOKUPS_UNDER_WAY)
        self._num_waiting = 0
        self._is_prepared = False
        self._preparing = asyncio.Lock()
        self._doubt = asyncio.Event()
        self.num_errors = 0
        """Calls that have failed."""

    def _client_for(self, url: str, timeout_s: float | None) -> Any:  # the types of its commands are of both clients
        return Redis.from_url(
            url,
            protocol=2,
            socket_timeout=timeout_s,
            socket_connect_timeout=self._timeout_s,
            # What comes late is worth nothing: whoever asks goes on without, and asks again.
            retry=Retry(NoBackoff(), 0),
        )

    async def start(self) -> None:
        """Prepares Redis, if it is there, and again whenever it is back."""
        if self._keeper is None:
            tried = asyncio.Event()
            self._keeper = asyncio.create_task(self._keep(tried))
            await tried.wait()

    async def close(self) -> None:
        """Lets go of all connections."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait((self._keeper,))
            self._keeper = None
        self._idle.clear()
        await self._redis.aclose()
        await self.unhurried.aclose()

    async def look_up(self, commands: Sequence[Command]) -> list[Reply]:
        """Replies of read-only Functions, in one round trip. Fails at once where they cannot come in time: within the
        lookup timeout for each command."""
        if not self._is_up or self._num_waiting >= MAX_LOOKUPS_WAITING:
            raise self.unavailable("too much is waiting for it" if self._is_up else "it does not answer")
        self._num_waiting += 1
        try:
            async with self._small_lookups if len(commands) == 1 else self._large_lookups:
                return await self._look_up_now(commands)
        finally:
            self._num_waiting -= 1

    async def _look_up_now(self, commands: Sequence[Command]) -> list[Reply]:
        if not self._is_up:  # since it was asked
            raise self.unavailable("it does not answer")
        try:
            with self._traced(commands):
                async with asyncio.timeout(self._lookup_timeout_s * len(commands)):
                    return await self._execute(commands, self._ask)
        except TimeoutError:
            error = self.unavailable("it did not answer in time")
        except StoreUnavailable as failure:
            error = failure
        if self._keeper is not None:  # somebody will find out when it answers again
            self._is_up = False
            self._doubt.set()
        raise error

    async def call(self, *command: str | bytes | int) -> Reply:
        """One command."""
        [reply] = await self.call_all([command])
        return reply

    async def call_all(self, commands: Sequence[Command], *, together: bool = False) -> list[Reply]:
        """Several commands in one round trip. If one is refused, the others may have been done; `together`: nothing
        else is done between them."""
        if self._problem:
            raise self.unavailable(self._problem)  # the keeper is at it: why should everybody wait in turn
        do = partial(self._pipe, together=together)
        with self._traced(commands):
            for _ in range(NUM_ATTEMPTS_WHEN_FULL - 1):
                try:
                    return await self._execute(commands, do)
                except StoreFull:
                    await asyncio.sleep(RETRY_WHEN_FULL_S)
            return await self._execute(commands, do)

    @contextmanager
    def reaching(self) -> Iterator[None]:
        """Around commands that are given to redis-py itself."""
        try:
            yield
        except OutOfMemoryError as error:
            self.num_errors += 1
            raise StoreFull(f"Redis at {self._address} is full: {error}") from error
        except (RedisTimeoutError, TimeoutError) as error:
            raise self.unavailable("it did not answer in time") from error
        except (RedisError, OSError) as error:
            self._is_prepared = False  # it may be another one when it is back
            raise self.unavailable(error or type(error).__name__) from error

    def unavailable(self, why: object) -> StoreUnavailable:
        """What to raise when Redis cannot be used."""
        self.num_errors += 1
        return StoreUnavailable(f"Redis at {self._address} cannot be used: {why}")

    def _traced(self, commands: Sequence[Command]) -> Span:
        """The span of commands, if what they are for is recorded. Their names, not their arguments: those are what
        people have written. (The instrumentation of redis-py does not see lookups, which go past it.)"""
        span = current_span()
        if not span.is_recorded:
            return NO_SPAN
        name = operation = str(commands[0][0])
        attributes: dict[str, str | int] = {"db.system.name": "redis", "db.operation.name": operation}
        if operation in ("FCALL", "FCALL_RO"):
            function = str(commands[0][1])
            name, attributes["db.stored_procedure.name"] = f"{operation} {function}", function
        if len(commands) > 1:
            attributes["db.operation.batch.size"] = len(commands)
        return span.child(name, "client", attributes | peer_attributes(self._address))

    async def _execute(
        self, commands: Sequence[Command], do: Callable[[Sequence[Command]], Awaitable[list[Reply]]]
    ) -> list[Reply]:
        """Replies. A Redis that came back empty gets the Functions first."""
        with self.reaching():
            if not self._is_prepared:
                await self._prepare()
            try:
                return await do(commands)
            except ResponseError as error:
                if "Function not found" not in str(error):
                    raise
            await self._install()
            return await do(commands)

    async def _pipe(self, commands: Sequence[Command], *, together: bool) -> list[Reply]:
        if len(commands) == 1:  # a pipeline has its price
            return [await self._redis.execute_command(*commands[0])]
        pipeline = self._redis.pipeline(transaction=together)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Reply] = await pipeline.execute()
        return replies

    async def _ask(self, commands: Sequence[Command]) -> list[Reply]:
        """As a pipeline, over a connection that is kept: what a pool and a pipeline do besides takes longer than Redis
        takes for a lookup."""
        pool = self.unhurried.connection_pool
        connection = self._idle.pop() if self._idle else await pool.get_connection()
        is_usable = False
        try:
            await connection.send_packed_command(packed(commands))
            replies = [await connection.read_response(disconnect_on_error=False) for _ in commands]
            is_usable = True
            return replies
        finally:
            if is_usable:
                self._idle.append(connection)
            else:  # replies may be left on it
                await connection.disconnect(nowait=True)
                await pool.release(connection)

    async def _prepare(self) -> None:
        """Whatever a Redis needs that was not seen before, or was away."""
        async with self._preparing:
            if not self._is_prepared:
                await self._install()
                await self._set_memory_budget()
                self._is_prepared = True
                log.info("redis.connected", address=self._address)

    async def _install(self) -> None:
        """Loads the Functions unless these very ones are there."""
        found = await self._redis.function_list(library=LIBRARY, withcode=True)
        if self._source.encode() not in _flat(found):
            await self._redis.function_load(self._source, replace=True)

    async def _keep(self, tried: asyncio.Event) -> None:
        """Asks whether Redis answers; prepares it when it does again."""
        was_up: bool | None = None
        while True:
            try:
                with self.reaching():
                    async with asyncio.timeout(self._timeout_s):
                        await self._ask([("PING",)])  # so that there is a connection for the first lookup
                    if not self._is_prepared:
                        await self._prepare()
                self._is_up, self._problem, was_up = True, "", True
            except (StoreUnavailable, StoreFull) as error:
                if was_up is not False:
                    log.warning("redis.lost", error=str(error))
                self._is_up, self._problem, was_up = False, str(error.__cause__ or error), False
            tried.set()
            self._doubt.clear()
            try:
                async with asyncio.timeout(CHECK_S if was_up else RETRY_S):
                    await self._doubt.wait()
            except TimeoutError:
                continue

    async def _set_memory_budget(self) -> None:
        if not self._memory_budget_bytes:
            return
        wanted = {"maxmemory": self._memory_budget_bytes, "maxmemory-policy": "volatile-lfu"}
        try:
            for name, value in wanted.items():
                await self._redis.config_set(name, value)
        except ResponseError as error:
            rule = " and ".join(f"{name} {value}" for name, value in wanted.items())
            log.warning("redis.budget_refused", address=self._address, error=str(error), configure=rule)


def _flat(reply: Reply) -> list[object]:
    """Everything in a nested reply."""
    if isinstance(reply, dict):
        reply = [*reply.keys(), *reply.values()]
    return [leaf for item in reply for leaf in _flat(item)] if isinstance(reply, list) else [reply]


def packed(commands: Sequence[Command]) -> bytes:
    """Commands as they are sent."""
    return b"".join([hiredis.pack_command(tuple(command)) for command in commands])  # type: ignore[arg-type]
