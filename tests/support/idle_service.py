"""A service without methods, served as a real one is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.server.run import serve
from outrider.server.settings import ServiceSettings
from outrider.telemetry.metrics import Metrics

NAME = "outrider.v1.VerifierService"
SETTINGS = ServiceSettings.model_validate({"listen": "127.0.0.1:0"})


class Idle:
    """A service without methods."""

    name = NAME

    def __init__(self) -> None:
        self.server: grpc.aio.Server | None = None

    def register(self, server: grpc.aio.Server) -> None:
        self.server = server

    async def load(self) -> None: ...

    def metrics(self) -> Metrics:
        return ()

    def drain(self) -> None: ...

    def fault(self) -> str:
        return ""

    async def close(self) -> None: ...


async def served(service: Idle, settings: ServiceSettings) -> str:
    """Serves; returns the status or message with which the process would have ended, and "" for a normal end."""
    try:
        await serve(service, settings)
    except SystemExit as error:  # a task that raises it ends the loop
        return str(error)
    return ""


@asynccontextmanager
async def serving(
    service: Idle, capsys: pytest.CaptureFixture[str], settings: ServiceSettings = SETTINGS
) -> AsyncIterator[tuple[str, asyncio.Task[str], str]]:
    """Its address, the task that serves, and the address of its metrics, if it has one."""
    task = asyncio.create_task(served(service, settings))
    said, last = "", "metrics " if settings.metrics_listen else "listening "
    while f"\n{last}" not in f"\n{said}" or not said.endswith("\n"):
        await asyncio.sleep(0.01)
        said += capsys.readouterr().out
    words = dict(line.split(maxsplit=1) for line in said.splitlines())
    yield words["listening"], task, words.get("metrics", "")
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def is_serving(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=NAME)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True, timeout=5)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
