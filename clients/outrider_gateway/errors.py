"""Errors of the HTTP API, in OpenAI's envelope: `{"error": {"message", "type", "param", "code"}}`, or in Anthropic's.

An error of the verifier keeps its message; the field is named as in the request.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from outrider.wire.errors import shortened
from outrider_client.errors import InvalidArgument, OutriderError, ResourceExhausted, Unavailable
from outrider_gateway.tools.grammar import UnheldCalls


class ApiError(Exception):
    """An error with which a request is answered."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            status: The status of HTTP.
            message: The problem, for people: the field, the rule and the value.
            code: A short name of the error, for programs.
            param: The field of the request, if the error is about one.
            headers: More headers of the answer.
        """
        super().__init__(message)
        # Both may quote a request.
        self.message, self.param = shortened(message), None if param is None else shortened(param)
        self.status, self.code = status, code
        self.headers = dict(headers or {})

    @property
    def envelope(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def body(self) -> bytes:
        """The body of the answer as JSON."""
        return json.dumps(self.envelope).encode()

    def anthropic_envelope(self, request_id: str) -> dict[str, Any]:
        """Returns the body of the answer as Anthropic's clients read it."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    **_TYPES,
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


def invalid(param: str, rule: str, *, code: str = "invalid_value") -> ApiError:
    """Returns the error of a field. `rule` is the rest of the sentence: "must be a number, got ..."."""
    return ApiError(400, f"{param} {rule}", code=code, param=param)


def shown(value: object) -> str:
    """Returns a value for a message: as JSON, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return "what is nested deeply"
    return text if len(text) <= 80 else f"{text[:77]}..."


_STATUSES: dict[grpc.StatusCode, tuple[int, str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_value"),
    # Not 409, which OpenAI's clients retry.
    grpc.StatusCode.FAILED_PRECONDITION: (400, "failed_precondition"),
    grpc.StatusCode.OUT_OF_RANGE: (400, "context_length_exceeded"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "invalid_api_key"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_denied"),
    grpc.StatusCode.NOT_FOUND: (404, "not_found"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_exceeded"),
    grpc.StatusCode.UNIMPLEMENTED: (501, "unimplemented"),
    grpc.StatusCode.UNAVAILABLE: (503, "unavailable"),
    grpc.StatusCode.CANCELLED: (503, "unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "timeout"),
}
"""HTTP status and code by gRPC status. All others are failures of the server: 500."""

DEFAULT_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Maps fields of the protocol, and options of the SDK, to their names in a request."""

    renamed: Sequence[tuple[str, str]] = ()
    """Prefixes of names, and their replacements. The first that fits counts."""

    def of(self, field: str) -> str:
        """Returns the request's name of a field: `messages[2].content` for `prompt.chat.messages[2].content`."""
        for begin, ours in (*self.renamed, *_RENAMED):
            if field == begin or (field.startswith(begin) and (field[len(begin)] in ".[" or begin[-1] == ".")):
                return ours + field[len(begin) :]
        return field


_RENAMED = (
    ("prompt.chat.", ""),
    ("prompt.text", "prompt"),
    ("prompt.token_ids", "prompt"),
    ("speculation.retrieval_params.scope", "speculation.retrieval_scope"),
    ("speculation.retrieval_params.remote", "speculation.retrieval_remote"),
    ("speculation.retrieval_params.", "speculation."),
    ("sampling.", ""),
    ("report.", ""),
)
NAMES = FieldNames()
"""Names for a request that renames nothing."""


def from_upstream(error: OutriderError, names: FieldNames = NAMES) -> ApiError:
    """Returns the HTTP error for an error of a call to the verifier."""
    status, code = _STATUSES.get(error.code, (500, "internal_error"))
    message, param = error.message, None
    if isinstance(error, InvalidArgument) and error.field:
        param = names.of(error.field)
        message = message.replace(error.field, param)
    elif error.code is grpc.StatusCode.FAILED_PRECONDITION and (field := _FIELD.match(message)):
        param = names.of(field[1])
        message = param + message[field.end(1) :]
    elif isinstance(error, ResourceExhausted) and "message larger than max" in message:
        # gRPC's own limit: waiting would not help.
        status, code = 413, "request_too_large"
    headers = {}
    if status in (429, 503):
        wait_s = error.retry_after_s if isinstance(error, ResourceExhausted | Unavailable) else None
        headers["retry-after"] = str(max(1, math.ceil(DEFAULT_RETRY_AFTER_S if wait_s is None else wait_s)))
    return ApiError(status, message, code=code, param=param, headers=headers)


_FIELD = re.compile(r"((?:prompt|speculation|sampling|report|structured_outputs)[\w.\[\]]*) ")
"""A field at the beginning of a message, which names it nowhere else."""
_OPTION = re.compile(r"([a-z_]+(?:\[\d+\]|\.[A-Za-z_$-]+)*)(?=:? )")


def from_option(error: TypeError | ValueError, names: FieldNames = NAMES) -> ApiError:
    """Returns the error for an option that the SDK refuses. Its message begins with the option's name."""
    if isinstance(error, UnheldCalls):
        param = names.of(error.option)
        # With its value, unless the request has another name for it, and thus another value.
        what = error.reason if param == error.option else param
        return ApiError(400, f"{what} {error.rule}", code="unsupported_value", param=param)
    message = str(error)
    if field := _OPTION.match(message):
        param = names.of(field[1])
        return ApiError(400, param + message[field.end(1) :], code="invalid_value", param=param)
    return ApiError(400, message, code="invalid_value")
