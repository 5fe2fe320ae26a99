"""A TCP proxy that holds everything back for a while, in each direction: a network round trip on loopback.

    python -m outrider_client.delay_proxy --to 127.0.0.1:50052 --delay-ms 20

Needs no privileges. It delays, it does not throttle: bytes that arrive together leave together. There is no loss, and
the TCP window of a real long link does not show.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from types import TracebackType
from typing import Self

MAX_CHUNK_BYTES = 64 * 1024
MAX_CHUNKS_IN_FLIGHT = 1024
"""Bounds the memory of a connection whose receiver does not read: 64 MiB each way."""


class DelayProxy:
    """Forwards connections to a target, each direction delayed by `delay_s`. Lives in one event loop."""

    def __init__(self, target: str, delay_s: float) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.delay_s = delay_s
        """One way, in seconds. May be changed at any time; holds for what arrives from then on."""
        self.address = ""
        """Where it listens, once started."""
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, listen: str = "127.0.0.1:0") -> str:
        """Listens; returns the address."""
        host, _, port = listen.rpartition(":")
        self._server = await asyncio.start_server(self._accept, host, int(port))
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        return self.address

    async def close(self) -> None:
        """Closes the listener and cuts all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        # A cut connection is an ordinary end; a cancelled handler would be reported as an error by asyncio's server.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._forward(reader, writer)
        self._connections.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target_writer: asyncio.StreamWriter | None = None
        try:
            target_reader, target_writer = await asyncio.open_connection(*self._target)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, target_writer))
                both.create_task(self._pump(target_reader, writer))
        except* OSError:
            pass  # either side went away: so does the other
        finally:
            ends = [end for end in (writer, target_writer) if end is not None]
            for end in ends:
                end.transport.abort()
            await asyncio.gather(*(end.wait_closed() for end in ends), return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, until its sender closes."""
        in_flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS_IN_FLIGHT)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_deliver(in_flight, writer))
            now = asyncio.get_running_loop().time
            while data := await reader.read(MAX_CHUNK_BYTES):
                await in_flight.put((now() + self.delay_s, data))
            await in_flight.put((now() + self.delay_s, b""))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


async def _deliver(in_flight: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    now = asyncio.get_running_loop().time
    while True:
        due, data = await in_flight.get()
        await asyncio.sleep(max(0.0, due - now()))
        if not data:
            writer.write_eof()
            return
        writer.write(data)
        await writer.drain()


async def _run(listen: str, target: str, delay_ms: float) -> None:
    proxy = DelayProxy(target, delay_ms / 1000)
    print("listening", await proxy.start(listen), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Runs a proxy until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m outrider_client.delay_proxy", description="Delays TCP each way.")
    parser.add_argument("--listen", default="127.0.0.1:0", help="HOST:PORT to listen on; port 0 = any free one")
    parser.add_argument("--to", required=True, help="HOST:PORT to forward to")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="delay each way, in milliseconds")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(options.listen, options.to, options.delay_ms))


if __name__ == "__main__":
    main()
