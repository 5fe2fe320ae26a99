"""Waiting longer each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import grpc

CHANNEL_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Without it a ping that gRPC sends for its own purposes is waited for, for a minute, and no other is sent.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ("grpc.so_reuseport", 0),
)
"""For servers and channels alike. A peer that vanished without a word is noticed within 30 s even when nothing is
sent, and what stands between two peers does not forget a connection that has no call for long. A peer whose name means
another address now is found there at the next attempt."""

MAX_DOUBLINGS = 64
"""No first wait is short enough for more; floats end at 1023, which an outage of a quarter of an hour reaches."""


def doubled(first_s: float, last_s: float, num_times: int) -> float:
    """Seconds: `first_s`, doubled so many times, at most `last_s`."""
    return min(last_s, first_s * 2.0 ** min(num_times, MAX_DOUBLINGS))


T = TypeVar("T")


class Unreadable(grpc.aio.AioRpcError):
    """A peer has sent a message that cannot be parsed: to its reader the call has failed."""

    def __init__(self) -> None:
        nothing = grpc.aio.Metadata()
        super().__init__(grpc.StatusCode.INTERNAL, nothing, nothing, "a message of it cannot be parsed")


def require_message(message: T | None) -> T:
    """The message. Raises Unreadable if it could not be parsed."""
    if message is None:
        raise Unreadable
    return message
