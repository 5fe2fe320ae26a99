"""How channels to a server are opened: message sizes, keepalive, retries. The same for both clients."""

from __future__ import annotations

import json

import grpc

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
    # Without it a ping that gRPC sends for its own purposes is waited for, for a minute, and no other is sent.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A server that restarts is found again quickly; gRPC's own default waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # What a connection may take to come about: handshakes over a long way take longer than the first backoff.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A server whose name means another address now is found there; gRPC's own default asks every half a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
]


def open_aio(address: str, credentials: grpc.ChannelCredentials | None, *, retries: bool = True) -> grpc.aio.Channel:
    """An asyncio channel; without credentials it is neither encrypted nor authenticated. Without retries every failure
    is left to the caller."""
    options = [*CHANNEL_OPTIONS, ("grpc.enable_retries", int(retries))]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def open_blocking(address: str, credentials: grpc.ChannelCredentials | None, *, retries: bool = True) -> grpc.Channel:
    """The same, blocking."""
    options = [*CHANNEL_OPTIONS, ("grpc.enable_retries", int(retries))]
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)
