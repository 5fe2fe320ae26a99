"""JSON schemas: hand-made ones, and random ones with every feature, none of them infinite."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

HAND_MADE: list[Schema] = [
    {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.(com|org)$"},
            "address": {
                "type": "object",
                "properties": {
                    "street": {"type": "string", "maxLength": 16},
                    "zip": {"type": "integer", "maximum": 99999},
                },
                "required": ["street", "zip"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "age", "email", "address"],
        "additionalProperties": False,
    },
    {"enum": ["red", "green", 3, None, True, {"a": [1, 2]}]},
    {"const": {"kind": "fixed", "values": [1, 2, 3], "note": "all of it is forced"}},
    {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "minItems": 2, "maxItems": 5},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": [1, 2]}], "items": False, "minItems": 2},
    {"anyOf": [{"type": "integer", "minimum": 10, "maximum": 99}, {"type": "string", "maxLength": 5}]},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.25},
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": 0, "maximum": 9},
                    "next": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            },
            "leaf": {"type": "object", "properties": {}, "additionalProperties": False},
        },
        "$ref": "#/$defs/tree",
    },
    {
        "type": "object",
        "properties": {
            "command": {"const": "move"},
            "direction": {"enum": ["north", "south", "east", "west"]},
            "steps": {"type": "integer", "minimum": 1, "maximum": 20},
            "reasons": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
        },
        "required": ["command", "direction", "steps"],
        "additionalProperties": False,
    },
]


def random_schemas(count: int, seed: int) -> list[Schema]:
    """Returns hand-made schemas and then random ones, always the same for a seed."""
    chance = random.Random(seed)
    return [*HAND_MADE, *(_schema(chance, 3) for _ in range(count - len(HAND_MADE)))][:count]


def _schema(chance: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [_string, _number, _choice]
    if depth > 0:
        kinds += [_object, _object, _array, _any_of]
    return chance.choice(kinds)(chance, depth)


def _string(chance: random.Random, depth: int) -> Schema:
    return chance.choice(
        [
            {"type": "string", "maxLength": chance.randrange(1, 12)},
            {"type": "string", "pattern": f"^[a-f]{{1,{chance.randrange(2, 6)}}}-[0-9]{{2}}$"},
            {"type": "string", "minLength": 2, "maxLength": 6},
            {"type": "string", "format": chance.choice(["date", "ipv4", "uuid"])},
        ]
    )


def _number(chance: random.Random, depth: int) -> Schema:
    low = chance.randrange(-50, 50)
    return chance.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + chance.randrange(1, 1000)},
            {"type": "boolean"},
            {"type": "null"},
        ]
    )


def _choice(chance: random.Random, depth: int) -> Schema:
    words = ["alpha", "beta", "gamma delta", "é", 'a "quoted" one', "\\", 1, 2.5, None, False]
    return {"enum": chance.sample(words, chance.randrange(1, 5))}


def _object(chance: random.Random, depth: int) -> Schema:
    names = chance.sample(["id", "name", "kind", "x y", "value_1", "ü"], chance.randrange(1, 5))
    return {
        "type": "object",
        "properties": {name: _schema(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
        "additionalProperties": False,
    }


def _array(chance: random.Random, depth: int) -> Schema:
    least = chance.randrange(3)
    return {
        "type": "array",
        "items": _schema(chance, depth - 1),
        "minItems": least,
        "maxItems": least + chance.randrange(1, 3),
    }


def _any_of(chance: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(chance, depth - 1) for _ in range(2)]}
