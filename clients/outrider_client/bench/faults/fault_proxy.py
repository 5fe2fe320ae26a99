"""A TCP proxy whose wire can be hurt: it carries nothing, breaks every connection, or changes bytes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from types import TracebackType
from typing import Self

MAX_CHUNK_BYTES = 64 * 1024
GARBAGE_SHARE = 0.2
"""Of the pieces that come in while the wire changes bytes."""


class FaultProxy:
    """Forwards connections to a target. Lives in one event loop."""

    def __init__(self, target: str, seed: int = 0) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._random = random.Random(seed)
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._is_cut = self._is_garbled = False
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.address = ""
        """Where it listens, once started."""

    async def start(self) -> str:
        """Listens; returns the address."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self.address

    def part(self) -> None:
        """Nothing gets through; what is sent arrives when it is healed."""
        self._is_whole.clear()

    def cut(self) -> None:
        """Every connection breaks, and every new one."""
        self._is_cut = True
        for task in self._connections:
            task.cancel()

    def garble(self) -> None:
        """Some of what gets through is changed, either way."""
        self._is_garbled = True

    def heal(self) -> None:
        """All is well from here on; connections that have broken stay so."""
        self._is_cut = self._is_garbled = False
        self._is_whole.set()

    async def close(self) -> None:
        """Closes the listener and cuts all connections."""
        if self._server is not None:
            self._server.close()
        self.cut()
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
        ends = [writer]
        try:
            if self._is_cut:
                return
            target_reader, target_writer = await asyncio.open_connection(*self._target)
            ends.append(target_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, target_writer))
                both.create_task(self._pump(target_reader, writer))
        except* OSError:
            pass  # either side went away: so does the other
        finally:
            for end in ends:
                end.transport.abort()
            await asyncio.gather(*(end.wait_closed() for end in ends), return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, until its sender closes."""
        while data := await reader.read(MAX_CHUNK_BYTES):
            await self._is_whole.wait()
            writer.write(self._garbled(data) if self._is_garbled else data)
            await writer.drain()
        writer.write_eof()

    def _garbled(self, data: bytes) -> bytes:
        if self._random.random() >= GARBAGE_SHARE:
            return data
        changed = bytearray(data)
        changed[self._random.randrange(len(data))] ^= self._random.randrange(1, 256)
        return bytes(changed)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
