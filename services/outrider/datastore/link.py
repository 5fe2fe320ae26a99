"""One connection to Redis: commands in, replies out, in order, any number of them under way at once.

redis-py's `execute_command` takes twice as long as Redis itself for a small command; a lookup is nothing but one small
command. hiredis, which redis-py reads with, too, does the work here without the layers between.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import hiredis
from redis.asyncio.connection import SSLConnection, parse_url

Command = Sequence[str | bytes | int]
Reply = Any
"""bytes, int, None, or a list of these."""


def packed(commands: Iterable[Command]) -> bytes:
    """Commands as they are sent."""
    return b"".join([hiredis.pack_command(tuple(command)) for command in commands])  # type: ignore[arg-type]


class LinkLost(Exception):
    """The connection cannot be made, or has ended. The message says why."""


class LinkLate(LinkLost):
    """No answer in time. The connection stays: it may come yet."""


class CommandFailed(Exception):
    """Redis has refused a command. The message is its own."""


@dataclass(slots=True, eq=False)
class _Call:
    """Commands that were sent together."""

    future: asyncio.Future[list[Reply]]
    num_replies: int
    deadline: float
    replies: list[Reply]


class Link(asyncio.Protocol):
    """See the module. Owned by one event loop."""

    def __init__(self, give_up_s: float) -> None:
        """An answer that is this long overdue ends the connection."""
        self._give_up_s = give_up_s
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader()
        self._calls: deque[_Call] = deque()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.lost = asyncio.Event()
        """Set when the connection has ended."""
        self._why = "the connection has ended"

    @property
    def is_prompt(self) -> bool:
        """Whether it is worth asking: the connection is up, and no answer is overdue."""
        calls = self._calls
        return not self.lost.is_set() and not (calls and calls[0].deadline < self._loop.time())

    async def call(self, timeout_s: float, *command: str | bytes | int) -> Reply:
        """One command. Raises CommandFailed, LinkLate, LinkLost."""
        [reply] = await self.send((command,), timeout_s)
        if isinstance(reply, hiredis.ReplyError):
            raise CommandFailed(str(reply))
        return reply

    def send(self, commands: Sequence[Command], timeout_s: float) -> asyncio.Future[list[Reply]]:
        """Sends commands together. The replies come together; refused commands have a `hiredis.ReplyError` there.

        The future raises LinkLate, LinkLost.
        """
        return self.send_packed(packed(commands), len(commands), timeout_s)

    def send_packed(self, commands: bytes, num_commands: int, timeout_s: float) -> asyncio.Future[list[Reply]]:
        """As `send`, for packed commands."""
        future: asyncio.Future[list[Reply]] = self._loop.create_future()
        if self._transport is None or self.lost.is_set():
            future.set_exception(LinkLost(self._why))
            return future
        if not num_commands:
            future.set_result([])
            return future
        deadline = self._loop.time() + timeout_s
        self._calls.append(_Call(future, num_commands, deadline, []))
        self._transport.write(commands)
        if self._timer is None or deadline < self._timer.when():
            self._watch_until(deadline)
        return future

    def close(self, why: str = "the connection was closed") -> None:
        """Ends it at once. Calls under way fail."""
        if self._transport is not None and not self.lost.is_set():
            self._transport.abort()
        self._end(why)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(str(exc) if exc else "Redis has closed the connection")

    def data_received(self, data: bytes) -> None:
        reader, calls = self._reader, self._calls
        reader.feed(data)
        while (reply := reader.gets()) is not False and calls:
            call = calls[0]
            call.replies.append(reply)
            if len(call.replies) == call.num_replies:
                calls.popleft()
                if not call.future.done():
                    call.future.set_result(call.replies)

    def _watch_until(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self._fail_late_calls)

    def _fail_late_calls(self) -> None:
        """One timer for all calls: most answers come long before it."""
        self._timer = None
        now = self._loop.time()
        if self._calls and self._calls[0].deadline + self._give_up_s <= now:
            self.close("Redis does not answer")
            return
        following = []
        for call in self._calls:
            if call.deadline > now:
                following.append(call.deadline)
            elif not call.future.done():
                call.future.set_exception(LinkLate("Redis did not answer in time"))
        if self._calls:
            # An answer that comes late must still be read, before those to later calls.
            self._watch_until(min([*following, self._calls[0].deadline + self._give_up_s]))

    def _end(self, why: str) -> None:
        if self.lost.is_set():
            return
        self._why = why
        self.lost.set()
        if self._timer is not None:
            self._timer.cancel()
        for call in self._calls:
            if not call.future.done():
                call.future.set_exception(LinkLost(why))
        self._calls.clear()


class Endpoint:
    """Where Redis is, and how to get in."""

    def __init__(self, url: str) -> None:
        """redis://, rediss:// or unix://, with what redis-py knows of user, password, database and certificates.

        Raises ValueError.
        """
        where: dict[str, Any] = dict(parse_url(url))
        self._path: str | None = where.get("path")
        self._host: str = where.get("host") or "localhost"
        self._port: int = where.get("port") or 6379
        self._login = [where[part] for part in ("username", "password") if where.get(part)]
        self._database = int(where.get("db") or 0)
        self._ssl = _ssl_context(where) if where.get("connection_class") is SSLConnection else None

    def __str__(self) -> str:
        """Not the URL: it may hold a password."""
        return self._path or f"{self._host}:{self._port}"

    async def connect(self, timeout_s: float, give_up_s: float | None = None) -> Link:
        """A connection that answers. Raises LinkLost."""
        link = Link(timeout_s if give_up_s is None else give_up_s)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                if self._path:
                    await loop.create_unix_connection(lambda: link, self._path)
                else:
                    await loop.create_connection(lambda: link, self._host, self._port, ssl=self._ssl)
                if self._login:
                    await link.call(timeout_s, "AUTH", *self._login)
                if self._database:
                    await link.call(timeout_s, "SELECT", self._database)
                await link.call(timeout_s, "PING")
        except BaseException as error:
            link.close()
            if isinstance(error, TimeoutError):
                raise LinkLost("Timeout") from error
            if isinstance(error, (OSError, CommandFailed)):
                raise LinkLost(str(error)) from error
            raise
        return link


def _ssl_context(where: dict[str, Any]) -> ssl.SSLContext:
    """The options of redis-py's URLs."""
    context = ssl.create_default_context(cafile=where.get("ssl_ca_certs"))
    if where.get("ssl_certfile"):
        context.load_cert_chain(where["ssl_certfile"], where.get("ssl_keyfile"))
    if where.get("ssl_cert_reqs") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif str(where.get("ssl_check_hostname", "true")).lower() in ("false", "no", "0"):
        context.check_hostname = False
    return context
