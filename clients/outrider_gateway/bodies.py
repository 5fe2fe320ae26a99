"""Bodies of requests: bytes within their limits of size, time and memory, as JSON objects."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from email.message import Message as Fields
from typing import Any

from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from outrider_gateway.errors import ApiError
from outrider_gateway.intake import BYTE_COST, Holding

BODY_TIMEOUT_S = 30.0
"""Longest time for a body to arrive, in seconds."""
SMALL_BYTES = 64 << 10
"""A body up to this size is read before its caller is checked, and processed on the event loop."""
MAX_PARTS = 100_000
"""Most lists, objects and names of a body. The parser blocks all other requests until it has made the last one: this
many take some 20 ms."""
MAX_NAME_LEN = 1024
"""Longest name of a parameter: unknown names are compared with known ones."""
_PARTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[{:]', re.DOTALL)
"""A string, even an unterminated one; or the beginning of a list or an object, or the end of a name."""


class ClientGone(Exception):
    """The client has closed its connection: no answer can be sent."""


async def read_body(
    scope: Scope,
    receive: Receive,
    holding: Holding,
    max_bytes: int,
    admit: Callable[[], Awaitable[None]],
    timeout_s: float = BODY_TIMEOUT_S,
) -> bytes:
    """Reads the body of a request, whose content type must be JSON.

    Args:
        scope: The request.
        receive: Yields its body.
        holding: Counts its memory.
        max_bytes: Largest size.
        admit: Raises an error for a caller that is not admitted. Awaited before more than SMALL_BYTES are read.
        timeout_s: Longest time until the body is complete, in seconds.

    Raises:
        ApiError: The body is not JSON, too large, or not complete in time, or there is no room for it.
        ClientGone: The client left while it sent the body.
    """
    headers = Headers(scope=scope)
    _check_type(headers.get("content-type", ""))
    told = headers.get("content-length", "")
    if told.isdecimal() and int(told[:20]) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            holding.offer(lambda: deadline.reschedule(0))
            if told.isdecimal() and int(told[:20]) > SMALL_BYTES:
                await admit()
            return await _read(receive, holding, max_bytes, admit)
    except TimeoutError:
        if holding.has_given_way:
            raise no_room() from None
        raise ApiError(408, f"the body must arrive within {timeout_s:g} s", code="request_timeout") from None
    finally:
        holding.keep()


async def _read(receive: Receive, holding: Holding, max_bytes: int, admit: Callable[[], Awaitable[None]]) -> bytes:
    parts, size, is_admitted = [], 0, False
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        holding.set(BYTE_COST * size)
        if holding.has_given_way:
            raise no_room()
        if size > SMALL_BYTES and not is_admitted:
            await admit()
            is_admitted = True
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _check_type(given: str) -> None:
    """Raises ApiError unless a content-type is that of JSON. A page of another origin may send other types, and bodies
    without a type, without a CORS preflight."""
    if not given:
        raise ApiError(415, "content-type must be application/json, and there is none", code="unsupported_media_type")
    fields = Fields()
    fields["content-type"] = given
    kind, charset = fields.get_content_type(), str(fields.get_param("charset", "utf-8")).lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, f"content-type must be application/json, got {given}", code="unsupported_media_type")
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError(415, f"content-type must have no charset but utf-8, got {given}", code="unsupported_media_type")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body must have at most {max_bytes} bytes (--max-body-bytes)", code="request_too_large")


def no_room() -> ApiError:
    """Returns the error for a request for which there is no memory now."""
    message = "the gateway has no room for this request now: others take all of its memory"
    return ApiError(503, message, code="unavailable", headers={"retry-after": "1"})


def num_parts(body: bytes) -> int:
    """Returns the number of lists, objects and names of a body; one above MAX_PARTS means that there are too many."""
    count = 0
    # Not in one call, which would block the event loop.
    for found in _PARTS.finditer(body):
        count += body[found.start()] != 0x22
        if count > MAX_PARTS:
            break
    return count


def parsed(body: bytes) -> dict[str, Any]:
    """Returns the JSON object that a body holds. Raises ApiError."""
    if num_parts(body) > MAX_PARTS:
        raise ApiError(
            413, f"the body must have at most {MAX_PARTS} lists, objects and names together", code="request_too_large"
        )
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body must be JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got a {type(value).__name__}", code="invalid_json")
    if len(longest := max(value, key=len, default="")) > MAX_NAME_LEN:
        message = f"the body must have names of at most {MAX_NAME_LEN} characters, got one of {len(longest)}"
        raise ApiError(400, message, code="invalid_json")
    return value
