"""Lists of addresses, loopback addresses (only for them plaintext is allowed without a flag), and URLs of Redis."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

_UNIX = ("unix:", "unix-abstract:")
_RESOLVERS = ("ipv4:", "ipv6:", "dns:")


def addresses_of(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Returns each address of a list once, in order; a string has commas between them. Raises ValueError if there is
    none."""
    listed = addresses.split(",") if isinstance(addresses, str) else addresses
    found = tuple(dict.fromkeys(address.strip() for address in listed if address.strip()))
    if not found:
        raise ValueError(f"address must name at least one server, HOST:PORT, got {addresses!r}")
    return found


REDIS_URL_RULE = (
    "a redis://, rediss:// or unix:// URL, or redis+sentinel://HOST[:PORT],.../SERVICE[/DB]; a password in it "
    "percent-encoded"
)
SENTINEL_PORT = 26379


class SentinelUrl(NamedTuple):
    """A primary that Sentinels know: redis+sentinel:// or, with TLS, rediss+sentinel://."""

    sentinels: tuple[tuple[str, int], ...]
    """Host and port of each Sentinel, in order."""
    service: str
    primary: str
    """URL of a server with the same credentials, database and options, whose host is only a placeholder."""


def sentinel_url(value: str) -> SentinelUrl | None:
    """Returns what a URL for Sentinel names; None means that it is of another kind. Raises ValueError for a malformed
    one."""
    scheme, _, rest = value.partition("+sentinel://")
    if scheme not in ("redis", "rediss") or not rest:
        return None
    # Parsed by hand: urlsplit refuses several ports.
    place, _, query = rest.partition("?")
    authority, _, path = place.partition("/")
    credentials, at, hosts = authority.rpartition("@")
    sentinels = []
    for address in hosts.split(","):
        one = urlsplit(f"//{address}")
        if not one.hostname or one.path or one.port == 0:
            raise ValueError(f"must name each Sentinel as HOST or HOST:PORT, got {address!r}")
        sentinels.append((one.hostname, one.port or SENTINEL_PORT))
    service, _, database = path.partition("/")
    if not service or not (database or "0").isdecimal():
        raise ValueError("must end with /SERVICE or /SERVICE/DB, after the Sentinels")
    return SentinelUrl(tuple(sentinels), service, f"{scheme}://{credentials}{at}sentinel/{database or 0}?{query}")


def is_redis_url(value: str) -> bool:
    """Returns True if a URL obeys `REDIS_URL_RULE`."""
    try:
        if sentinel_url(value) is not None:
            return True
        url = urlsplit(value)
        # `port` raises ValueError if it is not a number: redis-py would fail only when it connects.
        server = url.path if url.scheme == "unix" else url.hostname
        return url.scheme in ("redis", "rediss", "unix") and bool(server) and (url.port is None or url.port > 0)
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    """Returns True if an address, or each one of a gRPC target, is of this machine: 127.0.0.0/8, ::1, localhost, unix:.

    A name other than localhost is not, whatever it resolves to now.
    """
    return all(_is_loopback(part.strip()) for part in address.split(","))


def _is_loopback(address: str) -> bool:
    if address.startswith(_UNIX):
        return True
    for resolver in _RESOLVERS:
        if address.startswith(resolver):
            address = address.removeprefix(resolver)
            if address.startswith("//"):
                # dns://authority/name asks that authority, which may answer anything, even for localhost; dns:///name
                # and dns:name ask the system's resolver.
                authority, _, address = address.removeprefix("//").partition("/")
                if authority:
                    return False
    return is_loopback_host(host_of(address))


def is_loopback_host(host: str) -> bool:
    """Returns True if a name or an IP address, without a port, is of this machine. A name other than localhost is not,
    whatever it resolves to now."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """Returns True for an IP address, without a port."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def host_of(address: str) -> str:
    """Returns the host of HOST:PORT, or of HOST, in lower case and without brackets; empty if there is none."""
    if is_address(address):  # a bare IPv6 address has colons, too
        return address
    try:
        return urlsplit(f"//{address}").hostname or ""
    except ValueError:
        return ""
