"""A proxy between two peers that forgets a connection, as a NAT does: it forwards nothing more, and tells nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class ForgetfulProxy:
    """Forwards connections to an address."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._era = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    def lead_to(self, target: str) -> None:
        """Forwards connections to another address from now on."""
        self._host, _, self._port = target.rpartition(":")

    def forget(self) -> None:
        """All current connections."""
        self._era += 1

    async def _connected(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        far_in, far_out = await asyncio.open_connection(self._host, int(self._port))
        for source, sink in ((near_in, far_out), (far_in, near_out)):
            task = asyncio.create_task(self._pump(source, sink, self._era))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, era: int) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(sink):
            while data := await source.read(65536):
                if era == self._era:
                    sink.write(data)


@contextlib.asynccontextmanager
async def forgetful(target: str) -> AsyncIterator[ForgetfulProxy]:
    """A proxy that listens while the block runs."""
    proxy = ForgetfulProxy(target)
    server = await asyncio.start_server(proxy._connected, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        tasks = list(proxy._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
