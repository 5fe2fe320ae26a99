"""What health says of a service: whether it takes calls, and whether it can work at all.

Two questions, since they have two remedies. What loads or drains is sent no calls, and is left alone; what cannot work
any more is started anew, which is for whoever started it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import grpc
import structlog
from grpc_health.v1 import health, health_pb2

log = structlog.get_logger(__name__)

LIVENESS = "liveness"
"""Health's name for the second question: SERVING from the bind on, also while the service loads and drains."""
CHECK_S = 1.0
"""Between two looks at whether the service can work."""
WATCH_END_DELAY_S = 1.0
"""Who watches the health of a server that drains has so long to hear of it."""


class Faulty(Protocol):
    """What may break."""

    name: str

    def fault(self) -> str:
        """Why it can do no work until it is started anew; empty = it can."""


class EndingWatches(health.aio.HealthServicer):  # type: ignore[misc]  # it has no types
    """Health whose Watch streams can be ended: they last as long as their callers, and a server ends with its calls."""

    def __init__(self) -> None:
        super().__init__()
        self._watches: set[asyncio.Task[Any]] = set()
        self._is_over = False

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """As health has it."""
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            await super().Watch(request, context)
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            task.uncancel()
        finally:
            self._watches.discard(task)

    def end(self) -> None:
        """Ends them, with OK."""
        self._is_over = True
        for task in self._watches:
            task.cancel()


class Health:
    """Answers for one service. Lives on the event loop."""

    def __init__(self, service: Faulty) -> None:
        self.servicer = EndingWatches()
        self._service = service
        self._takes_calls = False
        self._fault = ""

    async def set_takes_calls(self, takes_calls: bool) -> None:
        """Whether it is loaded and does not drain."""
        self._takes_calls = takes_calls
        await self._tell()

    @property
    def is_serving(self) -> bool:
        """Whether it takes calls, and can work."""
        return self._takes_calls and not self._fault

    async def drain(self) -> None:
        """The service takes no calls any more. Who watches is told so, and then no more."""
        await self.set_takes_calls(False)
        asyncio.get_running_loop().call_later(WATCH_END_DELAY_S, self.servicer.end)

    async def watch(self) -> None:
        """Asks the service every second whether it can work. Never ends by itself."""
        while True:
            fault = self._service.fault()
            if fault != self._fault:
                if fault:
                    log.error("server.unable", reason=fault)
                self._fault = fault
                await self._tell()
            await asyncio.sleep(CHECK_S)

    async def _tell(self) -> None:
        for name in ("", self._service.name):
            await self.servicer.set(name, _status(self.is_serving))
        await self.servicer.set(LIVENESS, _status(not self._fault))


def _status(is_serving: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    return health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
