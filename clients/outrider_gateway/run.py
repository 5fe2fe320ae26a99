"""Runs the gateway: binds, serves, drains.

The first line on stdout is `listening HOST:PORT`. SIGTERM and SIGINT drain: new connections are refused, running
requests may end; a second signal cuts them off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator
from functools import partial
from typing import cast

import structlog
import uvicorn

from outrider.security.certificates import server_tls
from outrider.server.export import ServiceMetrics
from outrider.server.process import announce, freeze_gc, signals
from outrider_gateway.app import make_app
from outrider_gateway.connections import Connection
from outrider_gateway.exchange import Gateway
from outrider_gateway.settings import GatewaySettings
from outrider_gateway.upstream import Upstream

log = structlog.get_logger(__name__)

KEEP_ALIVE_S = 75
"""Time for which a connection without a request stays open, in seconds: longer than clients keep theirs."""
BACKLOG = 1024
TROUBLE_PERIOD_S = 60.0
"""Shortest time between two warnings of one kind about what clients send, in seconds."""


async def serve(settings: GatewaySettings) -> None:
    """Runs the gateway until a signal ends it. Raises SystemExit, which names the flag; UnusableFile."""
    server = GatewayServer(settings)
    announce(f"listening {server.address}")
    if server.metrics.address:
        announce(f"metrics {server.metrics.address}")
    stop = signals()
    freeze_gc()
    serving = asyncio.create_task(server.run())
    try:
        await _first(stop, serving)
        if serving.done():
            await serving
            raise SystemExit("error: the HTTP server has ended by itself")
        stop.clear()  # a second signal sets it again, and cuts the drain short
        log.info("server.draining", timeout_s=settings.drain_timeout_s)
        server.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_first(stop, serving), settings.drain_timeout_s)
        server.cut_off()
        await serving
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await server.close()
        log.info("server.stopped")


class GatewayServer:
    """Listens from the beginning, and serves while `run` runs. Lives on the event loop."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises SystemExit, which names the flag; UnusableFile."""
        tls = server_tls(settings.tls_cert, settings.tls_key, settings.tls_client_ca) if settings.tls_cert else None
        # First, since it fails most often: nothing is open yet that must be closed.
        self._listener = _bind(settings.listen)
        self.gateway = Gateway(settings, Upstream(settings))
        is_draining = self.gateway.is_draining
        self.metrics = ServiceMetrics(
            self.gateway.metrics.read, settings.metrics_listen, lambda: not is_draining.is_set()
        )
        connection = cast(type[asyncio.Protocol], partial(Connection, intake=self.gateway.intake))
        config = uvicorn.Config(
            make_app(self.gateway, self.metrics), http=connection, ws="none", lifespan="off", loop="asyncio",
            log_config=None, access_log=False, proxy_headers=False, server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )  # fmt: skip
        config.load()
        config.ssl = tls
        _log_here()
        # Listens before it prints the address: whoever reads it may connect.
        self._listener.listen(BACKLOG)
        self.address = f"{settings.listen.rpartition(':')[0]}:{self._listener.getsockname()[1]}"
        self._server = _Server(config)

    async def run(self) -> None:
        """Serves until it has drained or is cut off."""
        await self._server.serve([self._listener])

    def drain(self) -> None:
        """Refuses new connections; running requests may end."""
        self.gateway.is_draining.set()
        self._server.should_exit = True

    def cut_off(self) -> None:
        """Breaks all connections."""
        self._server.should_exit = self._server.force_exit = True
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def close(self) -> None:
        """Closes everything. `run` must have ended."""
        self._listener.close()
        # In a thread: it waits up to half a second, and for a scrape that may be under way.
        await asyncio.to_thread(self.metrics.close)
        await self.gateway.upstream.close()


async def _first(stop: asyncio.Event, serving: asyncio.Task[None]) -> None:
    """Returns when a signal has come, or the server has ended."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()


def _bind(listen: str) -> socket.socket:
    """Returns a socket that is bound to HOST:PORT. Raises SystemExit."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise SystemExit(f"error: --listen: cannot bind {listen}: {error.strerror or error}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise SystemExit(f"error: --listen: cannot bind {listen}: {error.strerror or error}") from error
    return bound


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signal handling to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Captures none."""
        yield


class TroubleLog(logging.Handler):
    """Logs uvicorn's warnings as structured lines, each kind now and then: clients should not be able to fill the
    log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._due: dict[str, float] = {}
        """Times from which on a kind of warning is logged again. uvicorn has few kinds."""
        self._num_left_out: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Logs a record, or counts it."""
        kind, now = str(record.msg), self._clock()
        if record.levelno < logging.ERROR and now < self._due.get(kind, 0.0):
            self._num_left_out[kind] += 1
            return
        self._due[kind] = now + TROUBLE_PERIOD_S
        log.warning("http.trouble", reason=record.getMessage(), num_left_out=self._num_left_out.pop(kind, 0))


def _log_here() -> None:
    logger = logging.getLogger("uvicorn")
    logger.handlers, logger.propagate = [TroubleLog()], False
    logger.setLevel(logging.WARNING)
