"""One HTTP request and its answer, with access to the gateway's shared state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from outrider.server.lanes import Lane
from outrider.wire.errors import ResourceExhausted
from outrider_client.client import Client
from outrider_gateway import leniency
from outrider_gateway.bodies import SMALL_BYTES, no_room, num_parts, parsed, read_body
from outrider_gateway.intake import BYTE_COST, PART_COST, Holding, Intake
from outrider_gateway.metrics import GatewayMetrics
from outrider_gateway.parameters import Parameters, checked
from outrider_gateway.settings import GatewaySettings
from outrider_gateway.streams import answer
from outrider_gateway.tools.calls import ToolCallFormat
from outrider_gateway.upstream import Upstream, caller_token

REQUEST_ID = "x-request-id"
ABORT = "outrider.abort"
"""Key of a request's scope: breaks its connection."""

_P = TypeVar("_P", bound=Parameters)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Gateway:
    """Holds what all requests share."""

    settings: GatewaySettings
    upstream: Upstream
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    is_draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the gateway should end: endless streams end then."""
    large: Lane = field(default_factory=lambda: Lane("large requests", 1))
    """Processes large bodies, one after the other: Python would not run two in parallel."""

    @cached_property
    def intake(self) -> Intake:
        """Counts the memory of all requests."""
        return Intake(self.settings.max_body_bytes)


class Exchange:
    """Holds a request, and answers it."""

    def __init__(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send, holding: Holding) -> None:
        """`holding`: counts its memory until it is answered."""
        self._holding, self._is_large = holding, False
        self.gateway, self.scope, self.receive, self.send = gateway, scope, receive, send
        self.headers = Headers(scope=scope)
        self.upstream, self.metrics, self.settings = gateway.upstream, gateway.metrics, gateway.settings
        self.left_aside: list[str] = []
        """Names of the ignored parameters (--lenient)."""

    @property
    def token(self) -> str:
        """The caller's token; empty if it has none. Raises ApiError."""
        return caller_token(self.headers)

    def client(self) -> Client:
        """Returns a client that calls with the caller's token. Raises ApiError."""
        return self.upstream.for_caller(self.token)

    async def body(self) -> dict[str, Any]:
        """Returns the body, a JSON object. Raises ApiError, OutriderError, ClientGone."""
        body = await read_body(self.scope, self.receive, self._holding, self.settings.max_body_bytes, self._admit)
        size, self._is_large = len(body), len(body) > SMALL_BYTES
        values, count = await self.heavy(lambda: (parsed(body), num_parts(body)))
        self._holding.offer()
        self._holding.set(BYTE_COST * size + PART_COST * count)
        self._holding.keep()
        if self._holding.has_given_way:
            raise no_room()
        return values

    async def heavy(self, work: Callable[[], _T]) -> _T:
        """Calls `work`, in a thread if the body is large, and returns or raises what it does. Raises ApiError if too
        many large bodies wait."""
        if not self._is_large:
            return work()
        try:
            return await self.gateway.large.run(work, self.token or str(self.scope["client"]), self._holding.num_bytes)
        except ResourceExhausted:
            raise no_room() from None

    async def _admit(self) -> None:
        await self.upstream.admit(self.token)

    async def tool_call_format(self, tools: object) -> ToolCallFormat:
        """Returns how the model writes calls of a request's tools. Raises ApiError, OutriderError."""
        # Without tools the format is not needed, and the verifier is not asked.
        return await self.upstream.tool_call_format(self.token) if tools else ToolCallFormat.AUTO

    async def parameters(self, kind: type[_P]) -> _P:
        """Returns the body as a request of this type. Raises ApiError, OutriderError, ClientGone."""
        values = await self.body()
        if self.settings.lenient:
            # A request with variables for the template needs the verifier anyway.
            template = (await self.upstream.model(self.token)).chat_template if "chat_template_kwargs" in values else ""
            values, self.left_aside = leniency.without_effect(kind, values, template)
            self.metrics.left_aside.add(self.left_aside)
        return await self.heavy(partial(checked, kind, values))

    async def answer(self, value: object, status: int = 200) -> None:
        """Answers with JSON."""
        await answer(self.send, status, value)
