"""Health has two answers: whether a service accepts calls, and whether it can work at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.server import health
from outrider.server.health import LIVENESS, Health

Status = health_pb2.HealthCheckResponse
NAME = "a.Service"


class Service:
    """A part that may break."""

    name = NAME

    def __init__(self) -> None:
        self.reason = ""

    def fault(self) -> str:
        return self.reason


@asynccontextmanager
async def watched(service_health: Health) -> AsyncIterator[health_pb2_grpc.HealthAsyncStub]:
    """The service is checked continually, and also when it is asked."""
    watching = asyncio.create_task(service_health.watch())
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(service_health.servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield health_pb2_grpc.HealthStub(channel)
    watching.cancel()
    await server.stop(0)


async def answers(stub: health_pb2_grpc.HealthAsyncStub) -> tuple[bool, bool, bool]:
    """True for each of the server, the service and liveness if it is SERVING."""
    checks = [stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in ("", NAME, LIVENESS)]
    server, service, liveness = [(await check).status == Status.SERVING for check in checks]
    return server, service, liveness


async def test_who_loads_or_drains_takes_no_calls_and_is_alive() -> None:
    service_health = Health(Service())
    await service_health.set_takes_calls(False)
    async with watched(service_health) as stub:
        assert await answers(stub) == (False, False, True)
        await service_health.set_takes_calls(True)
        assert await answers(stub) == (True, True, True)
        await service_health.set_takes_calls(False)
        assert await answers(stub) == (False, False, True)


async def test_who_watches_is_told_that_a_service_drains_and_does_not_keep_it_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "WATCH_END_DELAY_S", 0.1)
    service_health = Health(Service())
    await service_health.set_takes_calls(True)
    async with watched(service_health) as stub:
        ready, alive = (stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in (NAME, LIVENESS))
        assert [(await watch.read()).status for watch in (ready, alive)] == [Status.SERVING] * 2
        await service_health.drain()
        assert (await ready.read()).status == Status.NOT_SERVING
        for watch in (ready, alive):
            assert await watch.read() is grpc.aio.EOF
            assert await watch.code() == grpc.StatusCode.OK


async def test_who_cannot_work_any_more_is_neither_ready_nor_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CHECK_S", 0.001)
    service = Service()
    service_health = Health(service)
    await service_health.set_takes_calls(True)
    async with watched(service_health) as stub:
        liveness = stub.Watch(health_pb2.HealthCheckRequest(service=LIVENESS))
        assert (await liveness.read()).status == Status.SERVING
        service.reason = "broken"
        assert (await liveness.read()).status == Status.NOT_SERVING
        assert await answers(stub) == (False, False, False)
        await service_health.set_takes_calls(True)
        assert await answers(stub) == (False, False, False)
        service.reason = ""
        assert (await liveness.read()).status == Status.SERVING
        assert await answers(stub) == (True, True, True)
        liveness.cancel()
