"""Redis as the datastore uses it: connections that come back by themselves, Functions that are where they are needed.

Two connections are kept: one for lookups, whose answers must come within milliseconds, and one for everything else, so
that no large reply stands in the way. Whoever waits for changes opens another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources

import hiredis
import structlog

from outrider.datastore.link import Command, CommandFailed, Endpoint, Link, LinkLost, Reply, packed
from outrider.datastore.redis_layout import LIBRARY
from outrider.datastore.store import StoreFull, StoreUnavailable

log = structlog.get_logger(__name__)

RETRY_S = 0.2
"""Between two attempts to connect."""


class RedisClient:
    """See the module. Every method raises StoreUnavailable, and StoreFull if Redis is out of memory."""

    def __init__(self, url: str, *, lookup_timeout_s: float, timeout_s: float, memory_budget_bytes: int = 0) -> None:
        """Nothing is connected before `start`, or the first call."""
        self._endpoint = Endpoint(url)
        self._lookup_timeout_s = lookup_timeout_s
        self._timeout_s = timeout_s
        self._memory_budget_bytes = memory_budget_bytes
        self._commands = _KeptLink(self._connect_prepared)
        self._lookups = _KeptLink(self.connect_link)
        self._source = resources.files(__package__).joinpath("ngrams.lua").read_text()
        self.num_errors = 0
        """Calls that have failed."""

    async def start(self) -> None:
        """Connects, if Redis is there, and keeps connecting from now on."""
        for kept in (self._commands, self._lookups):
            await kept.start()

    async def close(self) -> None:
        """Lets go of both connections."""
        for kept in (self._commands, self._lookups):
            await kept.close()

    async def look_up(self, commands: Sequence[Command]) -> list[Reply]:
        """Replies of read-only Functions. At once where they cannot come in time, or are not coming now."""
        link = self._lookups.link
        if link is None and not self._lookups.is_kept:
            link = await self._reach(self._lookups)
        if link is None or not link.is_prompt:
            raise self._unavailable(f"it {'is late' if link else 'cannot be reached'}")
        try:
            replies = await link.send(commands, self._lookup_timeout_s)
            if _has_no_functions(replies):
                await self._install(await self._reach(self._commands))
                replies = await link.send(commands, self._lookup_timeout_s)
        except LinkLost as error:
            raise self._unavailable(error) from error
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                raise self._unavailable(reply)
        return replies

    async def call(self, *command: str | bytes | int) -> Reply:
        """One command."""
        [reply] = await self.call_all([command])
        return reply

    async def call_all(self, commands: Sequence[Command]) -> list[Reply]:
        """Several commands in one round trip. If one is refused, the others may have been done."""
        return await self.call_packed(packed(commands), len(commands))

    async def call_packed(self, commands: bytes, num_commands: int) -> list[Reply]:
        """As `call_all`, for packed commands."""
        link = await self._reach(self._commands)
        try:
            replies = await link.send_packed(commands, num_commands, self._timeout_s)
            if _has_no_functions(replies):
                await self._install(link)
                replies = await link.send_packed(commands, num_commands, self._timeout_s)
        except LinkLost as error:
            raise self._unavailable(error) from error
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                if str(reply).startswith("OOM"):
                    self.num_errors += 1
                    raise StoreFull(f"Redis at {self._endpoint} is full: {reply}")
                raise self._unavailable(reply)
        return replies

    async def connect_link(self) -> Link:
        """Another connection; the caller closes it. Raises LinkLost."""
        return await self._endpoint.connect(self._timeout_s)

    def unavailable(self, why: object) -> StoreUnavailable:
        """What to raise when a connection of the caller's own has failed."""
        return self._unavailable(why)

    async def _reach(self, kept: _KeptLink) -> Link:
        try:
            return await kept.reach()
        except LinkLost as error:
            raise self._unavailable(error) from error

    async def _connect_prepared(self) -> Link:
        link = await self.connect_link()
        try:
            await self._install(link)
            await self._set_memory_budget(link)
        except CommandFailed as error:
            link.close()
            raise LinkLost(str(error)) from error
        log.info("redis.connected", address=str(self._endpoint))
        return link

    async def _install(self, link: Link) -> None:
        """Loads the Functions unless these very ones are there."""
        found = await link.call(self._timeout_s, "FUNCTION", "LIST", "LIBRARYNAME", LIBRARY, "WITHCODE")
        if not found or self._source.encode() not in found[0]:
            await link.call(self._timeout_s, "FUNCTION", "LOAD", "REPLACE", self._source)

    async def _set_memory_budget(self, link: Link) -> None:
        if not self._memory_budget_bytes:
            return
        wanted = {"maxmemory": str(self._memory_budget_bytes), "maxmemory-policy": "volatile-lfu"}
        try:
            for name, value in wanted.items():
                await link.call(self._timeout_s, "CONFIG", "SET", name, value)
        except CommandFailed as error:
            rule = " and ".join(f"{name} {value}" for name, value in wanted.items())
            log.warning("redis.budget_refused", address=str(self._endpoint), error=str(error), configure=rule)

    def _unavailable(self, why: object) -> StoreUnavailable:
        self.num_errors += 1
        return StoreUnavailable(f"Redis at {self._endpoint} cannot be used: {why}")


class _KeptLink:
    """A connection that is made anew when it has ended."""

    def __init__(self, connect: Callable[[], Awaitable[Link]]) -> None:
        self._connect = connect
        self._link: Link | None = None
        self._connecting = asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def link(self) -> Link | None:
        """The connection, if it is up."""
        return None if self._link is None or self._link.lost.is_set() else self._link

    @property
    def is_kept(self) -> bool:
        """Whether `start` was called: then the connection comes back without anybody asking."""
        return self._keeper is not None

    async def start(self) -> None:
        if self._keeper is None:
            tried = asyncio.Event()
            self._keeper = asyncio.create_task(self._keep(tried))
            await tried.wait()

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait((self._keeper,))
            self._keeper = None
        if self._link is not None:
            self._link.close()

    async def reach(self) -> Link:
        """The connection, now. Raises LinkLost."""
        if (link := self.link) is not None:
            return link
        async with self._connecting:
            if self.link is None:
                self._link = await self._connect()
            assert self._link is not None
            return self._link

    async def _keep(self, tried: asyncio.Event) -> None:
        was_up = True
        while True:
            try:
                link = await self.reach()
                tried.set()
                was_up = True
                await link.lost.wait()
            except LinkLost as error:
                if was_up:
                    log.warning("redis.lost", error=str(error))
                was_up = False
                tried.set()
                await asyncio.sleep(RETRY_S)


def _has_no_functions(replies: list[Reply]) -> bool:
    """Whether Redis came back empty."""
    return any(isinstance(reply, hiredis.ReplyError) and "Function not found" in str(reply) for reply in replies)
