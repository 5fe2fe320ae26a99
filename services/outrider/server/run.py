"""Runs a service: binds, loads, serves, drains.

The order matters to whoever watches: the ports are bound and announced first (lines on stdout, `listening HOST:PORT`
before all others), Prometheus may read from then on, health says NOT_SERVING while the service loads and while it
drains, and SERVING only in between. SIGTERM and SIGINT drain: callers are sent elsewhere, new calls are refused with
UNAVAILABLE, running ones may end. A second signal cuts them off.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.security.certificates import server_credentials
from outrider.security.credentials import credential_book
from outrider.security.gate import Gate
from outrider.security.watched_files import UnusableFile
from outrider.server.export import ServiceMetrics, start_traces
from outrider.server.health import Health
from outrider.server.malformed import MalformedRequests
from outrider.server.settings import ServiceSettings, Settings, parse_settings
from outrider.telemetry.logs import configure_logs
from outrider.telemetry.metrics import Metrics
from outrider.wire.channels import CHANNEL_OPTIONS

log = structlog.get_logger(__name__)


class CannotLoad(Exception):
    """The service cannot get ready, and trying again would not help. The message names the setting."""


class Service(Protocol):
    """What `serve` runs."""

    name: str
    """Full name of the gRPC service."""

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer to the server. Calls before `load` has ended must be refused with UNAVAILABLE."""

    async def load(self) -> None:
        """Gets ready. May take long; runs on the event loop, so heavy work belongs in a thread. Raises CannotLoad."""

    def metrics(self) -> Metrics:
        """What Prometheus is told now. Called in another thread, between `register` and `close`."""

    def drain(self) -> None:
        """New calls are refused from here on, and calls that would last are ended: their callers go elsewhere. No
        connection takes a new call any more."""

    def fault(self) -> str:
        """Why it can do no work until it is started anew; empty = it can."""

    async def close(self) -> None:
        """Ends everything."""


def freeze_gc() -> None:
    """What was loaded stays: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


async def serve(service: Service, settings: ServiceSettings) -> None:
    """Runs a service until a signal ends it."""
    try:
        gates = _gates(service, settings)
        credentials = _tls(settings)
    except UnusableFile as error:
        raise SystemExit(f"error: {error}") from error
    server = grpc.aio.server(
        interceptors=[*gates, MalformedRequests()],
        options=[
            *CHANNEL_OPTIONS,
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            # Half of the shortest that our own clients keep to.
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            *_connection_age(settings.max_connection_age_s),
        ],
    )
    service.register(server)
    told = Health(service)
    health_pb2_grpc.add_HealthServicer_to_server(told.servicer, server)
    reflection.enable_server_reflection((service.name, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    address = _bind(server, "--listen", settings.listen, credentials)
    health_server, health_address = _health_server(told.servicer, settings.health_listen)
    metrics = ServiceMetrics(service.metrics, settings.metrics_listen, lambda: told.is_serving)
    await told.set_takes_calls(False)
    await server.start()
    print(f"listening {address}", flush=True)
    if health_server is not None:
        await health_server.start()
        print(f"health {health_address}", flush=True)
    if metrics.address:
        print(f"metrics {metrics.address}", flush=True)
    stop = _signals()
    loading = asyncio.create_task(service.load())
    watching = asyncio.create_task(told.watch())
    stopping = asyncio.create_task(stop.wait())
    ended = asyncio.create_task(server.wait_for_termination())
    try:
        await _first_of(ended, loading, stopping)
        if loading.done():
            try:
                await loading
            except (CannotLoad, UnusableFile) as error:
                raise SystemExit(f"error: {error}") from error
            freeze_gc()
            await told.set_takes_calls(True)
            log.info("server.serving", address=address)
            await _first_of(ended, stopping)
            stop.clear()
            await told.drain()
            log.info("server.draining", timeout_s=settings.drain_timeout_s)
            await _drain(service, server, settings.drain_timeout_s, stop.wait)
    finally:
        for task in (stopping, loading, watching):
            task.cancel()
        await server.stop(0)
        # Not cancelled: it waits for what the server itself has to say at its end.
        await asyncio.gather(ended, return_exceptions=True)
        if health_server is not None:
            await health_server.stop(0)
        await asyncio.to_thread(metrics.close)
        await service.close()
        log.info("server.stopped")


async def _first_of(ended: asyncio.Task[bool], *tasks: asyncio.Task[Any]) -> None:
    """Returns when one of the tasks has. Raises SystemExit if the server ends by itself: a process that serves nobody
    should not look alive."""
    await asyncio.wait((ended, *tasks), return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        raise SystemExit("error: the gRPC server has ended by itself") from ended.exception()


def _gates(service: Service, settings: ServiceSettings) -> list[grpc.aio.ServerInterceptor]:
    """What every call passes first. Raises UnusableFile."""
    if not settings.credentials:
        return []
    book = credential_book(settings.credentials, has_client_certificates=bool(settings.tls_client_ca))
    return [Gate(book, service.name)]


def _tls(settings: ServiceSettings) -> grpc.ServerCredentials | None:
    """None = plaintext. Raises UnusableFile."""
    if not settings.tls_cert:
        return None
    return server_credentials(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def _bind(server: grpc.aio.Server, flag: str, listen: str, credentials: grpc.ServerCredentials | None) -> str:
    """The address that it listens on from now on."""
    try:
        port = server.add_insecure_port(listen) if credentials is None else server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise SystemExit(f"error: {flag}: cannot bind {listen}: {error}") from error
    return f"{listen.rpartition(':')[0]}:{port}"


def _health_server(healthcheck: health.aio.HealthServicer, listen: str) -> tuple[grpc.aio.Server | None, str]:
    """A server of health alone, in plaintext, for those who cannot show credentials; None = not wanted."""
    if not listen:
        return None, ""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(healthcheck, server)
    return server, _bind(server, "--health-listen", listen, None)


def _signals() -> asyncio.Event:
    """Set whenever SIGTERM or SIGINT arrives."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    return event


def _connection_age(age_s: float) -> Sequence[tuple[str, Any]]:
    """Options of a server whose callers dial anew after that time; 0 = never. Calls that run then are not cut off."""
    return [("grpc.max_connection_age_ms", max(1, round(1000 * age_s)))] if age_s else []


async def _drain(
    service: Service, server: grpc.aio.Server, grace_s: float, hurry: Callable[[], Awaitable[object]]
) -> None:
    """Stops the server as soon as no call runs, after grace_s at the latest, or when hurried."""
    stopped = asyncio.ensure_future(server.stop(grace_s))
    await asyncio.sleep(0)
    # Whoever loses a call now has heard before that this connection takes no other, and goes elsewhere.
    service.drain()
    hurried = asyncio.ensure_future(hurry())
    await asyncio.wait((stopped, hurried), return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not stopped.done():
        await server.stop(0)
        await stopped


INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def launch(name: str, settings_class: type[Settings], load: Callable[[], Callable[[Settings], Service]]) -> None:
    """Runs a service until a signal ends it. `name` is what its logs and variables call it.

    `load` returns what makes the service, and imports it first: torch takes seconds, and a wrong flag is told before.
    """
    settings = parse_settings(settings_class)
    configure_logs(settings.log_level, settings.log_format, name)
    pin(settings.cores)
    traces = start_traces(f"outrider-{name}", settings)
    try:
        asyncio.run(_serve(load(), settings))
    except KeyboardInterrupt:  # it came too early for the server, which ends in order
        raise SystemExit(INTERRUPTED) from None
    finally:
        if traces is not None:
            traces.stop()


def pin(cores: set[int]) -> None:
    """Runs this process, threads to come included, on these cores only. Empty = anywhere."""
    if cores:
        os.sched_setaffinity(0, cores)


async def _serve(make: Callable[[Settings], Service], settings: Settings) -> None:
    # Channels belong to the loop in which they are made.
    try:
        service = make(settings)
    except UnusableFile as error:
        raise SystemExit(f"error: {error}") from error
    await serve(service, settings)
