"""The address of Redis: a server, or the current primary of a service according to its Sentinels."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from outrider.security.addresses import sentinel_url

SENTINEL_PREFIX = "sentinel_"
"""Prefix of a URL's options for the Sentinels, such as their password."""


class RedisAddress:
    """Makes clients of the Redis that a URL names. `str` of it is for messages, and shows no password."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """
        Args:
            url: See `REDIS_URL_RULE`.
            timeout_s: Longest time for connecting, and for each Sentinel's answer.

        Raises:
            ValueError: The URL is of another kind.
        """
        self._sentinel: Sentinel | None = None
        self._service = ""
        self._options: dict[str, Any] = {
            # RESP3, the default of redis-py, answers some commands with maps and pushes messages between replies;
            # `RedisClient` reads exactly one reply for each command of a lookup.
            "protocol": 2,
            "socket_connect_timeout": timeout_s,
            # The default retries several times, with pauses. Callers go on without an answer, or ask again.
            "retry": Retry(NoBackoff(), 0),
        }
        self._url = url
        self.num_steps = 1
        """Most servers that may be tried, one after the other, before Redis is reached."""
        if (found := sentinel_url(url)) is not None:
            self._service, self.num_steps = found.service, 1 + len(found.sentinels)
            self._sentinel = self._sentinel_of(found.sentinels, found.primary, timeout_s)
            self._text = f"{found.service}@" + ",".join(f"{host}:{port}" for host, port in found.sentinels)
        else:
            named = parse_url(url)
            self._text = named.get("path") or f"{named.get('host', 'localhost')}:{named.get('port', 6379)}"

    def __str__(self) -> str:
        return self._text

    def client(self, timeout_s: float | None) -> Any:  # its commands are typed as of both clients, asyncio's and other
        """Returns a client with connections of its own. `timeout_s` is for each read and write; None means no limit."""
        if self._sentinel is None:
            return Redis.from_url(self._url, socket_timeout=timeout_s, **self._options)
        return self._sentinel.master_for(self._service, socket_timeout=timeout_s, **self._options)

    async def close(self) -> None:
        """Closes the connections to Sentinels."""
        for sentinel in self._sentinel.sentinels if self._sentinel else ():
            await sentinel.aclose()

    def _sentinel_of(self, sentinels: tuple[tuple[str, int], ...], primary: str, timeout_s: float) -> Sentinel:
        of_primary: dict[str, Any] = dict(parse_url(primary))
        del of_primary["host"]  # not that of a machine
        # A client of one server learns of TLS from the class of its connections; Sentinel has its own class.
        if of_primary.pop("connection_class", None) is not None:
            of_primary["ssl"] = True
        of_sentinels = {name: value for name, value in of_primary.items() if name.startswith("ssl")}
        for name in [name for name in of_primary if name.startswith(SENTINEL_PREFIX)]:
            of_sentinels[name.removeprefix(SENTINEL_PREFIX)] = of_primary.pop(name)
        return Sentinel(  # type: ignore[no-untyped-call]
            sentinels, sentinel_kwargs={**of_sentinels, **self._options, "socket_timeout": timeout_s}, **of_primary
        )
