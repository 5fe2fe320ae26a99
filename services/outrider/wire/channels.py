"""Options of channels and servers, turns and delays of attempts, and messages that cannot be parsed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

import grpc

CHANNEL_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Without it gRPC waits a minute for the answer to a ping of its own, and sends no other meanwhile.
    ("grpc.http2.ping_timeout_ms", 10_000),
    # By default gRPC sends two pings without data in between and then no more: an idle stream would go unwatched.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # With the default, 30 s, a peer that has moved to another address would be out of reach for that long.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # On by default on Linux, where a second server on the same port then starts, too, and gets a part of the calls.
    ("grpc.so_reuseport", 0),
)
"""Options for servers and channels alike. A peer that vanished silently is noticed within 30 s even when nothing is
sent, and a NAT or proxy between two peers does not forget a connection that has no call for long. A peer whose name has
got another address is found there at the next attempt."""

NOT_TAKEN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
"""Statuses of a server that does not take a call now: another one may, or the same one later. gRPC answers CANCELLED if
more calls are pending than a server holds, and while it begins to stop; a caller's own cancellation does not show as
one."""

MAX_DOUBLINGS = 64
"""Bound of the exponent: no first wait is short enough for more. Floats end at 1023 doublings, which an outage of a
quarter of an hour reaches."""


def doubled(first_s: float, last_s: float, num_times: int) -> float:
    """Returns `first_s` doubled `num_times` times, in seconds, at most `last_s`."""
    return min(last_s, first_s * 2.0 ** min(num_times, MAX_DOUBLINGS))


def first_turn(num_servers: int) -> int:
    """Returns the number of the server that is asked first, of several that can do the same work. Random: many callers
    with one list must not all begin at its first address."""
    return random.randrange(num_servers)


T = TypeVar("T")


class Unreadable(grpc.aio.AioRpcError):
    """A peer has sent a message that cannot be parsed: for its reader the call has failed."""

    def __init__(self) -> None:
        nothing = grpc.aio.Metadata()
        super().__init__(grpc.StatusCode.INTERNAL, nothing, nothing, "a message of it cannot be parsed")


def require_message(message: T | None) -> T:
    """Returns the message. Raises Unreadable if it could not be parsed."""
    # grpc.aio logs what its deserializer raises, and hands None to the reader as if it were a message.
    if message is None:
        raise Unreadable
    return message
