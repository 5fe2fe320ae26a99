"""A caller that begins and resets thousands of calls in a moment does not end the calls of others."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.idle_service import NAME, Idle, serving

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, HEADERS, RST_STREAM = 4, 1, 3
END_HEADERS = 4
NUM_RESETS = 10_000
NUM_HONEST = 4_000


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream_id) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A literal HPACK header field, which no table holds."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def flood(address: str) -> socket.socket:
    """Begins and resets calls on its own connection, which stays open."""
    post_over_http = b"\x83\x86"  # both are in HPACK's static table
    headers = post_over_http + b"".join(
        literal(*field)
        for field in (
            (b":path", f"/{NAME}/Generate".encode()),
            (b":authority", b"x"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        )
    )
    cancel = struct.pack(">I", 8)
    calls = (
        frame(HEADERS, END_HEADERS, number, headers) + frame(RST_STREAM, 0, number, cancel)
        for number in range(1, 2 * NUM_RESETS, 2)
    )
    host, port = address.split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + b"".join(calls))
    return connection


def statuses(channel: grpc.Channel, num_calls: int) -> Counter[grpc.StatusCode]:
    """Makes so many calls at once, and counts their statuses."""
    stub = health_pb2_grpc.HealthStub(channel)
    futures = [stub.Check.future(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(num_calls)]
    return Counter(grpc.StatusCode.OK if future.exception() is None else future.code() for future in futures)


async def test_a_flood_of_calls_that_are_reset_ends_no_call_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    def ask(address: str) -> Counter[grpc.StatusCode]:
        found = Counter[grpc.StatusCode]()
        with grpc.insecure_channel(address) as channel:
            statuses(channel, 1)
            for _ in range(3):
                with flood(address):
                    found += statuses(channel, 100)
        return found

    async with serving(Idle(), capsys) as (address, _, _):
        assert await asyncio.to_thread(ask, address) == {grpc.StatusCode.OK: 300}


@pytest.mark.slow
async def test_thousands_of_honest_calls_at_once_are_all_answered(capsys: pytest.CaptureFixture[str]) -> None:
    def ask(address: str) -> Counter[grpc.StatusCode]:
        with grpc.insecure_channel(address) as channel:
            return statuses(channel, NUM_HONEST)

    async with serving(Idle(), capsys) as (address, _, _):
        assert await asyncio.to_thread(ask, address) == {grpc.StatusCode.OK: NUM_HONEST}
