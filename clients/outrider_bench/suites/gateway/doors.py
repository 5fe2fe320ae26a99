"""The doors of a verifier: gRPC with the SDK, and HTTP through a gateway. Both are asked for the same texts.

The client of HTTP only reads bytes and notes when they come. What they say is looked at when the stream has ended, so
that it takes no more of the machine than it must.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from outrider_bench.drivers import GenerationFailed
from outrider_client.client import Client
from outrider_client.errors import OutriderError

GRPC, HTTP = "gRPC", "HTTP"
_EVENT = re.compile(rb"^data: (.*)$", re.MULTILINE)
_CHUNK_SIZE = re.compile(rb"^[0-9a-fA-F]+\r\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds what came of one generation."""

    num_tokens: int
    num_events: int
    """Chunks over gRPC, events over HTTP."""
    first_s: float
    """Time from the request to its first text."""
    text: str


class Door(Protocol):
    """A `Door` is a way to ask for a text."""

    async def generate(self, options: Mapping[str, Any]) -> Sample:
        """Generates to the end. The options are those of a completion, by OpenAI's names. Raises GenerationFailed."""


class GrpcDoor:
    """Asks the verifier itself, as an application with the SDK does."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def generate(self, options: Mapping[str, Any]) -> Sample:
        """See Door."""
        now = asyncio.get_running_loop().time
        given = dict(options)
        prompt = given.pop("prompt")
        given |= given.pop("speculation", {})
        started, first_s, num_events = now(), 0.0, 0
        try:
            async with self._client.generate(prompt, resume=False, **given) as generation:
                async for chunk in generation:
                    num_events += 1
                    if not first_s and chunk.text:
                        first_s = now() - started
        except OutriderError as error:
            raise GenerationFailed(f"{error.code.name}: {error.message}") from None
        return Sample(generation.result.num_output_tokens, num_events, first_s, generation.result.text)


class HttpDoor:
    """Asks the gateway for a completion, as a stream."""

    def __init__(self, address: str) -> None:
        """`address`: HOST:PORT."""
        self._address = address

    async def generate(self, options: Mapping[str, Any]) -> Sample:
        """See Door."""
        now = asyncio.get_running_loop().time
        started, first_s, parts = now(), 0.0, []
        reader, writer = await self.open(options)
        try:
            while part := await reader.read(1 << 16):
                # The first event is text: a completion has none before it.
                if not first_s and b"data: " in part:
                    first_s = now() - started
                parts.append(part)
        finally:
            writer.close()
        return sample_of(b"".join(parts), first_s)

    async def open(self, options: Mapping[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Sends a request on a connection of its own, and returns that."""
        body = json.dumps({**options, "stream": True, "stream_options": {"include_usage": True}}).encode()
        host, _, port = self._address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._address}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        return reader, writer


def sample_of(answer: bytes, first_s: float) -> Sample:
    """Reads a whole answer: its head, and the events of its body. Raises GenerationFailed."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].decode()
    if " 200 " not in f"{status} ":
        raise GenerationFailed(f"{status}: {body[:200].decode(errors='replace')}")
    if b"chunked" in head.lower():
        body = _CHUNK_SIZE.sub(b"", body).replace(b"\r\n", b"")
    texts, num_tokens, num_events = [], None, 0
    for data in _EVENT.findall(body):
        num_events += 1
        if data == b"[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise GenerationFailed(str(event["error"]["message"]))
        texts += [choice["text"] for choice in event["choices"]]
        if event.get("usage"):
            num_tokens = event["usage"]["completion_tokens"]
    if num_tokens is None:
        raise GenerationFailed("the stream ended without usage")
    return Sample(num_tokens, num_events, first_s, "".join(texts))
