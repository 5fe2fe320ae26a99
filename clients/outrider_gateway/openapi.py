"""GET /openapi.json: describes the API for generators of clients and testers of servers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from outrider.version import __version__
from outrider_gateway.dialects.chat import ChatParameters
from outrider_gateway.dialects.completions import CompletionParameters
from outrider_gateway.dialects.messages import MessageChat, MessageParameters
from outrider_gateway.dialects.responses import ResponseParameters
from outrider_gateway.exchange import REQUEST_ID, Exchange
from outrider_gateway.models import DetokenizeParameters, TokenizeParameters
from outrider_gateway.parameters import Parameters

_SCHEMAS = "#/components/schemas/"
_TEXT, _INT = {"type": "string"}, {"type": "integer"}


def _object(**fields: Any) -> dict[str, Any]:
    """Returns the schema of an object that has at least these fields."""
    return {"type": "object", "properties": fields, "required": list(fields)}


def _list(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of}


_USAGE = _object(prompt_tokens=_INT, completion_tokens=_INT, total_tokens=_INT)
_GENERATED = {"id": _TEXT, "object": _TEXT, "created": _INT, "model": _TEXT, "usage": _USAGE, "metrics": _object()}
_CHOICE = {"index": _INT, "finish_reason": {"type": "string", "enum": ["stop", "length", "tool_calls"]}}
_MESSAGE = _object(role={"const": "assistant"}, content={"type": ["string", "null"]})
_MODEL = _object(id=_TEXT, object={"const": "model"}, created=_INT, owned_by=_TEXT, max_model_len=_INT)
_ERRORS = {
    "Error": _object(
        error=_object(message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code={"type": ["string", "null"]})
    ),
    "AnthropicError": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT), request_id=_TEXT),
}
"""The schemas of errors, in the shapes of OpenAI and Anthropic."""


@dataclass(frozen=True, slots=True)
class _Operation:
    """Describes the operation of a path."""

    path: str
    summary: str
    answer: dict[str, Any]
    """The schema of a successful answer."""
    body: type[Parameters] | None = None
    """The parameters of a request; None means that it has no body."""
    can_stream: bool = False
    error: str = "Error"
    """The schema of an error."""


_COUNTS = _object(input_tokens=_INT, output_tokens=_INT)
_RESPONSE = {"id": _TEXT, "object": {"const": "response"}, "created_at": _INT, "model": _TEXT, "status": _TEXT}
_BLOCKS = _list(_object(type={"enum": ["text", "tool_use"]}))
_BODY = {
    "id": _TEXT,
    "type": {"const": "message"},
    "role": {"const": "assistant"},
    "model": _TEXT,
    "stop_reason": _TEXT,
}

_OPERATIONS = (
    _Operation(
        "/v1/chat/completions",
        "Answers a chat.",
        _object(**_GENERATED, choices=_list(_object(**_CHOICE, message=_MESSAGE))),
        ChatParameters,
        can_stream=True,
    ),
    _Operation(
        "/v1/completions",
        "Continues texts.",
        _object(**_GENERATED, choices=_list(_object(**_CHOICE, text=_TEXT))),
        CompletionParameters,
        can_stream=True,
    ),
    _Operation(
        "/v1/responses",
        "Answers a chat in the shape of OpenAI's Responses API.",
        _object(**_RESPONSE, output=_list(_object(type=_TEXT)), usage=_COUNTS, metrics=_object()),
        ResponseParameters,
        can_stream=True,
    ),
    _Operation(
        "/v1/responses/input_tokens",
        "Counts the tokens of a chat in that shape.",
        _object(object={"const": "response.input_tokens"}, input_tokens=_INT),
        ResponseParameters,
    ),
    _Operation(
        "/v1/messages",
        "Answers a chat in the shape of Anthropic's Messages API.",
        _object(**_BODY, content=_BLOCKS, usage=_COUNTS, metrics=_object()),
        MessageParameters,
        can_stream=True,
        error="AnthropicError",
    ),
    _Operation(
        "/v1/messages/count_tokens",
        "Counts the tokens of a chat in that shape.",
        _object(input_tokens=_INT),
        MessageChat,
        error="AnthropicError",
    ),
    _Operation(
        "/tokenize",
        "Returns the tokens of a text or a chat.",
        _object(count=_INT, max_model_len=_INT, tokens=_list(_INT)),
        TokenizeParameters,
    ),
    _Operation("/detokenize", "Returns the text of tokens.", _object(prompt=_TEXT), DetokenizeParameters),
    _Operation("/v1/models", "Lists the names of the model.", _object(object={"const": "list"}, data=_list(_MODEL))),
    _Operation("/v1/models/{name}", "Describes the model by one of its names.", _MODEL),
    _Operation("/health", "Tells that a verifier serves.", _object(status={"const": "ok"})),
    _Operation("/live", "Tells that the gateway itself runs.", _object(status={"const": "ok"})),
    _Operation("/ping", "Tells that the gateway itself runs.", _object(status={"const": "ok"})),
    _Operation("/version", "Tells the version.", _object(version=_TEXT)),
)


async def openapi(exchange: Exchange) -> None:
    """Sends the description of the API."""
    await exchange.answer(document())


@cache
def document() -> dict[str, Any]:
    """Returns the description of the API, by OpenAPI 3.1."""
    kinds = [each.body for each in _OPERATIONS if each.body is not None]
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=f"{_SCHEMAS}{{model}}")
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": __version__},
        "paths": {each.path: {"get" if each.body is None else "post": _operation(each)} for each in _OPERATIONS},
        "components": {
            "schemas": {**schemas["$defs"], **_ERRORS},
            "responses": {name: _failure(name) for name in _ERRORS},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        # With an empty alternative: a verifier without credentials needs no token.
        "security": [{}, {"token": []}],
    }


def _failure(name: str) -> dict[str, Any]:
    return {
        "description": "An error: what is wrong, for people and for programs.",
        "content": _json({"$ref": f"{_SCHEMAS}{name}"}),
        "headers": {"retry-after": {"description": "Seconds to wait, with 429 and 503.", "schema": _TEXT}},
    }


def _operation(described: _Operation) -> dict[str, Any]:
    content = _json(described.answer)
    if described.can_stream:
        content["text/event-stream"] = {"schema": _TEXT}
    good = {
        "description": "The answer.",
        "content": content,
        "headers": {REQUEST_ID: {"description": "The session, in logs and traces.", "schema": _TEXT}},
    }
    failure = {"$ref": f"#/components/responses/{described.error}"}
    told: dict[str, Any] = {
        "summary": described.summary,
        "responses": {"200": good, "4XX": failure, "5XX": failure},
    }
    if described.body is not None:
        schema = {"$ref": f"{_SCHEMAS}{described.body.__name__}"}
        told["requestBody"] = {"required": True, "content": _json(schema)}
    if "{name}" in described.path:
        told["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return told


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
