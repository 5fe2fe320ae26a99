"""The asyncio and the blocking client, called alike."""

from __future__ import annotations

import asyncio

from outrider_client import BlockingClient, Client
from outrider_client.generation import Result
from outrider_client.requests import GenerateOptions

PROMPT = "def parse(text):\n    "


async def complete(address: str, kind: str, **options: object) -> Result:
    """A generation by the asyncio or by the blocking client."""
    given = GenerateOptions(**options)  # type: ignore[typeddict-item]
    if kind == "asyncio":
        async with Client(address) as client:
            return await client.complete(PROMPT, **given)

    def complete_blocking() -> Result:
        with BlockingClient(address) as client:
            return client.complete(PROMPT, **given)

    return await asyncio.to_thread(complete_blocking)
