"""What health says of a service: whether it takes calls, and whether it can work at all.

Two questions, since they have two remedies. What loads or drains is sent no calls, and is left alone; what cannot work
any more is started anew, which is for whoever started it.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import structlog
from grpc_health.v1 import health, health_pb2

log = structlog.get_logger(__name__)

LIVENESS = "liveness"
"""Health's name for the second question: SERVING from the bind on, also while the service loads and drains."""
CHECK_S = 1.0
"""Between two looks at whether the service can work."""


class Faulty(Protocol):
    """What may break."""

    name: str

    def fault(self) -> str:
        """Why it can do no work until it is started anew; empty = it can."""


class Health:
    """Answers for one service. Lives on the event loop."""

    def __init__(self, service: Faulty) -> None:
        self.servicer = health.aio.HealthServicer()
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
