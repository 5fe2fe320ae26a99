"""One request of HTTP and its answer, with what the gateway has for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from outrider.gateway.answers import Answer
from outrider.gateway.asks import Ask
from outrider.gateway.bodies import json_object
from outrider.gateway.errors import from_upstream
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.outputs import Outputs, unless_gone
from outrider.gateway.settings import GatewaySettings
from outrider.gateway.streams import EventStream, answer
from outrider.gateway.upstream import Upstream, caller_token
from outrider_client.client import Client
from outrider_client.errors import OutriderError

REQUEST_ID = "x-request-id"


@dataclass(frozen=True)
class Gateway:
    """Holds what all requests share."""

    settings: GatewaySettings
    upstream: Upstream
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    is_draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the gateway is to end: what lasts without end ends then."""


class Exchange:
    """Holds a request, and answers it."""

    def __init__(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        self.gateway, self.scope, self.receive, self.send = gateway, scope, receive, send
        self.headers = Headers(scope=scope)
        self.upstream, self.metrics, self.settings = gateway.upstream, gateway.metrics, gateway.settings
        self.tool_call_format: str = gateway.settings.tool_call_format

    @property
    def token(self) -> str:
        """The caller's token; empty if it has none. Raises ApiError."""
        return caller_token(self.headers)

    def client(self) -> Client:
        """Returns a client that calls with the caller's token. Raises ApiError."""
        return self.upstream.for_caller(self.token)

    async def json(self) -> dict[str, Any]:
        """Returns the body. Raises ApiError, ClientGone."""
        return await json_object(self.scope, self.receive, self.settings.max_body_bytes)

    async def answer(self, value: object, status: int = 200) -> None:
        """Answers with JSON."""
        await answer(self.send, status, value)

    async def generate(self, ask: Ask, kind: Callable[..., Answer], asked_model: str | None) -> None:
        """Generates what is asked for and answers with it. Raises ApiError, OutriderError, ClientGone."""
        client = self.client()
        async with Outputs(client, ask) as outputs:
            try:
                made = await unless_gone(self.receive, self._begin(client, ask, outputs, kind, asked_model))
                headers = {REQUEST_ID: outputs.session_id}
                if ask.stream is not None:
                    stream = EventStream(self.receive, self.send, self.settings.stall_timeout_s, made.ping)
                    with self.metrics.stream():
                        await stream.run(headers, lambda: made.stream(outputs, stream), made.failed, ask.names)
                else:
                    with self.metrics.running():
                        whole = await unless_gone(self.receive, made.whole(outputs))
                    await answer(self.send, 200, whole, headers)
            except OutriderError as error:
                raise from_upstream(error, ask.names) from error
            finally:
                self.metrics.count(outputs.generations)

    async def _begin(
        self, client: Client, ask: Ask, outputs: Outputs, kind: Callable[..., Answer], asked_model: str | None
    ) -> Answer:
        model = await self.upstream.served_model(asked_model, self.token)
        await outputs.start()
        num_predicted = len(await client.tokenize(ask.prediction)) if ask.prediction else None
        return kind(self.upstream, ask, model, outputs.session_id, num_predicted)
