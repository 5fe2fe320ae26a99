"""A peer as this process sees it: the way to it, whether it answers, and when it is tried again.

A peer may be missing, die, hang or come back at any time. None of that is an error here: whoever needs it goes on
without it, and begins anew as soon as it is well.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import grpc
import structlog

from outrider.core.statistics import Traffic
from outrider.rpc.backoff import doubled
from outrider.rpc.counted_calls import CountedCalls
from outrider.rpc.security.peer_channel import PeerChannel, PeerSecurity
from outrider.rpc.server import CHANNEL_OPTIONS

log = structlog.get_logger(__name__)

_Stub = TypeVar("_Stub")

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 1.0
ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
"""Calls take turns among all addresses that a name has, as far as there is somebody."""
SENSELESS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Trying again at once would fail in the same way."""
SPOILT = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
"""What a call may come to on a connection that is none any more: what stood between may have forgotten it, which gRPC
itself takes half a minute to notice; or bytes were changed, and the two ends no longer read the same headers."""

OVERWRITTEN = "Internal error from Core"


class PeerState:
    """A peer as the verifier sees it. It may be several replicas, if the address is a name: see `ROUND_ROBIN`."""

    def __init__(self, name: str, address: str, security: PeerSecurity | None = None) -> None:
        """`address`: HOST:PORT or another gRPC target, like dns:///NAME:PORT. `security`: None = in plaintext, to this
        machine only. Raises ValueError where it is none for the address."""
        self.name = name
        self.address = address
        self.is_connected = False
        self.last_error = ""
        self.num_shed_tokens = 0
        """Tokens that were to be recorded and were given up."""
        self.num_reconnects = 0
        """Streams that were lost, and tried again."""
        self.traffic = Traffic()
        """Of all calls."""
        self._channel = PeerChannel(
            address,
            PeerSecurity() if security is None else security,
            [
                *CHANNEL_OPTIONS,
                ("grpc.service_config", ROUND_ROBIN),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 2000),
                ("grpc.max_reconnect_backoff_ms", 1000),
                # A channel that is dialled anew shall not find the connection of the old one.
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )

    def stub(
        self,
        kind: Callable[[grpc.aio.Channel], _Stub],
        more: Sequence[tuple[str, str]] = (),
        traffic: Traffic | None = None,
    ) -> _Stub:
        """A stub for a stream that is opened now, by the certificates and the token of now: not to be kept. `more`:
        metadata of its calls; `traffic`: where its bytes are counted beside those of the peer."""
        traffics = (self.traffic,) if traffic is None else (self.traffic, traffic)

        def counted(channel: grpc.aio.Channel) -> _Stub:
            return kind(cast(grpc.aio.Channel, CountedCalls(channel, traffics)))

        return self._channel.stub(counted, more)

    def up(self) -> None:
        """It has answered."""
        if not self.is_connected:
            log.info(f"{self.name}.connected", address=self.address)
        self.is_connected, self.last_error = True, ""

    def down(self, reason: str) -> None:
        """It has failed."""
        if self.is_connected or self.last_error != reason:
            log.warning(f"{self.name}.lost", address=self.address, reason=reason)
        self.is_connected, self.last_error = False, reason

    def dial_anew(self) -> None:
        """The calls to come go by another connection, if there is one."""
        self._channel.dial_anew()

    async def close(self) -> None:
        """Closes the channel and every stream on it."""
        await self._channel.close()


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """One line for the logs."""
    return f"{error.code().name}: {error.details()}"


def is_overwritten(failure: Exception) -> bool:
    """Whether gRPC has lost the status: a call that ends while one of our messages is written fails with one of
    gRPC's own making."""
    return (
        isinstance(failure, grpc.aio.AioRpcError)
        and failure.code() is grpc.StatusCode.INTERNAL
        and failure.details() == OVERWRITTEN
    )


async def wait_before_retry(attempt: int) -> None:
    """Waits before attempt number 1, 2, ...: 0.1 s, then twice as long each time, at most 1 s."""
    await asyncio.sleep(doubled(FIRST_RETRY_S, LAST_RETRY_S, attempt - 1))
