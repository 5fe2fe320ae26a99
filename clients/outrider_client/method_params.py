"""Names and parameters of methods, as people write them: "best-first", "geometric", `beam_width=50`.

Everything is read from the protocol's own description, so that a new parameter needs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, cast

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from outrider.core.params import Method
from outrider.v1 import types_pb2

METHOD_MESSAGES: dict[str, type[Message]] = {
    "card": types_pb2.CardParams,
    "saguaro": types_pb2.SaguaroParams,
    "double": types_pb2.DoubleParams,
    "spacelike": types_pb2.SpacelikeParams,
    "best_first": types_pb2.BestFirstParams,
}
"""Messages of `SpeculationParams.method_params` by field."""


def enum_number(enum: EnumDescriptor, value: object, what: str) -> int:
    """The number of an enum's value on the wire: of a name like "best-first" or "TENANT", of a member of the enum in
    `outrider.core`, or the number itself. Raises ValueError for a name that does not exist."""
    if isinstance(value, int):
        return value
    said = value.name if isinstance(value, Enum) else value
    name = said.upper().replace("-", "_") if isinstance(said, str) else ""
    known = enum.values_by_name.get(_prefix(enum) + name)
    if known is None or known.number == 0:
        names = ", ".join(enum_name(enum, number) for number in enum.values_by_number if number)
        raise ValueError(f"{what} must be one of {names}, got {value!r}")
    return known.number


def enum_name(enum: EnumDescriptor, number: int) -> str:
    """The name of an enum's value: "best-first" for METHOD_BEST_FIRST, the number for one that is not known here."""
    known = enum.values_by_number.get(number)
    return known.name.removeprefix(_prefix(enum)).lower().replace("_", "-") if known is not None else str(number)


def _prefix(enum: EnumDescriptor) -> str:
    return enum.values_by_number[0].name.removesuffix("UNSPECIFIED")


def method_message(field: str, params: Mapping[str, Any]) -> Message:
    """A method's parameters as their message. Enums may be given by name.

    Raises TypeError for a parameter that does not exist or has the wrong type, and ValueError for one that the wire
    cannot hold.
    """
    kind, fields = METHOD_MESSAGES[field], _fields(field)
    if unknown := params.keys() - fields.keys():
        raise TypeError(f"{field} must have parameters of {', '.join(fields)} only, got {min(unknown)!r}")
    message = kind()
    for name, value in params.items():
        sent = _wire_value(fields[name], value, f"{field}.{name}")
        try:
            message.MergeFrom(kind(**{name: sent}))
        except (TypeError, ValueError) as error:  # it says what is wrong, but not always with what
            raise type(error)(f"{field}.{name}: {error}") from None
    return message


def _wire_value(field: FieldDescriptor, value: Any, what: str) -> Any:
    if field.is_repeated and isinstance(value, str):
        raise TypeError(f"{what} must be a list, got {value!r}")
    if field.enum_type is None:
        return value
    if field.is_repeated:
        return [enum_number(field.enum_type, item, what) for item in value]
    return enum_number(field.enum_type, value, what)


def _fields(field: str) -> Mapping[str, FieldDescriptor]:
    """A method's parameters by name."""
    return cast(Mapping[str, FieldDescriptor], METHOD_MESSAGES[field].DESCRIPTOR.fields_by_name)


def parse_method_params(method: Method | None, pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The flags NAME=VALUE of a method, as keyword arguments of `generate`: {"card": {"beam_width": 50}}.

    Raises ValueError, naming the parameter, the rule and the value.
    """
    if not pairs:
        return {}
    field = "" if method is None else method.value.replace("-", "_")
    if field not in METHOD_MESSAGES:
        names = ", ".join(name.replace("_", "-") for name in METHOD_MESSAGES)
        raise ValueError(f"needs a --method with parameters of its own ({names}), got {pairs[0]!r}")
    fields = _fields(field)
    params: dict[str, Any] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not separator:
            raise ValueError(f"must be NAME=VALUE, got {pair!r}")
        if name not in fields:
            raise ValueError(f"must name one of {', '.join(fields)} with this method, got {name!r}")
        if name in params:
            raise ValueError(f"must name {name} once, got {pair!r}")
        params[name] = _parsed(fields[name], text.strip())
    return {field: params}


def _parsed(field: FieldDescriptor, text: str) -> Any:
    if field.is_repeated:
        return [_parsed_item(field, item.strip()) for item in text.split(",")]
    return _parsed_item(field, text)


def _parsed_item(field: FieldDescriptor, text: str) -> Any:
    if field.enum_type is not None:
        return enum_number(field.enum_type, text, field.name)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        if text not in ("true", "false"):
            raise ValueError(f"{field.name} must be true or false, got {text!r}")
        return text == "true"
    kind, rule = (float, "a number") if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE else (int, "a whole number")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{field.name} must be {rule}, got {text!r}") from None


def method_params_help() -> Iterable[str]:
    """A line for each method with parameters of its own."""
    for field in METHOD_MESSAGES:
        yield f"{field.replace('_', '-')}: {', '.join(_fields(field))}"
