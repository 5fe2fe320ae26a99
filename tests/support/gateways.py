"""A gateway inside the test process: real HTTP on loopback, with access to its internals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from outrider_gateway.exchange import Gateway
from outrider_gateway.run import GatewayServer
from outrider_gateway.settings import GatewaySettings
from tests.support.chat_templates import HERMES, model_with_template
from tests.support.services import running_speculator, running_verifier


@dataclass
class RunningGateway:
    """A gateway that serves."""

    address: str
    gateway: Gateway
    server: GatewayServer
    http: httpx.AsyncClient
    """A client of it, without a time limit."""

    async def post(self, path: str, **body: Any) -> httpx.Response:
        """The answer to a request with a JSON body."""
        return await self.http.post(path, json=body)


@asynccontextmanager
async def running_gateway(upstream: str, **settings: Any) -> AsyncIterator[RunningGateway]:
    """A gateway of a verifier, or of several, on a free port."""
    given = {"listen": "127.0.0.1:0", "upstream": upstream, **settings}
    server = GatewayServer(GatewaySettings.model_validate(given))
    serving = asyncio.create_task(server.run())
    try:
        async with httpx.AsyncClient(base_url=f"http://{server.address}", timeout=None) as http:
            yield RunningGateway(server.address, server.gateway, server, http)
    finally:
        server.cut_off()
        await serving
        await server.close()


CALL = '<tool_call>{"name": "now", "arguments": {"zone": "CET"}}</tool_call>'
"""A call of a tool `now`, as the template's model writes it."""
ZONES = {"type": "object", "properties": {"zone": {"enum": ["CET", "UTC"]}}, "required": ["zone"]}
"""The schema of its arguments."""


def named_events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream whose events are named; their data repeat the name."""
    lines = text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    return events


def events_of(text: str) -> list[str]:
    """The data of each event of a stream."""
    return [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")]


@asynccontextmanager
async def running_services() -> AsyncIterator[RunningGateway]:
    """A gateway in front of real services: a verifier whose template knows tools, and a speculator that drafts."""
    async with (
        running_speculator() as speculator,
        running_verifier(speculator=speculator.address, model=model_with_template(HERMES)) as verifier,
        running_gateway(verifier.address) as gateway,
    ):
        yield gateway
