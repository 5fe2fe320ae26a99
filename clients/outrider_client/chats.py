"""Chats as prompts: messages and tools in OpenAI's shape become those of the protocol.

A field that the wire has no place for is an error that names it: `prompt[2].content[0].type`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict, cast

from outrider.v1 import verifier_pb2

ChatMessage = verifier_pb2.ChatMessage
"""Holds one message of a chat: `role`, `content`, and for tools `name`, `tool_calls` and `tool_call_id`."""

Message: TypeAlias = ChatMessage | Mapping[str, Any]
"""A message, or a dict in OpenAI's shape."""

Tool: TypeAlias = verifier_pb2.Tool | Mapping[str, Any]
"""A tool, or a dict in OpenAI's shape."""


class ChatOptions(TypedDict, total=False):
    """Holds the keyword arguments that go with a chat only. An absent one, or None, means the server's default."""

    tools: Sequence[Tool] | None
    """Tools that the model may call, in OpenAI's shape: `{"type": "function", "function": {"name": ..., "description":
    ..., "parameters": {...}}}`. A call is part of the text, in the model's own way; the gateway takes it out of the
    text, and holds it to the schema of a strict tool."""
    add_generation_prompt: bool | None
    """Ends the prompt with the beginning of an assistant's message. Unset: yes, unless `continue_final_message`."""
    continue_final_message: bool | None
    """Lets the model go on with the last message, which must be the assistant's and have content."""
    chat_template_kwargs: Mapping[str, Any] | None
    """More variables for the chat template: `{"enable_thinking": False}`."""


CHAT_OPTIONS = frozenset(ChatOptions.__annotations__)
"""Names of the options that go with a chat only."""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """Holds a tool that goes with a chat."""

    message: verifier_pb2.Tool
    place: str
    """Its place in the options, for errors: `tools[0].function`."""
    strict: bool | None
    """True if the tool asks that calls be held to its schema; None if it does not say."""


def chat_messages(messages: Iterable[object], options: Mapping[str, Any]) -> verifier_pb2.ChatMessages:
    """Returns a chat as a message of the protocol.

    Args:
        messages: `ChatMessage`s, or dicts in OpenAI's shape.
        options: The `ChatOptions` that are set.

    Raises:
        TypeError: Something has the wrong type, or an unknown key.
        ValueError: Something has a value that the wire cannot hold.
    """
    tools = offered_tools(options)
    if strict := next((tool for tool in tools if tool.strict), None):
        raise ValueError(f"{strict.place}.strict must be unset or false: only the gateway holds calls to their schemas")
    chat = verifier_pb2.ChatMessages(
        messages=[_message(message, f"prompt[{index}]") for index, message in enumerate(messages)],
        tools=[tool.message for tool in tools],
    )
    for name in ("add_generation_prompt", "continue_final_message"):
        if (value := options.get(name)) is not None:
            setattr(chat, name, _typed(value, bool, name))
    if (variables := options.get("chat_template_kwargs")) is not None:
        chat.chat_template_kwargs = _json(_typed(variables, Mapping, "chat_template_kwargs"), "chat_template_kwargs")
    return chat


def offered_tools(options: Mapping[str, Any]) -> list[OfferedTool]:
    """Returns the tools among the options of a chat. Raises as `chat_messages` does."""
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(_list(options.get("tools"), "tools"))]


def _message(item: object, place: str) -> ChatMessage:
    if isinstance(item, ChatMessage):
        return item
    given = fields_of(item, ("role", "content", "name", "tool_call_id", "tool_calls"), place)
    calls = _list(given.pop("tool_calls", None), f"{place}.tool_calls")
    if "content" in given:
        given["content"] = _content(given["content"], f"{place}.content")
    message = ChatMessage(tool_calls=[_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)])
    for name, value in given.items():
        setattr(message, name, sendable(value, f"{place}.{name}"))
    return message


def _content(content: object, place: str) -> str:
    """Returns a text, or the texts of content parts joined as they are."""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise TypeError(f"{place} must be a text or a list of parts, got {type(content).__name__}")
    return "".join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part(part: object, place: str) -> str:
    # The kind first: for another kind this is the error to report, whatever its other fields are.
    kind = _typed(part, Mapping, place).get("type")
    if kind != "text":
        raise ValueError(f'{place}.type must be "text", the only kind of content that is supported, got {kind!r}')
    return sendable(fields_of(part, ("type", "text"), place).get("text"), f"{place}.text")


def _call(call: object, place: str) -> verifier_pb2.ToolCall:
    if isinstance(call, verifier_pb2.ToolCall):
        return call
    given = fields_of(call, ("id", "type", "function", "index"), place)
    function = function_of(given, ("name", "arguments"), place)
    arguments = function.get("arguments", "")
    if isinstance(arguments, Mapping):
        arguments = _json(arguments, f"{place}.function.arguments")
    return verifier_pb2.ToolCall(
        id=sendable(given.get("id", ""), f"{place}.id"),
        name=sendable(function.get("name"), f"{place}.function.name"),
        arguments=sendable(arguments, f"{place}.function.arguments"),
    )


def _tool(tool: object, place: str) -> OfferedTool:
    if isinstance(tool, verifier_pb2.Tool):
        return OfferedTool(tool, place, None)
    given, given_place = fields_of(tool, ("type", "function"), place), place
    function, place = function_of(given, ("name", "description", "parameters", "strict"), place), f"{place}.function"
    if (strict := function.get("strict")) is not None:
        _typed(strict, bool, f"{place}.strict")
    parameters = function.get("parameters")
    if parameters is not None:
        parameters = _json(_typed(parameters, Mapping, f"{place}.parameters"), f"{place}.parameters")
    message = verifier_pb2.Tool(
        name=sendable(function.get("name"), f"{place}.name"),
        description=sendable(function.get("description", ""), f"{place}.description"),
        parameters=parameters,
        # As it was written: a template shows the model all of it, in this order.
        definition=_json(cast(Mapping[str, Any], tool), given_place),
    )
    return OfferedTool(message, place, strict)


def function_of(given: Mapping[str, Any], keys: Sequence[str], place: str) -> dict[str, Any]:
    """Returns the set fields of the function of a tool or a call."""
    if (kind := given.get("type", "function")) != "function":
        raise ValueError(f'{place}.type must be "function", got {kind!r}')
    return fields_of(given.get("function"), keys, f"{place}.function")


def fields_of(item: object, keys: Sequence[str], place: str) -> dict[str, Any]:
    """Returns the set fields of a dict, whose keys must be among those named. None and an empty list are unset, as in
    the messages that OpenAI's SDK returns."""
    given = {key: value for key, value in _typed(item, Mapping, place).items() if value is not None and value != []}
    if unknown := given.keys() - set(keys):
        # `min`: of several unknown keys, always the same one is named.
        raise TypeError(f"{place} must have keys of {', '.join(keys)} only, got {min(map(str, unknown))!r}")
    return given


def sendable(value: object, place: str) -> str:
    """Returns a text. Raises TypeError if it is not a text, ValueError if the wire cannot hold it."""
    text: str = _typed(value, str, place)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place} must be text that UTF-8 can hold") from None
    return text


def _list(value: object, place: str) -> Sequence[object]:
    if value is None:
        return ()
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise TypeError(f"{place} must be a list, got {type(value).__name__}")
    return value


def _typed(value: object, kind: type, place: str) -> Any:
    names = {Mapping: "a dict", str: "a text", bool: "true or false"}
    if not isinstance(value, kind):
        raise TypeError(f"{place} must be {names[kind]}, got {type(value).__name__}")
    return value


def _json(value: Mapping[str, Any], place: str) -> str:
    try:
        return json.dumps(dict(value), allow_nan=False)
    except TypeError as error:
        raise TypeError(f"{place} must be JSON: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} must be JSON: {error}") from None
