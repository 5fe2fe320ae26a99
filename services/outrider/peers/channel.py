"""A peer as this process sees it: its channel, whether it answers, and when it is tried again.

A peer may be missing, die, hang or come back at any time. None of that is an error here: the caller goes on without
it, and starts again as soon as it is well.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import grpc
import structlog

from outrider.core.statistics import Absence, Traffic
from outrider.security.peer_channel import PeerChannel, PeerSecurity
from outrider.telemetry.metrics import Metric, Metrics, counters, gauges
from outrider.v1 import verifier_pb2
from outrider.wire.channels import CHANNEL_OPTIONS

log = structlog.get_logger(__name__)

_Stub = TypeVar("_Stub")

ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
"""Calls take turns among all addresses of a name that can be connected to."""


async def addresses_behind(target: str) -> list[str]:
    """Returns the addresses, as HOST:PORT, that a name stands for now by the system's resolver.

    There are none if the target is no such name, or cannot be resolved.

    They are of one family: a name that has an IPv4 and an IPv6 address is one host that can be reached in two ways.
    """
    host, _, port = target.removeprefix("dns:///").rpartition(":")
    # With another scheme, like dns://SERVER/NAME or ipv4:, only gRPC knows the addresses.
    if not host or not port.isdigit() or ":" in host or "/" in host or _is_number(host):
        return []
    try:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    by_family = {family: sorted({address[0] for each, *_, address in found if each == family}) for family, *_ in found}
    if addresses := by_family.get(socket.AF_INET):
        return [f"{address}:{port}" for address in addresses]
    return [f"[{address}]:{port}" for address in by_family.get(socket.AF_INET6, ())]


def is_balanced(target: str) -> bool:
    """Returns True if only gRPC knows the addresses of a target, as with dns://SERVER/NAME or ipv4:, and decides which
    of them a call goes to."""
    host = target.removeprefix("dns:///").rpartition(":")[0]
    return not target.startswith("unix") and ("/" in host or (":" in host and not host.startswith("[")))


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class PeerState:
    """Holds the channel to a peer, what is known of its health, and counts of its calls.

    The peer may be several replicas, if the address is a name: see `ROUND_ROBIN`.
    """

    def __init__(self, name: str, address: str, security: PeerSecurity | None = None, host: str = "") -> None:
        """Makes the channel; nothing is dialled before the first call.

        Args:
            name: Label of the peer in logs and metrics.
            address: HOST:PORT or another gRPC target, like dns:///NAME:PORT.
            security: TLS and token of the calls; None means plaintext, to this machine only.
            host: Name that it must have a certificate for. Empty means the one in the address.

        Raises:
            ValueError: the security does not allow this address.
        """
        self.name = name
        self.address = address
        self.is_connected = False
        self.last_error = ""
        self.trouble = ""
        """See `troubled`."""
        self.absence = Absence.UNREACHABLE
        """The reason why a session that begins now would miss it, if it is down."""
        self.num_shed_tokens = 0
        """Tokens that should have been recorded and were given up."""
        self.num_reconnects = 0
        """Streams that were lost, and tried again."""
        self.traffic = Traffic()
        """Bytes of all calls."""
        self.num_dials = 0
        """Number of requests to replace the connection."""
        self._channel = PeerChannel(
            address,
            PeerSecurity() if security is None else security,
            [
                *CHANNEL_OPTIONS,
                # By default, pick_first, all calls of a channel go to one of the addresses.
                ("grpc.service_config", ROUND_ROBIN),
                # With the default pauses between two attempts, 1 s that grow to 120 s, a peer that is back is found
                # late.
                ("grpc.initial_reconnect_backoff_ms", 100),
                # Despite its name, gRPC takes this as the timeout of one attempt to connect; its default is 20 s.
                ("grpc.min_reconnect_backoff_ms", 2000),
                ("grpc.max_reconnect_backoff_ms", 1000),
                # Channels to the same address share connections otherwise: one that replaces a channel whose connection
                # no longer works would find that same connection again.
                ("grpc.use_local_subchannel_pool", 1),
                *((("grpc.ssl_target_name_override", host), ("grpc.default_authority", host)) if host else ()),
            ],
        )

    def stub(
        self,
        kind: Callable[[grpc.aio.Channel], _Stub],
        more: Sequence[tuple[str, str]] = (),
        traffic: Traffic | None = None,
    ) -> _Stub:
        """Returns a stub for calls that begin now, with the current certificates and token. It must not be kept.

        Args:
            kind: Class of the stub.
            more: Further metadata of its calls.
            traffic: Counts its bytes too, next to those of the peer.
        """
        traffics = (self.traffic,) if traffic is None else (self.traffic, traffic)

        def counted(channel: grpc.aio.Channel) -> _Stub:
            return kind(cast(grpc.aio.Channel, CountedCalls(channel, traffics)))

        return self._channel.stub(counted, more)

    def up(self) -> None:
        """Records that the peer has answered."""
        if not self.is_connected:
            log.info(f"{self.name}.connected", address=self.address)
        self.is_connected, self.last_error = True, ""

    def troubled(self, reason: str) -> None:
        """Records why a peer that answers does not work fully; empty means that it works again."""
        if reason and reason != self.trouble and self.is_connected:
            log.warning(f"{self.name}.troubled", address=self.address, reason=reason)
        self.trouble = reason

    def down(self, reason: str) -> None:
        """Records that the peer has failed."""
        # Attempts go on while it is away: only a new reason is worth another line.
        if self.is_connected or self.last_error != reason:
            log.warning(f"{self.name}.lost", address=self.address, reason=reason)
        self.is_connected, self.last_error = False, reason

    def dial_anew(self) -> None:
        """Makes later calls use another connection, unless the current one is still being made."""
        self.num_dials += 1
        self._channel.dial_anew()

    def info(self) -> verifier_pb2.PeerInfo:
        """Describes the peer for a caller of this server."""
        return verifier_pb2.PeerInfo(
            address=self.address,
            connected=self.is_connected,
            last_error=self.last_error or self.trouble,
            num_shed_tokens=self.num_shed_tokens,
        )

    async def close(self) -> None:
        """Closes the channel and every stream on it."""
        await self._channel.close()


class CountedCalls:
    """Wraps a channel so that stubs made on it count the bytes of their messages."""

    def __init__(self, channel: grpc.aio.Channel, traffics: Sequence[Traffic]) -> None:
        self._channel, self._traffics = channel, traffics

    def __getattr__(self, kind: str) -> Any:
        """Returns the channel's `unary_unary`, `unary_stream`, `stream_unary` or `stream_stream`, with counting."""
        make = getattr(self._channel, kind)

        def multi_callable(
            method: str,
            request_serializer: Callable[[Any], bytes],
            response_deserializer: Callable[[bytes], Any],
            **options: Any,  # generated stubs also pass _registered_method, depending on their version
        ) -> Any:
            # Counted here since nothing else sees the bytes: grpc.aio's interceptors get messages, not their encoding.
            def serialized(message: Any) -> bytes:
                data = request_serializer(message)
                for traffic in self._traffics:
                    traffic.num_bytes_sent += len(data)
                return data

            def parsed(data: bytes) -> Any:
                for traffic in self._traffics:
                    traffic.num_bytes_received += len(data)
                return response_deserializer(data)

            return make(method, request_serializer=serialized, response_deserializer=parsed, **options)

        return multi_callable


def read_peers(states: Sequence[PeerState], others: Mapping[str, Traffic] | None = None) -> Metrics:
    """Yields the metrics of each peer: whether it answers, its reconnects, its bytes. Safe to call in any thread.

    Args:
        states: The peers. Those with the same name stand in for each other, and are reported as one.
        others: Bytes to and from the callers of this process, by their name in the label `peer`.
    """
    names = sorted({state.name for state in states})
    yield gauges(
        "outrider_peer_up",
        "Whether the peer answered when it was last needed; of several that stand in for another, whether any did.",
        "peer",
        {name: any(state.is_connected for state in states if state.name == name) for name in names},
    )
    yield counters(
        "outrider_stream_reconnects_total",
        "Streams to the peer that were lost, and tried again.",
        "peer",
        {name: sum(state.num_reconnects for state in states if state.name == name) for name in names},
    )
    yield counters(
        "outrider_shed_tokens_total",
        "Tokens that the peer was to record, and that were given up.",
        "peer",
        {name: sum(state.num_shed_tokens for state in states if state.name == name) for name in names},
    )
    yield _wire_bytes([*((state.name, state.traffic) for state in states), *(others or {}).items()])


def _wire_bytes(traffics: Sequence[tuple[str, Traffic]]) -> Metric:
    values: dict[tuple[str, ...], float] = {}
    for name, traffic in traffics:
        sent, received = (name, "sent"), (name, "received")
        values[sent] = values.get(sent, 0) + traffic.num_bytes_sent
        values[received] = values.get(received, 0) + traffic.num_bytes_received
    description = "Bytes of the messages to and from the peer, without the frames around them."
    return Metric("outrider_wire_bytes_total", description, "counter", ("peer", "direction"), values)
