"""Streams of server-sent events: how they begin, stay alive and end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from json.encoder import encode_basestring
from typing import Any

import structlog
from starlette.types import Receive, Send

from outrider_client.errors import OutriderError
from outrider_gateway.errors import ApiError, FieldNames, from_upstream
from outrider_gateway.outputs import unless_gone

log = structlog.get_logger(__name__)

PING_S = 10.0
"""Longest silence of a stream, in seconds: proxies may end a silent connection."""
TICK_S = 1.0
"""Time between two checks of a stream, in seconds."""
DONE = b"data: [DONE]\n\n"
NO_STORE = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "x-accel-buffering": "no",
    # Not `no-store`: Chromium reports such a stream as aborted (net::ERR_ABORTED), though a script has read it to the
    # end.
    "cache-control": "private, no-cache",
    "x-content-type-options": "nosniff",
}


class EventStream:
    """Writes the events of one answer. Ends when its client leaves, or reads nothing for too long."""

    def __init__(self, receive: Receive, send: Send, stall_timeout_s: float, ping: bytes) -> None:
        """`ping`: sent when the stream has been silent."""
        self._receive, self._send, self._stall_timeout_s, self._ping = receive, send, stall_timeout_s, ping
        self._time = asyncio.get_running_loop().time
        self._sending_since: float | None = None
        self._sent_at = self._time()

    async def run(
        self,
        headers: Mapping[str, str],
        work: Callable[[], Awaitable[None]],
        failed: Callable[[ApiError], bytes],
        names: FieldNames,
    ) -> None:
        """Sends the head, and what `work` sends; if `work` fails, also the events that `failed` returns for the error.
        Raises ClientGone."""
        fields = [(name.encode(), value.encode()) for name, value in {**STREAM_HEADERS, **headers}.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": fields})
        await unless_gone(self._receive, self._told(work, failed, names), self._watch())
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send(self, event: bytes) -> None:
        """Sends an event, which includes its empty line."""
        self._sending_since = self._sent_at = self._time()
        await self._send({"type": "http.response.body", "body": event, "more_body": True})
        self._sending_since = None

    async def _told(
        self, work: Callable[[], Awaitable[None]], failed: Callable[[ApiError], bytes], names: FieldNames
    ) -> None:
        try:
            await work()
        except OutriderError as error:
            await self.send(failed(from_upstream(error, names)))
        except ApiError as error:
            await self.send(failed(error))
        except Exception:
            log.exception("gateway.failed")
            await self.send(failed(ApiError(500, "the gateway has failed: its log says how", code="internal_error")))

    async def _watch(self) -> None:
        """Sends pings while the stream is silent. Returns if the client has taken nothing for too long."""
        while True:
            await asyncio.sleep(min(TICK_S, self._stall_timeout_s / 2))
            now = self._time()
            if self._sending_since is not None:
                if now - self._sending_since >= self._stall_timeout_s:
                    return
            elif now - self._sent_at >= PING_S:
                await self.send(self._ping)


def event_of(value: Mapping[str, Any], name: str = "") -> bytes:
    """Returns an event whose data is JSON. `name`: its kind, for clients that want one besides the data."""
    kind = f"event: {name}\n".encode() if name else b""
    return kind + b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class TextEvents:
    """Makes the events that have only a piece of text. The rest is encoded once, as a stream has thousands of
    events."""

    def __init__(
        self, base: Mapping[str, Any], choice: Callable[[int, str], Mapping[str, Any]], num_choices: int
    ) -> None:
        """
        Args:
            base: Fields of all events.
            choice: Returns the choice of a text, given its number and a piece of it.
            num_choices: Number of texts.
        """
        parts = [
            event_of({**base, "choices": [choice(index, _PLACE)]}).split(_PLACE_JSON) for index in range(num_choices)
        ]
        self._parts = [(before, after) for before, after in parts]

    def event(self, index: int, piece: str) -> bytes:
        """Returns the event of a piece of a text."""
        before, after = self._parts[index]
        return before + encode_basestring(piece).encode() + after


_PLACE = "\0piece\0"
_PLACE_JSON = json.dumps(_PLACE).encode()


async def answer(send: Send, status: int, value: object, headers: Mapping[str, str] | None = None) -> None:
    """Sends a whole answer as JSON; bytes are taken as JSON."""
    if not isinstance(value, bytes):
        # A model may write half of a surrogate pair, which UTF-8 cannot hold.
        value = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    told = {"content-type": "application/json", "content-length": str(len(value)), **NO_STORE, **(headers or {})}
    fields = [(name.encode(), text.encode("latin-1", "replace")) for name, text in told.items()]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": value, "more_body": False})
