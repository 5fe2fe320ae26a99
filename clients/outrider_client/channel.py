"""Opens channels to a server, alike for both clients: message sizes, keepalive, retries, security."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import grpc

from outrider.security.addresses import addresses_of, is_loopback
from outrider.security.tokens import bearer, token_from

DEFAULT_PORT = 50051
"""Port of a verifier whose address names none."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Largest message in either direction: a prompt of a million tokens, with room to spare."""

_RETRY_POLICY = {
    # A call is repeated only while nothing of the answer has arrived: after that gRPC considers it committed.
    "maxAttempts": 4,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}

_SERVICE_CONFIG = {
    # With dns:///name of a headless service, every replica gets its share.
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [{"name": [{}], "retryPolicy": _RETRY_POLICY}],
}

CHANNEL_OPTIONS: list[tuple[str, str | int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Finds a dead server within 15 s, and keeps a middlebox from forgetting a stream that waits for its first token.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Without it gRPC waits up to a minute for the answer to an internal ping, and sends no keepalive meanwhile.
    ("grpc.http2.ping_timeout_ms", 5_000),
    # 0 means no limit: a stream that waits for its first token sends no data between the pings.
    ("grpc.http2.max_pings_without_data", 0),
    # A server that restarts is found again quickly; gRPC's own default waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the time that one attempt to connect may take: handshakes over a long path outlast the first backoff.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A new client finds a server that is back at once; otherwise it would share the back-off of an older client.
    ("grpc.use_local_subchannel_pool", 1),
    # A server whose name now resolves to another address is found; gRPC's own default resolves at most every 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
]


_NAMED_PORT = re.compile(r"(?!(?:dns|unix|unix-abstract|vsock|ipv4|ipv6|xds|passthrough):)[^:/\[\]]+:([^:/]*)")
"""A host and what should be its port; targets of gRPC's own schemes do not match."""


def verifier_addresses(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Returns each address of a list of verifiers once, in order, with a port. Raises ValueError without any, and for a
    URL."""
    return tuple(map(_with_port, addresses_of(addresses)))


def _with_port(address: str) -> str:
    scheme, separator, _ = address.partition("://")
    if separator and scheme in ("http", "https", "grpc", "grpcs", "tcp"):
        raise ValueError(f"address takes HOST:PORT, without {scheme}://, got {address!r}")
    try:
        bare = ipaddress.ip_address(address)
    except ValueError:
        if (named := _NAMED_PORT.fullmatch(address)) and not (named[1].isdecimal() and int(named[1]) < 1 << 16):
            raise ValueError(f"address takes HOST:PORT, with a port up to 65535, got {address!r}") from None
        # An address with a colon names a port, or is a target of gRPC's own, like unix:PATH and dns:///NAME.
        is_whole = ":" in address.rpartition("]")[2]
        return address if is_whole else f"{address}:{DEFAULT_PORT}"
    return f"[{address}]:{DEFAULT_PORT}" if bare.version == 6 else f"{address}:{DEFAULT_PORT}"


def open_aio(address: str, credentials: grpc.ChannelCredentials | None, *, retries: bool = True) -> grpc.aio.Channel:
    """Opens an asyncio channel.

    Args:
        address: As gRPC takes it: HOST:PORT, dns:///NAME:PORT, unix:PATH.
        credentials: None means neither encrypted nor authenticated.
        retries: True if gRPC repeats calls of which no answer has arrived; otherwise the caller gets every failure.
    """
    options = [*CHANNEL_OPTIONS, ("grpc.enable_retries", int(retries))]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def open_blocking(address: str, credentials: grpc.ChannelCredentials | None, *, retries: bool = True) -> grpc.Channel:
    """Opens a blocking channel. The parameters are those of `open_aio`."""
    options = [*CHANNEL_OPTIONS, ("grpc.enable_retries", int(retries))]
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


class SecurityOptions(TypedDict, total=False):
    """Holds the keyword arguments of the clients that secure their connections."""

    token: str
    """Sent with every call."""
    ca_file: str | Path | None
    """PEM file of the authorities that may have signed the server's certificate. Giving it turns TLS on."""
    cert_file: str | Path | None
    """PEM file of the certificate to show. Needs ca_file and key_file."""
    key_file: str | Path | None
    """PEM file of its key."""
    insecure: bool
    """Allows plaintext to other machines: everyone on the path can read it, the token included."""


class PlaintextRefused(ValueError):
    """An address is on another machine, and neither TLS nor plaintext was asked for."""

    def __init__(self, address: str) -> None:
        super().__init__(f"{address} is not on this machine: ca_file is needed for TLS, or insecure=True to go without")
        self.address = address


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSecurity:
    """Checks `SecurityOptions` and makes credentials of them. The files are read when a channel is opened."""

    token: str = field(default="", repr=False)  # what is printed ends in logs
    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    insecure: bool = False
    credentials: grpc.ChannelCredentials | None = field(default=None, repr=False)
    """Credentials that the caller has made, instead of those of the files."""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file: one needs the other")
        if self.cert_file is not None and self.ca_file is None:
            raise ValueError("cert_file needs ca_file: there is no TLS without")
        if self.credentials is not None and self.ca_file is not None:
            raise ValueError("credentials and ca_file: only one of them can be used")
        if self.insecure and (self.ca_file is not None or self.credentials is not None):
            raise ValueError("insecure means without TLS, and there are credentials for it")
        if self.token:
            # Only to check it: gRPC refuses a header with a line break or an umlaut later, and obscurely.
            try:
                token_from([self.token.encode()])
            except ValueError:
                raise ValueError("token must be one word, in ASCII") from None

    def credentials_for(self, address: str) -> grpc.ChannelCredentials | None:
        """Returns TLS credentials for a channel to an address; None means plaintext.

        Raises:
            PlaintextRefused: Plaintext to this address is not allowed.
            OSError: A file cannot be read.
        """
        if self.credentials is not None:
            return self.credentials
        if self.ca_file is not None:
            # The key before the certificate: that is the order of gRPC's parameters.
            key, cert = (None if path is None else Path(path).read_bytes() for path in (self.key_file, self.cert_file))
            return grpc.ssl_channel_credentials(Path(self.ca_file).read_bytes(), key, cert)
        if not (self.insecure or is_loopback(address)):
            raise PlaintextRefused(address)
        return None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata that go with every call."""
        return bearer(self.token) if self.token else ()


NO_SECURITY = ChannelSecurity()
"""A channel in plaintext, which may lead to this machine only."""
