"""A client of Redis for callers that must not wait: installs the Functions, and fails at once while Redis is away.

redis-py connects, signs in, encrypts and pools. This module adds the rest. A lookup is useful for a few milliseconds
only, so callers must know beforehand that Redis does not answer: a monitor calls the Functions from time to time. The
monitor also finds a Redis that answers but is unusable: a primary that became a replica, one that loads its data or
cannot save them, one whose rules forbid the Functions. Its connections are closed, as new ones may lead to another
server, and writes fail at once until one works. A Redis that came back empty, or was replaced, has lost the Functions:
they are loaded again when a call misses them.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import resources
from typing import Any

import hiredis
import structlog
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, OutOfMemoryError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from outrider.datastore.redis import layout
from outrider.datastore.redis.address import RedisAddress
from outrider.datastore.types import StoreFull, StoreUnavailable
from outrider.telemetry.tasks import end, keep_running
from outrider.telemetry.tracing import NO_SPAN, Span, current_span, peer_attributes

log = structlog.get_logger(__name__)

Command = Sequence[str | bytes | int]
Reply = Any
"""bytes, int, None, or a list of these; for commands that redis-py knows, its own conversion."""

RETRY_S = 0.2
"""Time between two attempts to reach a Redis that is away."""
CHECK_S = 1.0
"""Time between two checks of a Redis that answers."""
GARBLED = (AttributeError, IndexError, KeyError, TypeError, ValueError, struct.error, zlib.error)
"""Raised by redis-py, and by the code that reads replies, for a reply of an unexpected shape."""
MAX_SMALL_LOOKUPS_UNDER_WAY = 4
MAX_LARGE_LOOKUPS_UNDER_WAY = 1
"""Most large lookups that are sent to Redis before it has answered: one of several commands keeps it busy for up to two
milliseconds. The others wait here, where their timeouts do not run yet: only a slow Redis makes a lookup late, not the
queue in front of it."""
MAX_LOOKUPS_WAITING = 32
"""Lookups beyond this number fail at once: their answers would come too late."""
NUM_ATTEMPTS_WHEN_FULL = 5
RETRY_WHEN_FULL_S = 0.02
"""Time until a refused write is tried again. Redis frees evicted memory a little later, in a thread."""


class RedisClient:
    """Sends commands. Every method raises StoreUnavailable, and StoreFull if Redis is out of memory."""

    def __init__(self, url: str, *, lookup_timeout_s: float, timeout_s: float, memory_budget_bytes: int = 0) -> None:
        """Opens no connection yet: `start` does, or the first command.

        Args:
            url: See `REDIS_URL_RULE`.
            lookup_timeout_s: Longest time for each command of a lookup.
            timeout_s: Longest time for connecting, and for any other command.
            memory_budget_bytes: Memory that Redis is told to keep to. 0 leaves its configuration as it is.

        Raises:
            ValueError: The URL is of another kind.
        """
        self._address = RedisAddress(url, timeout_s)
        self._check_timeout_s = timeout_s * self._address.num_steps
        self._redis = self._address.client(timeout_s)
        # Its sockets have no timeout: a blocking read takes longer than any other command, and a lookup must take less.
        # Both are limited as a whole, including connecting.
        self._untimed = self._address.client(None)
        self._lookup_connections: list[Any] = []
        """Connections of `_untimed` that no lookup uses now."""
        self._lookup_timeout_s = lookup_timeout_s
        self._memory_budget_bytes = memory_budget_bytes
        self._functions = resources.files(__package__).joinpath("ngrams.lua").read_text()
        self._monitor: asyncio.Task[None] | None = None
        # True at first, and always in a client that is not started: only a monitor could set it again.
        self._is_up = True
        self.problem = ""
        """Why Redis was unusable when the monitor last checked. Empty means that it works."""
        self._garbled: set[type[Exception]] = set()
        """Kinds of replies that could not be understood: the log has a line for each."""
        self._has_refused_budget = False
        self._small_lookups = asyncio.Semaphore(MAX_SMALL_LOOKUPS_UNDER_WAY)
        self._large_lookups = asyncio.Semaphore(MAX_LARGE_LOOKUPS_UNDER_WAY)
        self._num_lookups_waiting = 0
        self._is_prepared = False
        self._prepare_lock = asyncio.Lock()
        self._check_requested = asyncio.Event()
        self.num_errors = 0
        """Calls that have failed."""

    async def start(self) -> None:
        """Prepares Redis if it is reachable, and from now on whenever it is back."""
        if self._monitor is None:
            has_checked = asyncio.Event()
            self._monitor = keep_running("redis", partial(self._watch_over, has_checked))
            await has_checked.wait()

    async def close(self) -> None:
        """Closes all connections."""
        if self._monitor is not None:
            await end(self._monitor)
            self._monitor = None
        # The pool regards these connections as in use. Closing it disconnects them, too.
        self._lookup_connections.clear()
        await self._redis.aclose()
        await self._untimed.aclose()
        await self._address.close()

    async def look_up(self, commands: Sequence[Command]) -> list[Reply]:
        """Calls read-only Functions in one round trip.

        Fails at once if the replies cannot come in time: within the lookup timeout for each command.
        """
        if not self._is_up or self._num_lookups_waiting >= MAX_LOOKUPS_WAITING:
            raise self.unavailable("too much is waiting for it" if self._is_up else "it does not answer")
        self._num_lookups_waiting += 1
        try:
            async with self._small_lookups if len(commands) == 1 else self._large_lookups:
                return await self._look_up_now(commands)
        finally:
            self._num_lookups_waiting -= 1

    async def _look_up_now(self, commands: Sequence[Command]) -> list[Reply]:
        if not self._is_up:  # an earlier lookup has found out
            raise self.unavailable("it does not answer")
        try:
            with self._traced(commands):
                # The setting is for one command of CONTEXTS_PER_CALL contexts, and Redis runs them in turn.
                async with asyncio.timeout(self._lookup_timeout_s * len(commands)):
                    return await self._execute(commands, self._exchange)
        except TimeoutError:
            error = self.unavailable("it did not answer in time")
        except StoreUnavailable as failure:
            error = failure
        if self._monitor is not None:  # without a monitor, nothing would set it again
            self._is_up = False
            self._check_requested.set()
        raise error

    async def call(self, *command: str | bytes | int) -> Reply:
        """Sends one command."""
        [reply] = await self.call_all([command])
        return reply

    async def call_all(self, commands: Sequence[Command], *, is_transaction: bool = False) -> list[Reply]:
        """Sends several commands in one round trip.

        If one is refused, the others may have run. In a transaction Redis runs nothing else between them.
        """
        if self.problem:
            raise self.unavailable(self.problem)  # the monitor is trying: callers need not wait one by one
        send = partial(self._send, is_transaction=is_transaction)
        with self._traced(commands):
            # Sending everything again is harmless: Redis refuses a call before its first write, and the other commands
            # of a pipeline may be repeated (HSET, EXPIRE, SADD, SREM, reads).
            for _ in range(NUM_ATTEMPTS_WHEN_FULL - 1):
                try:
                    return await self._execute(commands, send)
                except StoreFull:
                    await asyncio.sleep(RETRY_WHEN_FULL_S)
            return await self._execute(commands, send)

    async def call_blocking(self, timeout_s: float, *command: str | bytes | int) -> Reply:
        """Sends a command that may wait in Redis, over a connection that nothing else uses meanwhile."""
        with self.errors_translated():
            async with asyncio.timeout(timeout_s):
                return await self._untimed.execute_command(*command)

    def unavailable(self, reason: object) -> StoreUnavailable:
        """Counts an error, and returns the exception to raise for it."""
        self.num_errors += 1
        return StoreUnavailable(f"Redis at {self._address} cannot be used: {reason}")

    @contextmanager
    def errors_translated(self) -> Iterator[None]:
        """Raises StoreUnavailable or StoreFull for what redis-py, or reading a reply, raises in the body."""
        try:
            yield
        # The order matters: the first two are RedisErrors as well, and TimeoutError is an OSError.
        except OutOfMemoryError as error:
            self.num_errors += 1
            raise StoreFull(f"Redis at {self._address} is full: {error}") from error
        except (RedisTimeoutError, TimeoutError) as error:
            raise self.unavailable("it did not answer in time") from error
        except (RedisError, OSError) as error:
            if not isinstance(error, ResponseError):
                self._is_prepared = False  # another server may be there when it is back
            raise self.unavailable(_text_of(error)) from error
        except GARBLED as error:
            self._is_prepared = False  # the Functions may have changed
            reason = f"a reply of it cannot be understood ({error!r})"
            if type(error) not in self._garbled:
                self._garbled.add(type(error))
                log.warning("redis.garbled", address=str(self._address), error=repr(error))
            raise self.unavailable(reason) from error

    def _traced(self, commands: Sequence[Command]) -> Span:
        """Returns the span of commands, if the work that they belong to is recorded. It has their names, not their
        arguments: those are the texts of users. The instrumentation of redis-py would not see lookups, which bypass its
        commands.
        """
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
        return span.child(name, "client", attributes | peer_attributes(str(self._address)))

    async def _execute(
        self, commands: Sequence[Command], send: Callable[[Sequence[Command]], Awaitable[list[Reply]]]
    ) -> list[Reply]:
        """Sends commands, and loads the Functions before them if they are missing."""
        with self.errors_translated():
            if not self._is_prepared:
                await self._prepare()
            try:
                return await send(commands)
            except ResponseError as error:
                # A restart may go unseen: redis-py replaces a pooled connection that was closed without an error.
                if "Function not found" not in str(error):
                    raise
            await self._install_functions()
            return await send(commands)

    async def _send(self, commands: Sequence[Command], *, is_transaction: bool) -> list[Reply]:
        if len(commands) == 1:  # a pipeline costs more
            return [await self._redis.execute_command(*commands[0])]
        pipeline = self._redis.pipeline(transaction=is_transaction)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Reply] = await pipeline.execute()
        return replies

    async def _exchange(self, commands: Sequence[Command]) -> list[Reply]:
        """Sends the commands of a lookup over a connection that is kept, and reads as many replies.

        The pool and the pipeline of redis-py take longer than Redis itself for a lookup.
        """
        pool = self._untimed.connection_pool
        connection = self._lookup_connections.pop() if self._lookup_connections else await pool.get_connection()
        is_usable = False
        try:
            await connection.send_packed_command(_packed(commands))
            replies = [await connection.read_response(disconnect_on_error=False) for _ in commands]
            is_usable = True
            return replies
        finally:
            if is_usable:
                self._lookup_connections.append(connection)
            else:
                # After a timeout its replies still come, and so do those after an error reply, at which the loop above
                # stops: the next lookup would take them for its own.
                await connection.disconnect(nowait=True)
                await pool.release(connection)

    async def _prepare(self, *, again: bool = False) -> None:
        """Configures a Redis that is new, or was away."""
        async with self._prepare_lock:
            if again or not self._is_prepared:
                await self._refuse_cluster()
                await self._install_functions()
                await self._set_memory_budget()
                self._is_prepared = True

    async def _refuse_cluster(self) -> None:
        try:
            info = await self._redis.info("cluster")
        except NoPermissionError:
            return  # its rules forbid asking
        if info.get("cluster_enabled"):
            raise RedisConnectionError("it is a node of a Redis Cluster, of which a prior and its index need one slot")

    async def _install_functions(self) -> None:
        """Loads the Functions unless Redis has exactly these."""
        # Compared first: replicas that start together would otherwise replace the library under each other's calls,
        # and FUNCTION LOAD goes into the append-only file each time.
        found = await self._redis.function_list(library=layout.LIBRARY, withcode=True)
        if self._functions.encode() not in _leaves(found):
            await self._redis.function_load(self._functions, replace=True)

    async def _set_memory_budget(self) -> None:
        if not self._memory_budget_bytes:
            return
        # volatile-lfu evicts only keys that expire, and everything but the priors does.
        wanted = {"maxmemory": self._memory_budget_bytes, "maxmemory-policy": "volatile-lfu"}
        try:
            for name, value in wanted.items():
                await self._redis.config_set(name, value)
        except ResponseError as error:  # a hosted Redis allows no CONFIG SET
            rule = " and ".join(f"{name} {value}" for name, value in wanted.items())
            if self._has_refused_budget:
                return
            self._has_refused_budget = True
            log.warning("redis.budget_refused", address=str(self._address), error=str(error), configure=rule)

    async def _watch_over(self, has_checked: asyncio.Event) -> None:
        """Checks repeatedly that Redis can be used, and prepares it when it is back."""
        was_usable: bool | None = None  # not known yet, so that a failure of the first check is logged, too
        while True:
            # True unless Redis is away. One that refuses is not retried faster than by the usual check.
            has_answered = True
            try:
                if was_usable is False:
                    # It may be another server, or its Functions were replaced. Working lookups go on meanwhile.
                    with self.errors_translated():
                        await self._prepare(again=True)
                await self._check()
                if was_usable is False:
                    # Other connections may still lead to an unusable server.
                    await self._disconnect(everything=True)
                    await self._check()
                if not was_usable:
                    log.info("redis.connected", address=str(self._address))
                self._is_up, self.problem, was_usable = True, "", True
            except (StoreUnavailable, StoreFull) as error:
                # The cause alone: `unavailable` prefixes the address again.
                self.problem = _text_of(error.__cause__ or error)
                has_answered = isinstance(error.__cause__, (ResponseError, *GARBLED))
                if was_usable is not False:
                    log.warning("redis.lost", error=str(error))
                was_usable = False
                await self._disconnect(everything=False)
            except Exception as error:
                self._is_up, self.problem = False, repr(error)
                raise
            finally:
                has_checked.set()
            # After the check, which has answered the requests that came while it ran.
            self._check_requested.clear()
            try:
                async with asyncio.timeout(CHECK_S if has_answered else RETRY_S):
                    await self._check_requested.wait()
            except TimeoutError:
                continue

    async def _check(self) -> None:
        """Calls Functions as lookups and records do. Raises StoreUnavailable, and records whether lookups work."""
        is_up = False
        try:
            # Sent like a lookup, so that there is a connection for the first one.
            [found] = await self._execute([layout.LOOKUP_CHECK], self._exchange_in_time)
            self._compare(found, layout.LOOKUP_CHECK_REPLY)
            is_up = True
            [position] = await self._execute([layout.RECORD_CHECK], partial(self._send, is_transaction=False))
            self._compare(position, layout.RECORD_CHECK_REPLY)
        except (StoreUnavailable, StoreFull):
            self._is_up = is_up
            raise

    def _compare(self, found: Reply, expected: Reply) -> None:
        if found != expected:
            self._is_prepared = False
            reason = f"its Functions answer {found!r} instead of {expected!r}"
            raise self.unavailable(reason) from ResponseError(reason)

    async def _exchange_in_time(self, commands: Sequence[Command]) -> list[Reply]:
        async with asyncio.timeout(self._check_timeout_s):
            return await self._exchange(commands)

    async def _disconnect(self, *, everything: bool) -> None:
        """Closes connections: `everything`, or those that the next check would use."""
        idle, self._lookup_connections = self._lookup_connections, []
        with suppress(RedisError, OSError):
            for connection in idle:
                await connection.disconnect(nowait=True)
                await self._untimed.connection_pool.release(connection)
            await self._redis.connection_pool.disconnect(inuse_connections=everything)
            if everything:  # otherwise a lookup could take a connection out of the pool while it is still being closed
                await self._untimed.connection_pool.disconnect()


def _text_of(error: BaseException) -> str:
    """Returns the message of an error, with the error code of Redis, which redis-py cuts off."""
    if isinstance(error, MasterNotFoundError):  # its message lists how each Sentinel was asked
        return "no Sentinel that answers knows a primary of that name"
    code = getattr(error, "status_code", None)
    return f"{code} {error}" if code else str(error) or type(error).__name__


def _leaves(reply: Reply) -> list[object]:
    """Returns the leaves of a nested reply, whose shape differs between Redis and Valkey, and their versions."""
    if isinstance(reply, dict):
        reply = [*reply.keys(), *reply.values()]
    return [leaf for item in reply for leaf in _leaves(item)] if isinstance(reply, list) else [reply]


def _packed(commands: Sequence[Command]) -> bytes:
    """Returns commands in the form in which they are sent."""
    return b"".join([hiredis.pack_command(tuple(command)) for command in commands])  # type: ignore[arg-type]
