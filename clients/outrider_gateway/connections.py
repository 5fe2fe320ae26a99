"""Connections: incoming bytes are counted before they are parsed, and must come in time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NoReturn, cast

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from outrider_gateway.bodies import BODY_TIMEOUT_S, no_room
from outrider_gateway.errors import ApiError
from outrider_gateway.exchange import ABORT
from outrider_gateway.intake import CONNECTION_BYTES, Intake

HEAD_TIMEOUT_S = 10.0
"""Longest time for the head of a request to arrive, from the connection's start or its first byte on, in seconds."""
LINGER_S = 2.0
"""Time for a client to read why its connection ends, in seconds."""
MAX_HEAD_BYTES = 64 << 10
"""Most bytes of a head, of trailers, and between the parts of a body."""
MAX_FIELDS = 256
"""Most fields of a head: each takes more memory than its bytes."""
MAX_PIPELINED = 16
"""Most requests of a connection that wait for earlier answers."""
PIECE_BYTES = 64 << 10
"""Size of the pieces that are parsed: a head that is too long is noticed at most this many bytes late."""


class _Refused(Exception):
    """Ends the parsing: the request is refused for a reason other than its syntax."""


class Connection(HttpToolsProtocol):
    """A connection with limits on the time and memory of a request: uvicorn alone would wait for a head for ever, and
    keep all of it in memory."""

    def __init__(self, *args: Any, intake: Intake, **options: Any) -> None:
        """Takes uvicorn's arguments. `intake`: counts the memory of all connections."""
        super().__init__(*args, **options)
        self._holding = intake.hold()
        self._deadline: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._served: RequestResponseCycle | None = None
        """The request that is served now, or was served last; others may wait after it."""
        self._is_over = self._is_in_head = self._is_in_target = False
        self._num_steps = 0
        """Heads, pieces of bodies and ends of messages so far."""
        self._num_waiting_bytes = 0
        """Bytes received since the last of these."""
        self._num_field_bytes = 0
        """Bytes of the complete fields of this head."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins the wait for the first request."""
        super().connection_made(transport)
        self._expect(HEAD_TIMEOUT_S)
        self._holding.offer(self._give_way)
        self._holding.set(CONNECTION_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all waiting."""
        self._expect(None)
        self._holding.close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses received bytes, and refuses what becomes too long before it is complete."""
        for begin in range(0, len(data), PIECE_BYTES):
            if self._is_over or self.transport.is_closing():
                return
            piece, step = data[begin : begin + PIECE_BYTES], self._num_steps
            self._is_in_target = False
            super().data_received(piece)
            self._num_waiting_bytes = self._num_waiting_bytes + len(piece) if step == self._num_steps else 0
            if self._num_waiting_bytes > MAX_HEAD_BYTES:
                self._end_with(self._too_long())
        self._holding.set(CONNECTION_BYTES + self._num_waiting_bytes)

    def on_message_begin(self) -> None:
        """Begins the wait for the rest of the head."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(ApiError(400, f"at most {MAX_PIPELINED} requests may wait here", code="invalid_request"))
        self._num_field_bytes, self._is_in_head = 0, True
        self._expect(HEAD_TIMEOUT_S)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Takes a piece of the target, if there is room."""
        self._is_in_target = True
        super().on_url(url)
        if len(self.url) > MAX_HEAD_BYTES:
            self._refuse(self._too_long())

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a field of the head, if there is room. Fields after the body are ignored."""
        self._is_in_target = False
        if not self._is_in_head:
            return
        self._num_field_bytes += len(name) + len(value) + 4
        if self._num_field_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_FIELDS:
            self._refuse(self._too_long())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begins the wait for the body. Its timeout is a little longer than that of the reader, which can thus
        answer itself."""
        self._num_steps, self._is_in_head = self._num_steps + 1, False
        self._check_head()
        self._expect(BODY_TIMEOUT_S + HEAD_TIMEOUT_S)
        self._holding.keep()
        super().on_headers_complete()
        cast(dict[str, Any], self.scope)[ABORT] = self.transport.abort

    def _check_head(self) -> None:
        """Refuses unsupported versions of HTTP, and a head that does not name the server exactly once."""
        version, num_hosts = self.parser.get_http_version(), sum(name == b"host" for name, _ in self.headers)
        if version not in ("1.0", "1.1"):
            self._refuse(ApiError(400, f"HTTP must have version 1.1, got {version}", code="invalid_request"))
        if num_hosts > 1 or (version == "1.1" and not num_hosts):
            self._refuse(ApiError(400, f"host must be there once, got {num_hosts}", code="invalid_request"))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """Takes a piece of the body."""
        self._num_steps += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the wait: the message is complete."""
        self._num_steps += 1
        self._expect(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Goes on with the next request, or waits for one."""
        super().on_response_complete()
        if self._served is None or self._served.response_complete:
            self._holding.offer(self._give_way)

    def send_400_response(self, msg: str) -> None:
        """Answers input that is not HTTP, or was refused during parsing."""
        self._end_with(self._refusal or ApiError(400, "this is no valid request of HTTP", code="invalid_request"))

    def _too_long(self) -> ApiError:
        """Returns the error for input that is too long."""
        if self._is_in_head:
            status, what = (414, "target of a request") if self._is_in_target else (431, "head of a request")
            rule = f"must have at most {MAX_HEAD_BYTES} bytes, and {MAX_FIELDS} fields"
            return ApiError(status, f"the {what} {rule}", code="request_too_large")
        message = f"what stands between the parts of a body, and after it, must have at most {MAX_HEAD_BYTES} bytes"
        return ApiError(431, message, code="request_too_large")

    def _refuse(self, error: ApiError) -> NoReturn:
        """Ends the parsing with an answer: raises into the parser, which then calls `send_400_response`."""
        self._refusal = error
        raise _Refused

    def _give_way(self) -> None:
        """Ends the connection: others need its room."""
        if self._num_waiting_bytes:
            self._end_with(no_room())
        else:
            self.transport.abort()

    def _end_with(self, error: ApiError) -> None:
        """Answers with an error, and ends the connection when its client has had time to read it. In the middle of
        another answer no error can be sent."""
        if self._is_over:
            return
        if (served := self._served) is not None:
            if served.response_started and not served.response_complete:
                self.transport.abort()
                return
            served.disconnected = True  # for the code that still reads the request, or would answer it
            served.message_event.set()
        self._is_over = True
        self.pipeline.clear()
        self.transport.write(_answer(error.status, error.body, error.headers))
        # A client that is still sending would lose the answer if the connection were closed at once.
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._expect(LINGER_S)
        else:
            self.transport.close()

    def _expect(self, timeout_s: float | None) -> None:
        """Aborts the connection after that time, unless called again before. None: nothing is expected."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if timeout_s is None else self.loop.call_later(timeout_s, self.transport.abort)


def _answer(status: int, body: bytes, headers: Mapping[str, str]) -> bytes:
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-content-type-options": "nosniff",
        "connection": "close",
        **headers,
    }
    lines = (f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{''.join(lines)}\r\n".encode() + body
