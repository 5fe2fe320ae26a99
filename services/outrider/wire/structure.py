"""Descriptions of structured output, on the wire and in the domain."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from outrider.core.params import check
from outrider.core.structure import Structure, StructureKind
from outrider.v1 import types_pb2

MAX_CHOICES = 1024
"""Most texts to choose one from."""
MAX_MARKER_BYTES = 256
"""Longest text after which a description begins to hold; like that of a stop string."""
FIELD = "structured_outputs"
"""Name of the request's field, for errors."""


def structure_from_proto(message: types_pb2.StructuredOutputs) -> Structure:
    """Returns the description of the texts that are allowed. It is compiled later, which may fail."""
    length = len(message.begins_after.encode())
    check(length <= MAX_MARKER_BYTES, f"{FIELD}.begins_after", f"at most {MAX_MARKER_BYTES} bytes long", length)
    as_text = message.special_tokens_as_text
    return replace(_constraint(message), begins_after=message.begins_after, special_tokens_as_text=as_text)


def _constraint(message: types_pb2.StructuredOutputs) -> Structure:
    which = message.WhichOneof("constraint")
    known = ", ".join(kind.value for kind in StructureKind)
    check(which is not None, FIELD, f"set to one of {known}", "none")
    kind = StructureKind(which)
    if kind is StructureKind.JSON_OBJECT:
        check(message.json_object, f"{FIELD}.json_object", "true", "false")
        return Structure(kind, "")
    if kind is StructureKind.CHOICE:
        choices = list(message.choice.choices)
        field = f"{FIELD}.choice.choices"
        check(1 <= len(choices) <= MAX_CHOICES, field, f"1 to {MAX_CHOICES} texts", len(choices))
        check(all(choices), field, "texts that are not empty", "an empty one")
        return Structure(kind, json.dumps(choices))
    text: str = getattr(message, kind.value)
    check(bool(text), f"{FIELD}.{kind.value}", "not empty", "an empty one")
    return Structure(kind, text)


def structure_to_proto(structure: Structure) -> types_pb2.StructuredOutputs:
    """Converts a description."""
    value: Any = structure.text
    if structure.kind is StructureKind.JSON_OBJECT:
        value = True
    elif structure.kind is StructureKind.CHOICE:
        value = types_pb2.Choices(choices=json.loads(structure.text))
    return types_pb2.StructuredOutputs(
        **{structure.kind.value: value},
        begins_after=structure.begins_after,
        special_tokens_as_text=structure.special_tokens_as_text or None,
    )
