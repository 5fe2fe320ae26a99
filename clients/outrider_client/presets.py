"""Each method as its paper has it, without what Outrider adds (`GenerateOptions.as_published`): `Method.published`.

Outrider's additions to all methods are switched off: the noise that draft and target share, scores by how often the
target has agreed, drafts that end where they no longer pay. A preset fixes the parameters that define the paper's
method. Those that the paper tunes, such as the length of a chain or the width of a beam, have the paper's values as
defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from outrider.core.methods import METHODS
from outrider.v1.types_pb2 import SpeculationParams
from outrider_client.enums import enum_name, method_name


def published(given: SpeculationParams) -> SpeculationParams:
    """Returns parameters with those of the method's preset.

    Raises:
        ValueError: The method has no preset, or a parameter contradicts it; the message names both.
    """
    name = method_name(given.method) if given.method else "none"
    presets = {method.name: method.published for method in METHODS.values() if method.published is not None}
    if name not in presets:
        raise ValueError(f"as_published must come with one of the methods {', '.join(presets)}, got {name}")
    completed = SpeculationParams()
    completed.CopyFrom(given)
    _complete(completed, _message(presets[name].fixed), f"method {name} as published has", "")
    _complete(completed, _message(presets[name].tunable), None, "")
    return completed


def _message(fields: Mapping[str, Any]) -> SpeculationParams:
    return SpeculationParams(**{name: _wire_value(value) for name, value in fields.items()})


def _wire_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _wire_value(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return [_wire_value(each) for each in value]
    return value.value if isinstance(value, Enum) else value


def _complete(message: Any, preset: Message, what: str | None, path: str) -> None:
    """Sets the unset fields of a message to the preset's values.

    Args:
        message: The message.
        preset: Values of its fields.
        what: Begins the error about a field that has another value. None means that this is no error.
        path: Names the message's place, for the error.
    """
    for field, value in preset.ListFields():
        name = f"{path}{field.name}"
        if field.message_type is not None:
            getattr(message, field.name).SetInParent()
            _complete(getattr(message, field.name), value, what, f"{name}.")
        elif not _is_set(message, field):
            message.MergeFrom(type(message)(**{field.name: value}))
        elif what is not None and getattr(message, field.name) != value:
            given = _shown(field, getattr(message, field.name))
            raise ValueError(f"{what} {name} {_shown(field, value)}, which as_published and {name} {given} contradict")


def _is_set(message: Message, field: FieldDescriptor) -> bool:
    if field.has_presence:
        return message.HasField(field.name)
    # Lists, and enums, whose 0 stands for unset.
    return bool(getattr(message, field.name))


def _shown(field: FieldDescriptor, value: Any) -> str:
    """Returns a value as the options name it."""
    if field.is_repeated:
        return ", ".join(_name(field, each) for each in value)
    return _name(field, value)


def _name(field: FieldDescriptor, value: Any) -> str:
    return str(value).lower() if field.enum_type is None else enum_name(field.enum_type, value)
