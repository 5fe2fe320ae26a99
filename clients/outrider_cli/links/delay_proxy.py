"""A TCP proxy that is as slow as a long link. It loses nothing, and does not imitate the TCP window of a long link."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outrider_cli.links.control import BLACKHOLE, CUT, STATES, UP, LinkReport, controllable
from outrider_cli.links.direction import (
    BadSetting,
    LinkDirection,
    LinkSettings,
    add_settings,
    settings_from,
    settings_of,
)

MAX_CHUNK_BYTES = 64 * 1024
PACKET_BYTES = 1448
"""Bytes that travel together under a rate limit: a chunk of 64 KiB would come out late, and all at once."""
MAX_CHUNKS_IN_FLIGHT = 1024
"""Bounds the memory of a connection whose receiver does not read: 64 MiB in each direction."""
TASK_NAME = "delay-proxy"
"""Name of every task of a connection, so that a process can tell them from its other tasks."""

InFlight = asyncio.Queue[tuple[float, bytes]]


class DelayProxy:
    """Forwards connections to a target over a link, which all of them share. Lives in one event loop."""

    def __init__(self, target: str, settings: LinkSettings | None = None) -> None:
        """Raises BadSetting for settings that a proxy cannot have."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.address = ""
        """The address at which it listens, once started."""
        self._up, self._down = LinkDirection(random.random), LinkDirection(random.random)
        self._settings = LinkSettings()
        self.settings = settings or LinkSettings()
        self._place: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._passes = asyncio.Event()
        self._passes.set()

    @property
    def settings(self) -> LinkSettings:
        """Settings of the link. A change holds for what arrives from then on."""
        return self._settings

    @settings.setter
    def settings(self, settings: LinkSettings) -> None:
        if settings.loss:
            raise BadSetting(f"loss must be 0: what TCP has delivered cannot be lost, got {settings.loss!r}")
        self._settings = settings
        self._up.use(settings, settings.rate_up_mbit)
        self._down.use(settings, settings.rate_down_mbit)

    @property
    def state(self) -> str:
        """One of `control.STATES`."""
        if self._server is None:
            return CUT
        return UP if self._passes.is_set() else BLACKHOLE

    def report(self) -> LinkReport:
        """Returns the settings, the state, and what has crossed the link."""
        return LinkReport(self._settings, self.state, self._up.num_bytes, self._down.num_bytes, 0)

    async def start(self, listen: str = "127.0.0.1:0") -> str:
        """Listens; returns the address. Raises OSError if it is taken."""
        host, _, port = listen.rpartition(":")
        self._place = _bound(host, int(port))
        self.address = f"{host}:{self._place.getsockname()[1]}"
        await self._listen()
        return self.address

    async def close(self) -> None:
        """Closes the listener and cuts all connections."""
        await self.cut()
        if self._place is not None:
            self._place.close()

    async def cut(self) -> None:
        """Drops all connections, with the bytes in flight in them, and refuses new ones."""
        if self._server is not None:
            # Without `wait_closed`, which from Python 3.12 on waits for the connections that are only cancelled below.
            self._server.close()
            self._server = None
        # A copy: a task takes itself out of the set when it ends.
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def blackhole(self) -> None:
        """Lets nothing pass, without a sign of it: connections stay, and what is sent waits for `heal`.

        The kernel still accepts a new connection, which then receives nothing.
        """
        self._passes.clear()

    async def heal(self) -> None:
        """Lets everything pass again: connections that were cut can be opened, what was held back arrives."""
        self._passes.set()
        if self._server is None:
            await self._listen()

    async def change(self, changes: dict[str, Any]) -> None:
        """Changes settings and state: see `control.Link`."""
        changes = dict(changes)
        state = changes.pop("state", self.state)
        if state not in STATES:
            raise BadSetting(f"state must be one of {', '.join(STATES)}, got {state!r}")
        self.settings = settings_from(self._settings, changes)
        if state == self.state:
            return
        # Heal first, from any state: a black hole needs the listener that a cut has closed.
        await self.heal()
        if state == CUT:
            await self.cut()
        elif state == BLACKHOLE:
            self.blackhole()

    async def _listen(self) -> None:
        assert self._place is not None
        # A new socket each time: closing the server closes its socket, while `_place` keeps the address.
        listener = _bound(*self._place.getsockname()[:2])
        self._server = await asyncio.start_server(self._accept, sock=listener)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.set_name(TASK_NAME)
        self._connections.add(task)
        # A cut connection is an ordinary end; a cancelled handler would be reported as an error by asyncio's server.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._forward(reader, writer)
        self._connections.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target_writer: asyncio.StreamWriter | None = None
        try:
            # In a black hole the target does not even hear of a new connection.
            await self._passes.wait()
            target_reader, target_writer = await asyncio.open_connection(*self._target)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, target_writer, self._up), name=TASK_NAME)
                both.create_task(self._pump(target_reader, writer, self._down), name=TASK_NAME)
        except* OSError:
            pass  # one side went away, so the other does, too
        finally:
            ends = [end for end in (writer, target_writer) if end is not None]
            for end in ends:
                # Not `close`, which would first deliver what is buffered: a cut drops it.
                end.transport.abort()
            await asyncio.gather(*(end.wait_closed() for end in ends), return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: LinkDirection) -> None:
        """Forwards one direction of a connection until its sender closes."""
        in_flight: InFlight = asyncio.Queue(MAX_CHUNKS_IN_FLIGHT)
        now = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._deliver(in_flight, writer), name=TASK_NAME)
            is_open = True
            while is_open:
                data = await reader.read(PACKET_BYTES if direction.rate_bits else MAX_CHUNK_BYTES)
                await self._passes.wait()
                # The empty chunk of a sender that closes travels too: the end must not overtake the data.
                is_open, due = bool(data), direction.enter(now(), len(data))
                assert due is not None, "nothing is lost without loss"
                # Waits while the queue is full, so that TCP slows down a sender whose receiver does not read.
                await in_flight.put((due, data))

    async def _deliver(self, in_flight: InFlight, writer: asyncio.StreamWriter) -> None:
        now = asyncio.get_running_loop().time
        while True:
            due, data = await in_flight.get()
            await asyncio.sleep(max(0.0, due - now()))
            # Once more: a black hole holds back what was under way when it began.
            await self._passes.wait()
            if not data:
                # Closes this direction only: the other one may still have an answer under way.
                writer.write_eof()
                return
            writer.write(self._arriving(data))
            await writer.drain()

    def _arriving(self, data: bytes) -> bytes:
        """Returns the bytes that come out of the link for those that went in."""
        return data

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def _bound(host: str, port: int) -> socket.socket:
    """Returns a socket that keeps an address for us without listening: connections to it are refused."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # The socket that keeps the address and the one that listens are bound to it at the same time.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host.strip("[]"), port))
    except OSError:
        bound.close()
        raise
    return bound


async def _run(target: str, settings: LinkSettings, listen: str, control: Path | None) -> None:
    proxy = DelayProxy(target, settings)
    async with contextlib.AsyncExitStack() as exits:
        if control is not None:
            await exits.enter_async_context(controllable(proxy, control))
        try:
            address = await proxy.start(listen)
        except OSError as error:
            raise SystemExit(f"error: --listen: cannot bind {listen}: {error.strerror}") from error
        exits.push_async_callback(proxy.close)
        print("listening", address, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Runs a proxy until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m outrider_cli.links.delay_proxy", description="Makes TCP slow.")
    parser.add_argument("--listen", default="127.0.0.1:0", help="HOST:PORT to listen on; port 0 = any free one")
    parser.add_argument("--to", required=True, help="HOST:PORT to forward to")
    parser.add_argument("--control", type=Path, help="path of a Unix socket to be asked and told over")
    add_settings(parser, without=("loss",))
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(options.to, settings_of(options, parser), options.listen, options.control))


if __name__ == "__main__":
    main()
