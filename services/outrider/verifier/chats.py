"""Checks the chat of a request field by field, and converts it to the form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

from outrider.models.text import RESERVED_TEMPLATE_VARIABLES, Chat
from outrider.v1 import verifier_pb2
from outrider.wire.errors import InvalidArgument

CHAT_FIELD = "prompt.chat"
"""The chat's place in a request."""


def chat_from_proto(chat: verifier_pb2.ChatMessages) -> Chat:
    """Returns a chat as templates take it. Raises InvalidArgument, which names the field and the rule."""
    if not chat.messages:
        raise InvalidArgument(f"{CHAT_FIELD}.messages", "must hold at least one message")
    messages = [_message(message, f"{CHAT_FIELD}.messages[{index}]") for index, message in enumerate(chat.messages)]
    if chat.continue_final_message:
        _check_continuation(chat)
    has_choice = chat.HasField("add_generation_prompt")
    return Chat(
        messages=messages,
        tools=[_tool(tool, f"{CHAT_FIELD}.tools[{index}]") for index, tool in enumerate(chat.tools)],
        add_generation_prompt=chat.add_generation_prompt if has_choice else not chat.continue_final_message,
        continue_final_message=chat.continue_final_message,
        chat_template_kwargs=_template_variables(chat.chat_template_kwargs),
    )


def num_characters(chat: verifier_pb2.ChatMessages) -> int:
    """Counts the characters of everything that a template may write. A message, a call and a tool have at least one:
    `chat_from_proto` refuses a chat without a role or a name."""
    texts = [chat.chat_template_kwargs]
    for message in chat.messages:
        texts += (message.role, message.content, message.name, message.tool_call_id)
        for call in message.tool_calls:
            texts += (call.id, call.name, call.arguments)
    for tool in chat.tools:
        texts += (tool.name, tool.definition or tool.description + tool.parameters)
    return sum(map(len, texts))


def _message(message: verifier_pb2.ChatMessage, field: str) -> dict[str, Any]:
    _check_set(message.role, f"{field}.role")
    if not message.HasField("content") and not message.tool_calls:
        raise InvalidArgument(f"{field}.content", "must be set, but for a message that calls tools")
    if message.tool_calls and message.role != "assistant":
        raise InvalidArgument(f"{field}.tool_calls", f'must be empty for role "{message.role}": the assistant calls')
    rendered: dict[str, Any] = {"role": message.role}
    # Left out if they are unset: templates ask if a message has them, and some take "" for a value.
    if message.HasField("content"):
        rendered["content"] = message.content
    rendered |= _set_fields(message, ("name", "tool_call_id"))
    if message.tool_calls:
        rendered["tool_calls"] = [
            _call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    return rendered


def _call(call: verifier_pb2.ToolCall, field: str) -> dict[str, Any]:
    _check_set(call.name, f"{field}.name")
    arguments = _json_object(call.arguments or "{}", f"{field}.arguments")
    return {**_set_fields(call, ("id",)), "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _tool(tool: verifier_pb2.Tool, field: str) -> dict[str, Any]:
    _check_set(tool.name, f"{field}.name")
    if tool.definition:
        return _definition(tool, f"{field}.definition")
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    if tool.parameters:
        parameters = _json_object(tool.parameters, f"{field}.parameters")
    function = {"name": tool.name, **_set_fields(tool, ("description",)), "parameters": parameters}
    return {"type": "function", "function": function}


def _definition(tool: verifier_pb2.Tool, field: str) -> dict[str, Any]:
    """Returns a tool as its caller wrote it."""
    definition = _json_object(tool.definition, field)
    function = definition.get("function")
    if not isinstance(function, dict) or function.get("name") != tool.name:
        raise InvalidArgument(field, f'must have "function", an object with the name {tool.name!r}')
    return definition


def _check_continuation(chat: verifier_pb2.ChatMessages) -> None:
    """Raises InvalidArgument if the model cannot continue the last message."""
    field, last = f"{CHAT_FIELD}.continue_final_message", chat.messages[-1]
    if chat.add_generation_prompt:
        raise InvalidArgument(field, f"must be false with {CHAT_FIELD}.add_generation_prompt")
    if last.role != "assistant":
        raise InvalidArgument(field, f'must be false unless the last message is the assistant\'s, got "{last.role}"')
    if not last.HasField("content"):
        raise InvalidArgument(field, "must be false unless the last message has content")
    # Tool calls follow the content, where transformers would cut them off silently.
    if last.tool_calls:
        raise InvalidArgument(field, "must be false where the last message calls tools")


def _template_variables(text: str) -> dict[str, Any]:
    field = f"{CHAT_FIELD}.chat_template_kwargs"
    variables = _json_object(text or "{}", field)
    for name in variables:
        if name in RESERVED_TEMPLATE_VARIABLES:
            raise InvalidArgument(field, f"must not have {name!r}, which is set in another way or not at all")
    return variables


def _set_fields(
    message: verifier_pb2.ChatMessage | verifier_pb2.ToolCall | verifier_pb2.Tool, names: Sequence[str]
) -> dict[str, str]:
    """Returns the fields of these names that are not empty."""
    return {name: value for name in names if (value := getattr(message, name))}


def _check_set(value: str, field: str) -> None:
    if not value:
        raise InvalidArgument(field, "must be set")


def _json_object(text: str, field: str) -> dict[str, Any]:
    rule = "must be a JSON object as text"
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(field, f"{rule}: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(field, f"{rule}, got a {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    # `json` accepts NaN and Infinity, which are not JSON, and would write them into the prompt.
    raise ValueError(f"{name} is no JSON value")
