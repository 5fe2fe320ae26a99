"""Descriptions of output that are measured: those that change no text, JSON schemas, and schemas with little choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Structure = Mapping[str, Any]
"""A value of `structured_outputs`."""
Schema = Mapping[str, Any]

ANY_TEXT = "any text"
CHANGES_NOTHING: Structure = {"regex": "(?s:.*)"}
"""A mask for every row, and no text that it could change."""

# Masks that forbid something, but little that a model of code would say: of many texts every draw is allowed. The
# operator has what stands for itself in Python, brackets are left unpaired: a prompt may have opened some.
_LEXEMES = r"""
start: (NAME | NUMBER | STRING | COMMENT | OPERATOR | BLANK)*
NAME: /[A-Za-z_][A-Za-z0-9_]*/
NUMBER: /[0-9]+(\.[0-9]+)?/
STRING: /"[^"\n]*"/ | /'[^'\n]*'/
COMMENT: /#[^\n]*/
OPERATOR: /[-+*\/%=<>!&|^~.,:;()\[\]{}@\\]+/
BLANK: /[ \n]+/
"""
LOOSE: Mapping[str, Structure] = {
    "printable": {"regex": r"[\x0a\x20-\x7e]*"},
    "short lines": {"regex": r"([^\n]{0,99}\n)*[^\n]{0,99}"},
    "lexemes": {"grammar": _LEXEMES},
}
"""Loose descriptions by name: ASCII without tabs, lines of less than 100 characters, and Python's lexemes."""


def _object(**properties: Schema) -> dict[str, Any]:
    """Make an object of which every property must be there, and no other one."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(length: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": length}


def _whole(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


_LEAF = _object(name=_text(10), size=_whole(0, 9999))

SCHEMAS: Mapping[str, Schema] = {
    "person": _object(
        name=_text(16),
        age=_whole(0, 150),
        email={"type": "string", "pattern": r"^[a-z]{1,10}@[a-z]{1,10}\.(com|org)$"},
    ),
    "decision": _object(
        approved={"type": "boolean"},
        reason={"enum": ["complete", "incomplete", "out of scope", "duplicate"]},
        confidence={"enum": [0.25, 0.5, 0.75, 1]},
    ),
    "command": _object(
        command={"const": "move"},
        direction={"enum": ["north", "south", "east", "west"]},
        steps=_whole(1, 20),
        reasons={"type": "array", "items": _text(12), "maxItems": 2},
    ),
    "colours": {"type": "array", "items": {"enum": ["red", "green", "blue", "yellow"]}, "minItems": 3, "maxItems": 6},
    "invoice": _object(
        number={"type": "string", "pattern": "^INV-[0-9]{4}$"},
        lines={
            "type": "array",
            "items": _object(article={"enum": ["bolt", "nut", "washer"]}, quantity=_whole(1, 99)),
            "minItems": 1,
            "maxItems": 3,
        },
        paid={"type": "boolean"},
    ),
    "record": _object(
        at={"type": "string", "format": "date"},
        level={"enum": ["debug", "info", "warning", "error"]},
        source={"type": "string", "format": "ipv4"},
        message=_text(24),
    ),
    "files": {
        "$defs": {"file": _LEAF, "folder": _object(name=_text(10), files={"$ref": "#/$defs/several"})}
        | {"several": {"type": "array", "items": {"$ref": "#/$defs/file"}, "minItems": 1, "maxItems": 2}},
        "$ref": "#/$defs/folder",
    },
    "event": {
        "anyOf": [
            _object(kind={"const": "click"}, x=_whole(0, 1919), y=_whole(0, 1079)),
            _object(kind={"const": "key"}, text=_text(4), repeated={"type": "boolean"}),
        ]
    },
}
"""Schemas as applications have them, by name. Every text of each comes to an end."""

FORCED: Mapping[str, Schema] = {
    "settings": _object(
        maximum_number_of_connections={"enum": [16, 32, 64]},
        seconds_until_a_connection_is_closed={"enum": [30, 60, 120]},
        is_compression_enabled={"type": "boolean"},
        name_of_the_authentication_mechanism={"enum": ["certificate", "password", "token"]},
        address_of_the_upstream_server={"const": "upstream.internal.example.com:8443"},
    ),
    "notice": _object(
        kind={"const": "service notice"},
        text={
            "enum": [
                "The service is going to be unavailable for maintenance between two and four in the morning.",
                "The service has been restored, and all of the requests that were waiting have been answered.",
            ]
        },
        severity={"enum": ["information", "warning"]},
        contact={"const": {"team": "operations", "telephone": "+00 000 000 000", "room": "second floor, east wing"}},
    ),
    "message": {
        "const": {
            "protocol": "outrider",
            "version": [1, 0, 0],
            "capabilities": ["streaming", "several texts", "structured output", "log-probabilities"],
            "limits": {"tokens": 4096, "texts": 128, "bytes of a description": 65536},
        }
    },
}
"""Schemas that leave little to choose: most tokens of each text are forced."""

PROMPTS = (
    "A {name}, as JSON: ",
    "# Prints an example of a {name} as JSON.\nprint(json.dumps({name}))\n# ",
    'def example_{name}():\n    """Return a {name} as a JSON document."""\n    return ',
)
"""Prompts of a schema, with its name put in."""
