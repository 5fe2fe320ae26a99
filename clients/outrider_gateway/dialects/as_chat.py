"""Converts the chats of other APIs to OpenAI's shape, and keeps the place from which each message came.

Only shapes are checked here, under the names that the caller has written. The verifier checks roles and values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider_gateway.errors import ApiError, invalid, shown

NOTE = "cache_control"


@dataclass(slots=True)
class Chat:
    """The messages of a chat under construction."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """The messages, in OpenAI's shape."""
    renamed: list[tuple[str, str]] = field(default_factory=list)
    """The places that the fields of the messages have in the request, as in `FieldNames`."""

    def add(self, role: str, content: str | None, place: str, **more: Any) -> None:
        """Adds a message. `place`: its place in the request."""
        index = len(self.messages)
        self.messages.append({"role": role, "content": content, **more})
        self.renamed += [(name, place) for name in _names(index)]

    def add_call(self, call_id: str, name: str, arguments: str, place: str) -> None:
        """Adds a call of a tool to the last message, or to a new one if the last is not the assistant's. `place`: its
        place in the request."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add("assistant", None, place)
        calls = self.messages[-1].setdefault("tool_calls", [])
        for message in _names(len(self.messages) - 1):
            one = f"{message}.tool_calls[{len(calls)}]"
            # Put first: their prefixes are longer than that of their message.
            self.renamed[:0] = [(f"{one}.function", place), (one, place)]
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})


def _names(index: int) -> tuple[str, str]:
    """Returns the names of a message: the verifier's and the SDK's."""
    return f"prompt.chat.messages[{index}]", f"prompt[{index}]"


def tool_names(num_tools: int, parameters: str) -> Iterator[tuple[str, str]]:
    """Yields the places of the fields of tools in a request that does not nest functions, as in `FieldNames`.
    `parameters`: its name for the schema of a tool."""
    for index in range(num_tools):
        for name in (f"prompt.chat.tools[{index}]", f"tools[{index}].function"):
            yield f"{name}.parameters", f"tools[{index}].{parameters}"
            yield name, f"tools[{index}]"


def without_notes(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message of OpenAI's without the notes about caches in it and in its parts, which clients of several
    services send. They have no effect: every prefix is cached here."""
    told = {name: value for name, value in message.items() if name != NOTE}
    if isinstance(parts := told.get("content"), list):
        told["content"] = [
            {name: value for name, value in part.items() if name != NOTE} if isinstance(part, dict) else part
            for part in parts
        ]
    return told


def content_text(content: object, place: str, kinds: Collection[str], harmless: Collection[str] = ()) -> str:
    """Returns a text, or the texts of parts, joined without a separator.

    Args:
        content: A text, or a list of parts.
        place: Its place in the request, for errors.
        kinds: The allowed kinds of parts.
        harmless: Fields of a part that change nothing.

    Raises:
        ApiError: The content is neither.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(place, f"must be a text or a list of parts, got {shown(content)}", code="invalid_type")
    return "".join(part_text(part, f"{place}[{index}]", kinds, harmless) for index, part in enumerate(content))


def part_text(part: object, place: str, kinds: Collection[str], harmless: Collection[str] = ()) -> str:
    """Returns the text of a part. See `content_text` for the arguments. Raises ApiError."""
    kind_of(part, place, kinds)
    return text_field(fields(part, place, {"type", "text"}, harmless), "text", place)


def kind_of(item: object, place: str, kinds: Collection[str]) -> str:
    """Returns the type of a part or an item. Raises ApiError if it is not among `kinds`."""
    # Checked first: for another kind, this is the error to report, whatever its other fields are.
    kind = mapping(item, place).get("type")
    if not isinstance(kind, str) or kind not in kinds:
        names = " or ".join(f'"{name}"' for name in kinds)
        rule = f"must be {names}, got {shown(kind)}: no other is supported here"
        raise invalid(f"{place}.type", rule, code="unsupported_value")
    return kind


def fields(item: object, place: str, names: Collection[str], harmless: Collection[str] = ()) -> dict[str, Any]:
    """Returns the fields of an object that are set, without the harmless ones. Raises ApiError for unknown ones."""
    given = {name: value for name, value in mapping(item, place).items() if value is not None and name not in harmless}
    for name in sorted(given.keys() - set(names)):
        raise invalid(f"{place}.{name}", "is not supported", code="unsupported_parameter")
    return given


def text_field(given: Mapping[str, Any], name: str, place: str) -> str:
    """Returns a text of an object. Raises ApiError if it is missing or not a text."""
    value = given.get(name)
    if value is None:
        raise _missing(f"{place}.{name}")
    if not isinstance(value, str):
        raise invalid(f"{place}.{name}", f"must be a string, got {shown(value)}", code="invalid_type")
    return value


def mapping(item: object, place: str) -> dict[str, Any]:
    """Returns a value that must be an object. Raises ApiError if it is not one."""
    if not isinstance(item, dict):
        raise invalid(place, f"must be an object, got {shown(item)}", code="invalid_type")
    return item


def _missing(place: str) -> ApiError:
    return invalid(place, "is required", code="missing_required_parameter")
