"""The health of a service, in two answers: does it take calls, and can it work at all?

There are two answers because there are two remedies. A service that loads or drains is sent no calls, and is left
alone; one that can no longer work is restarted by the process or the cluster that started it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import grpc
import structlog
from grpc_health.v1 import health, health_pb2

log = structlog.get_logger(__name__)

LIVENESS = "liveness"
"""Name of the second answer in health checks: SERVING from the bind on, including loading and draining."""
CHECK_S = 1.0
"""Seconds between two checks that the service can work."""
WATCH_END_DELAY_S = 1.0
"""Seconds for which Watch streams stay open after the server begins to drain, so that NOT_SERVING reaches their
callers."""


class Faulty(Protocol):
    """The part of a service that `Health` needs."""

    name: str
    """Full name of the gRPC service."""

    def fault(self) -> str:
        """Returns why the service cannot work until it is restarted; empty means that it can."""


class EndingWatches(health.aio.HealthServicer):  # type: ignore[misc]  # it has no types
    """Answers health checks, with Watch streams that can be ended.

    Otherwise they last as long as their callers, and a draining server would wait for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._watches: set[asyncio.Task[Any]] = set()
        self._is_over = False

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Streams the status of a service, until `end` is called or the caller hangs up."""
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            await super().Watch(request, context)
        except asyncio.CancelledError:
            # gRPC cancels the same task when the caller hangs up; only our own cancellation is taken back.
            if not self._is_over:
                raise
            task.uncancel()
        finally:
            self._watches.discard(task)

    def end(self) -> None:
        """Ends the Watch streams, with OK."""
        self._is_over = True
        for task in self._watches:
            task.cancel()


class Health:
    """Keeps the health of one service up to date. Lives on the event loop."""

    def __init__(self, service: Faulty) -> None:
        self.servicer = EndingWatches()
        self._service = service
        self._takes_calls = False
        self._fault = ""

    async def set_takes_calls(self, takes_calls: bool) -> None:
        """Sets whether the service takes calls: from when it is loaded until it drains."""
        self._takes_calls = takes_calls
        await self._publish()

    @property
    def is_serving(self) -> bool:
        """True if the service takes calls and can work."""
        return self._takes_calls and not self._fault

    async def drain(self) -> None:
        """Reports that the service takes no more calls, and ends the Watch streams a moment later."""
        await self.set_takes_calls(False)
        asyncio.get_running_loop().call_later(WATCH_END_DELAY_S, self.servicer.end)

    async def watch(self) -> None:
        """Checks every second that the service can work. Never ends by itself."""
        while True:
            fault = self._service.fault()
            if fault != self._fault:
                if fault:
                    log.error("server.unable", reason=fault)
                self._fault = fault
                await self._publish()
            await asyncio.sleep(CHECK_S)

    async def _publish(self) -> None:
        # In gRPC's health protocol the empty name stands for the server as a whole.
        for name in ("", self._service.name):
            await self.servicer.set(name, _status(self.is_serving))
        await self.servicer.set(LIVENESS, _status(not self._fault))


def _status(is_serving: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    return health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
