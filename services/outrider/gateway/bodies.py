"""Bodies of requests: bytes within their limits of size and time, as JSON objects."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from outrider.gateway.errors import ApiError

BODY_TIMEOUT_S = 30.0
"""Longest time for a body to arrive, in seconds."""


class ClientGone(Exception):
    """The client has closed its connection: nobody is there to be answered."""


async def json_object(
    scope: Scope, receive: Receive, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S
) -> dict[str, Any]:
    """Reads the body of a request, a JSON object.

    Raises:
        ApiError: It is none, or larger than `max_bytes`, or not there within `timeout_s`.
        ClientGone: The client has gone while it sent it.
    """
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    # A page of another origin may send forms and plain text without asking first: they are no requests here.
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"content-type must be application/json, got {kind}", code="unsupported_media_type")
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(receive, headers, max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body must arrive within {timeout_s:g} s", code="request_timeout") from None
    return parsed(body)


async def _read(receive: Receive, headers: Headers, max_bytes: int) -> bytes:
    told = headers.get("content-length", "")
    if told.isdecimal() and int(told) > max_bytes:
        raise _too_large(max_bytes)
    parts, size = [], 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body must have at most {max_bytes} bytes (--max-body-bytes)", code="request_too_large")


def parsed(body: bytes) -> dict[str, Any]:
    """Returns the JSON object that a body holds. Raises ApiError."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body must be UTF-8, and is not at byte {error.start}", code="invalid_json") from None
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ApiError(400, "the body must not be nested so deeply", code="invalid_json") from None
    except ValueError as error:  # also a number of thousands of digits
        raise ApiError(400, f"the body must be JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got a {type(value).__name__}", code="invalid_json")
    _check_surrogates(text, value)
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _check_surrogates(text: str, value: object) -> None:
    """Raises ApiError if an escape sequence in the text is half of a character, which no UTF-8 can hold."""
    if "\\ud" not in text and "\\uD" not in text:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body has half of a surrogate pair, which is no text", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body must not be nested so deeply", code="invalid_json") from None
