"""Runs a service from its settings to its exit: binds, loads, serves, drains.

The order matters to observers. First the ports are bound and announced (lines on stdout: `listening HOST:PORT` is the
first, and later `step: WORDS` lines name the current step). From then on Prometheus may read. Health answers
NOT_SERVING while the service loads and while it drains, and SERVING only in between. SIGTERM and SIGINT drain: callers
are sent elsewhere, new calls are refused with UNAVAILABLE, running ones may end. A second signal cuts them off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.security.certificates import server_credentials
from outrider.security.credentials import credential_book
from outrider.security.gate import Gate
from outrider.security.watched_files import UnusableFile
from outrider.server.export import ServiceMetrics
from outrider.server.health import Health
from outrider.server.malformed import MalformedRequests
from outrider.server.process import announce, freeze_gc, run_process, signals
from outrider.server.settings import ServiceSettings
from outrider.telemetry.metrics import Metrics
from outrider.telemetry.tasks import keep_running
from outrider.wire.channels import CHANNEL_OPTIONS

log = structlog.get_logger(__name__)

FLOOD_OPTIONS: Sequence[tuple[str, Any]] = (
    # Per connection. gRPC counts reset streams until they are cleaned up, and refuses excess ones in its own thread. A
    # gRPC client respects the limit, but does not know that count: 4000 calls at once must pass.
    ("grpc.max_concurrent_streams", 4096),
    # Calls of all connections that the event loop has not taken yet, some 9 kB each. From the first number on gRPC ends
    # calls at random with CANCELLED. Its default is 1000, which one connection, or many honest callers, reach.
    ("grpc.server.max_pending_requests", 32_768),
    ("grpc.server.max_pending_requests_hard_limit", 65_536),
)
"""Options that keep a flood of calls that are begun and reset from ending the calls of others."""

OfService = TypeVar("OfService", bound=ServiceSettings)


class CannotLoad(Exception):
    """The service cannot get ready and ends. The message names the setting."""


class Service(Protocol):
    """The part of a service that `serve` needs."""

    name: str
    """Full name of the gRPC service."""

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer to the server. Calls before `load` has ended must be refused with UNAVAILABLE."""

    async def load(self) -> None:
        """Gets ready. May take long; runs on the event loop, so heavy work belongs in a thread. Raises CannotLoad."""

    def metrics(self) -> Metrics:
        """Yields the current metrics. Called in another thread, between `register` and `close`."""

    def drain(self) -> None:
        """Refuses new calls from now on, and ends long-lived ones: their callers go elsewhere. Called after all
        connections have stopped taking new calls."""

    def fault(self) -> str:
        """Returns why the service cannot work until it is restarted; empty means that it can."""

    async def close(self) -> None:
        """Ends everything."""


def launch(name: str, settings_class: type[OfService], load: Callable[[], Callable[[OfService], Service]]) -> None:
    """Reads the settings from the command line, and runs a gRPC service until a signal ends it.

    Args:
        name: Short name of the service, in its logs and traces.
        settings_class: Its flags and variables.
        load: Imports the service, and returns the function that makes it from its settings.
    """

    def loaded() -> Callable[[OfService], Awaitable[None]]:
        make = load()

        async def make_and_serve(settings: OfService) -> None:
            # Made here, inside the running loop: a channel of grpc.aio belongs to the loop in which it is made.
            await serve(make(settings), settings)

        return make_and_serve

    run_process(name, settings_class, loaded)


async def serve(service: Service, settings: ServiceSettings) -> None:
    """Runs a service until a signal ends it. Raises SystemExit if it cannot be run; the message names the flag."""
    try:
        gates = _gates(service, settings)
        credentials = _tls(settings)
    except UnusableFile as error:
        raise SystemExit(f"error: {error}") from error
    server = _make_server(gates, settings)
    service.register(server)
    service_health = Health(service)
    health_pb2_grpc.add_HealthServicer_to_server(service_health.servicer, server)
    reflection.enable_server_reflection((service.name, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    address = _bind(server, "--listen", settings.listen, credentials)
    health_server, health_address = _health_server(service_health.servicer, settings.health_listen)
    metrics = ServiceMetrics(service.metrics, settings.metrics_listen, lambda: service_health.is_serving)
    # Before the start: the health servicer of grpcio answers SERVING for the whole server until a status is set.
    await service_health.set_takes_calls(False)
    await server.start()
    announce(f"listening {address}")
    if health_server is not None:
        await health_server.start()
        announce(f"health {health_address}")
    if metrics.address:
        announce(f"metrics {metrics.address}")
    stop = signals()
    loading = asyncio.create_task(service.load())
    watching = keep_running("health", service_health.watch)
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
            await service_health.set_takes_calls(True)
            log.info("server.serving", address=address)
            await _first_of(ended, stopping)
            stop.clear()  # a second signal sets it again, and cuts the drain short
            await service_health.drain()
            log.info("server.draining", timeout_s=settings.drain_timeout_s)
            await _drain(service, server, settings.drain_timeout_s, stop.wait)
    finally:
        for task in (stopping, loading, watching):
            task.cancel()
        await server.stop(0)
        # Awaited, not cancelled: if the server has ended by itself, its exception must be retrieved.
        await asyncio.gather(ended, return_exceptions=True)
        if health_server is not None:
            await health_server.stop(0)
        # In a thread: it waits up to half a second, and for a scrape that may be under way.
        await asyncio.to_thread(metrics.close)
        await service.close()
        log.info("server.stopped")


def _gates(service: Service, settings: ServiceSettings) -> list[grpc.aio.ServerInterceptor]:
    """Returns the interceptors that every call passes first. Raises UnusableFile."""
    if not settings.credentials:
        return []
    book = credential_book(settings.credentials, has_client_certificates=bool(settings.tls_client_ca))
    return [Gate(book, service.name)]


def _tls(settings: ServiceSettings) -> grpc.ServerCredentials | None:
    """Returns the server's TLS credentials; None means plaintext. Raises UnusableFile."""
    if not settings.tls_cert:
        return None
    return server_credentials(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def _make_server(gates: Sequence[grpc.aio.ServerInterceptor], settings: ServiceSettings) -> grpc.aio.Server:
    return grpc.aio.server(
        interceptors=[*gates, MalformedRequests()],
        options=[
            *CHANNEL_OPTIONS,
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            # Half of the shortest interval of our own clients. gRPC's default is 5 minutes, and it ends a connection
            # that sends its keepalive more often with "too_many_pings".
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            *FLOOD_OPTIONS,
            *_connection_age(settings.max_connection_age_s),
        ],
    )


def _connection_age(age_s: float) -> Sequence[tuple[str, Any]]:
    """Returns options of a server that closes its connections at that age; 0 means never."""
    # The calls on such a connection are not cut off: gRPC's max_connection_age_grace is unlimited by default.
    return [("grpc.max_connection_age_ms", max(1, round(1000 * age_s)))] if age_s else []


def _bind(server: grpc.aio.Server, flag: str, listen: str, credentials: grpc.ServerCredentials | None) -> str:
    """Binds the server to an address. Returns the address, with the chosen port in place of port 0."""
    try:
        port = server.add_insecure_port(listen) if credentials is None else server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise SystemExit(f"error: {flag}: cannot bind {listen}: {error}") from error
    return f"{listen.rpartition(':')[0]}:{port}"


def _health_server(healthcheck: health.aio.HealthServicer, listen: str) -> tuple[grpc.aio.Server | None, str]:
    """Returns a server of health alone, and its address; None means that the settings name no address.

    It is in plaintext, for probes that have no credentials.
    """
    if not listen:
        return None, ""
    # By default gRPC shares a port on which another process of the same user listens.
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), *FLOOD_OPTIONS])
    health_pb2_grpc.add_HealthServicer_to_server(healthcheck, server)
    return server, _bind(server, "--health-listen", listen, None)


async def _first_of(ended: asyncio.Task[bool], *tasks: asyncio.Task[Any]) -> None:
    """Returns when one of the tasks has ended. Raises SystemExit if the server has ended by itself: a process that
    serves no calls should not look alive."""
    await asyncio.wait((ended, *tasks), return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        raise SystemExit("error: the gRPC server has ended by itself") from ended.exception()


async def _drain(
    service: Service, server: grpc.aio.Server, grace_s: float, hurry: Callable[[], Awaitable[object]]
) -> None:
    """Stops the server when no call runs any more, after `grace_s` at the latest, or when `hurry` returns."""
    stopped = asyncio.ensure_future(server.stop(grace_s))
    # Lets the stop begin, which sends GOAWAY: a caller whose call ends in `drain` must know by then that this
    # connection takes no further calls, so that it goes elsewhere.
    await asyncio.sleep(0)
    service.drain()
    hurried = asyncio.ensure_future(hurry())
    await asyncio.wait((stopped, hurried), return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not stopped.done():
        await server.stop(0)
        await stopped
