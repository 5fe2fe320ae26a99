"""The proxy delays, and changes nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from outrider_client.delay_proxy import DelayProxy


@asynccontextmanager
async def an_echo_server() -> AsyncIterator[str]:
    """Sends back what it is sent, then closes when its client closes. Its address."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(4096):
                writer.write(data)
        await close(writer)

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def dialled(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        await close(writer)


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def test_everything_arrives_in_order_and_the_end_too() -> None:
    sent = bytes(range(256)) * 2000
    async with an_echo_server() as target, DelayProxy(target, 0.0) as proxy, dialled(proxy.address) as (reader, writer):
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent


async def test_a_round_trip_takes_twice_the_delay() -> None:
    async with an_echo_server() as target, DelayProxy(target, 0.03) as proxy, dialled(proxy.address) as (reader, out):
        begun = time.monotonic()
        out.write(b"ping")
        await reader.readexactly(4)
        assert time.monotonic() - begun >= 0.06


async def test_delays_of_many_messages_do_not_add_up() -> None:
    async with an_echo_server() as target, DelayProxy(target, 0.05) as proxy, dialled(proxy.address) as (reader, out):
        begun = time.monotonic()
        for _ in range(50):
            out.write(b"ping")
            await out.drain()
        await reader.readexactly(200)
        assert time.monotonic() - begun < 50 * 0.1  # one after the other would take this long


async def test_a_target_that_is_gone_closes_the_connection() -> None:
    async with DelayProxy("127.0.0.1:1", 0.0) as proxy, dialled(proxy.address) as (reader, _):
        assert await end_of(reader) == b""


async def test_closing_the_proxy_cuts_its_connections() -> None:
    async with an_echo_server() as target, DelayProxy(target, 0.0) as proxy, dialled(proxy.address) as (reader, writer):
        writer.write(b"ping")
        await reader.readexactly(4)
        await proxy.close()
        assert await end_of(reader) == b""


async def end_of(reader: asyncio.StreamReader) -> bytes:
    """What still comes until the connection ends, one way or the other."""
    with suppress(ConnectionResetError):
        return await reader.read()
    return b""
