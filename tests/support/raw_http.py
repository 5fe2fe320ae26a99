"""HTTP as bytes on a socket: for requests that no client would send."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class RawAnswer:
    """The first answer on a connection."""

    status: int
    """Its status; 0 if there was no answer."""
    fields: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error in its body."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


def post(path: str, *fields: str) -> bytes:
    """The head of a request with a body of JSON."""
    lines = (f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *fields)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def exchanged(address: str, *pieces: bytes) -> RawAnswer:
    """Sends pieces on a connection until the other side stops reading, and returns its answer."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        answering = asyncio.create_task(_answer(reader))
        await _send(writer, pieces, answering)
        async with asyncio.timeout(30):
            return await answering
    finally:
        writer.close()


async def _send(writer: asyncio.StreamWriter, pieces: Sequence[bytes], answering: asyncio.Task[RawAnswer]) -> None:
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            if answering.done():
                return
            writer.write(piece)
            await writer.drain()


async def _answer(reader: asyncio.StreamReader) -> RawAnswer:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return RawAnswer(0, {}, b"")
    line, *lines = head.decode("latin-1").strip().split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
    body = await reader.readexactly(int(fields.get("content-length", 0)))
    return RawAnswer(int(line.split()[1]), fields, body)
