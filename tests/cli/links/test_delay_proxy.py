"""The proxy adds latency to a link, limits its bandwidth or cuts it, and changes nothing else."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from outrider_cli.links.control import LinkControl, controllable
from outrider_cli.links.delay_proxy import DelayProxy
from outrider_cli.links.direction import BadSetting, LinkSettings
from outrider_cli.local.process import ManagedProcess


def a_proxy(target: str, **settings: float) -> DelayProxy:
    return DelayProxy(target, LinkSettings(**settings))


@asynccontextmanager
async def an_echo_server() -> AsyncIterator[str]:
    """A server that echoes, and closes when its client closes. Yields its address."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(4096):
                writer.write(data)
        await close(writer)

    async with listening(echo) as address:
        yield address


@asynccontextmanager
async def listening(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]],
) -> AsyncIterator[str]:
    """Runs a server. Yields its address."""
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def dialled(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Opens a connection."""
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
    async with an_echo_server() as target, DelayProxy(target) as proxy, dialled(proxy.address) as (reader, writer):
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent


async def test_a_round_trip_takes_twice_the_delay() -> None:
    async with (
        an_echo_server() as target,
        a_proxy(target, delay_ms=30) as proxy,
        dialled(proxy.address) as (reader, out),
    ):
        begun = time.monotonic()
        out.write(b"ping")
        await reader.readexactly(4)
        assert time.monotonic() - begun >= 0.06


async def test_delays_of_many_messages_do_not_add_up() -> None:
    async with (
        an_echo_server() as target,
        a_proxy(target, delay_ms=50) as proxy,
        dialled(proxy.address) as (reader, out),
    ):
        begun = time.monotonic()
        for _ in range(50):
            out.write(b"ping")
            await out.drain()
        await reader.readexactly(200)
        assert time.monotonic() - begun < 50 * 0.1  # one after the other would take this long


async def test_a_target_that_is_gone_closes_the_connection() -> None:
    async with DelayProxy("127.0.0.1:1") as proxy, dialled(proxy.address) as (reader, _):
        assert await end_of(reader) == b""


async def test_closing_the_proxy_cuts_its_connections() -> None:
    async with an_echo_server() as target, DelayProxy(target) as proxy, dialled(proxy.address) as (reader, writer):
        writer.write(b"ping")
        await reader.readexactly(4)
        await proxy.close()
        assert await end_of(reader) == b""


async def end_of(reader: asyncio.StreamReader) -> bytes:
    """Everything that arrives until the connection ends, in whatever way."""
    with suppress(ConnectionResetError):
        return await reader.read()
    return b""


async def test_jitter_makes_late_and_never_reorders() -> None:
    sent = b"".join(number.to_bytes(2, "big") for number in range(300))
    async with (
        an_echo_server() as target,
        a_proxy(target, jitter_ms=20) as proxy,
        dialled(proxy.address) as (reader, out),
    ):
        for start in range(0, len(sent), 2):
            out.write(sent[start : start + 2])
            await asyncio.sleep(0)  # so that they do not leave together
        assert await reader.readexactly(len(sent)) == sent


@pytest.mark.parametrize("setting", ["rate_up_mbit", "rate_down_mbit"])
async def test_a_rate_holds_bytes_back_in_its_direction(setting: str) -> None:
    size = 25_000  # 0.2 s at a megabit a second
    async with (
        an_echo_server() as target,
        a_proxy(target, **{setting: 1}) as proxy,
        dialled(proxy.address) as (reader, out),
    ):
        begun = time.monotonic()
        out.write(bytes(size))
        assert await reader.readexactly(size) == bytes(size)
        assert time.monotonic() - begun >= 0.19


async def test_two_connections_share_the_rate() -> None:
    size = 12_500
    async with (
        an_echo_server() as target,
        a_proxy(target, rate_up_mbit=1) as proxy,
        dialled(proxy.address) as (reader, out),
        dialled(proxy.address) as (other_reader, other_out),
    ):
        begun = time.monotonic()
        out.write(bytes(size))
        other_out.write(bytes(size))
        await asyncio.gather(reader.readexactly(size), other_reader.readexactly(size))
        assert time.monotonic() - begun >= 0.19


async def test_bytes_are_counted_in_each_direction() -> None:
    async with a_greeter() as target, DelayProxy(target) as proxy, dialled(proxy.address) as (reader, out):
        out.write(b"four")
        assert await reader.readexactly(10) == b"ten bytes!"
        report = proxy.report()
        assert (report.bytes_up, report.bytes_down, report.num_bytes, report.num_lost) == (4, 10, 14, 0)


async def test_a_cut_drops_connections_and_refuses_new_ones_until_it_heals() -> None:
    async with an_echo_server() as target, DelayProxy(target) as proxy:
        async with dialled(proxy.address) as (reader, out):
            await echoed(reader, out)
            await proxy.cut()
            assert proxy.state == "cut"
            assert await end_of(reader) == b""
        for _ in range(3):
            with pytest.raises(ConnectionRefusedError):
                async with dialled(proxy.address):
                    pass
        await proxy.heal()
        async with dialled(proxy.address) as (reader, out):
            await echoed(reader, out)


async def test_nobody_else_can_take_the_address_while_it_is_cut() -> None:
    async with DelayProxy("127.0.0.1:1") as proxy:
        await proxy.cut()
        host, _, port = proxy.address.rpartition(":")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))


async def test_what_is_sent_into_a_black_hole_arrives_when_it_heals() -> None:
    async with an_echo_server() as target, DelayProxy(target) as proxy, dialled(proxy.address) as (reader, out):
        await echoed(reader, out)
        proxy.blackhole()
        assert proxy.state == "blackhole"
        out.write(b"hello")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.1)
        await proxy.heal()
        assert await reader.readexactly(5) == b"hello"


async def test_who_dials_into_a_black_hole_hears_something_once_it_has_healed() -> None:
    async with an_echo_server() as target, DelayProxy(target) as proxy:
        proxy.blackhole()
        async with dialled(proxy.address) as (reader, out):
            out.write(b"hello")
            await proxy.heal()
            assert await reader.readexactly(5) == b"hello"


async def test_a_black_hole_that_is_cut_and_heals_passes_again() -> None:
    async with an_echo_server() as target, DelayProxy(target) as proxy:
        proxy.blackhole()
        await proxy.cut()
        await proxy.heal()
        async with dialled(proxy.address) as (reader, out):
            await echoed(reader, out)


async def test_tcp_loses_nothing_and_who_wants_it_to_is_told() -> None:
    with pytest.raises(BadSetting, match=r"^loss must be 0"):
        a_proxy("127.0.0.1:1", loss=0.1)


async def test_a_link_is_asked_and_told_over_its_socket(tmp_path: Path) -> None:
    control = LinkControl(tmp_path / "link")

    async def changed(**changes: object) -> object:
        return await asyncio.to_thread(lambda: control.change(**changes))

    async with DelayProxy("127.0.0.1:1") as proxy, controllable(proxy, control.path):
        assert await asyncio.to_thread(control.report) == proxy.report()
        await changed(delay_ms=7, rate_up_mbit=2)
        assert proxy.settings == LinkSettings(delay_ms=7, rate_up_mbit=2)
        for state in ("blackhole", "cut", "up"):
            await changed(state=state)
            assert proxy.state == state
        assert proxy.settings.delay_ms == 7
        for changes, message in (({"delay_ms": -1}, "delay_ms must be"), ({"state": "odd"}, "state must be one of")):
            with pytest.raises(BadSetting, match=message):
                await changed(**changes)
        assert proxy.settings.delay_ms == 7


async def test_a_refused_change_changes_nothing() -> None:
    async with a_proxy("127.0.0.1:1", delay_ms=1) as proxy:
        with pytest.raises(BadSetting):
            await proxy.change({"state": "cut", "delay_ms": "soon"})
        assert (proxy.state, proxy.settings) == ("up", LinkSettings(delay_ms=1))


@pytest.mark.slow
def test_the_proxy_as_a_process_is_as_its_flags_say(tmp_path: Path) -> None:
    control = LinkControl(tmp_path / "link")
    flags = ["--to", "127.0.0.1:1", "--control", str(control.path)]
    flags += ["--delay-ms", "20", "--jitter-ms", "2", "--rate-up-mbit", "1", "--rate-down-mbit", "20"]
    proxy = ManagedProcess("proxy", "outrider_cli.links.delay_proxy", flags, tmp_path / "log", listen="127.0.0.1:0")
    try:
        proxy.start()
        assert control.report().settings == LinkSettings(20, 2, 1, 20)
    finally:
        proxy.stop()
    with pytest.raises(OSError, match=r"No such file|refused"):
        control.report()


@pytest.mark.slow
def test_a_wrong_flag_of_the_proxy_is_named() -> None:
    command = [sys.executable, "-m", "outrider_cli.links.delay_proxy", "--to", "127.0.0.1:1", "--jitter-ms", "-2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "--jitter-ms must be >= 0, a number, got -2.0" in done.stderr


@asynccontextmanager
async def a_greeter() -> AsyncIterator[str]:
    """A server that answers everything with ten bytes. Yields its address."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            if await reader.read(4096):
                writer.write(b"ten bytes!")
        await close(writer)

    async with listening(greet) as address:
        yield address


async def echoed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"ping")
    assert await reader.readexactly(4) == b"ping"
