"""Calls that a model writes in Python's syntax: `[weather(city="Rome", days=2), now()]`."""

from __future__ import annotations

import ast
import re
from typing import Any

from outrider_gateway.tools.growing_text import Unreadable

NAME = re.compile(r"[\w.:/-]*")
"""Characters of the name of a function."""

_STRING = re.compile(r"""([a-zA-Z]*)("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')""", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = "\n\\'\"abfnrtv01234567xNuU"
_CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's names, which models mix up with Python's."""


def python_calls(source: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the names and the arguments of the calls in a list of Python's, like `[f(a=1), g()]`.

    Raises:
        Unreadable: There is anything else in the list.
    """
    try:
        tree = ast.parse(_STRING.sub(_with_plain_backslashes, source), mode="eval").body
    except (SyntaxError, MemoryError) as error:
        raise Unreadable(str(error)) from error
    if not isinstance(tree, ast.List) or not tree.elts:
        raise Unreadable("there must be a call")
    return [_python_call(node) for node in tree.elts]


def _with_plain_backslashes(string: re.Match[str]) -> str:
    r"""Doubles the backslashes of a string that escape nothing, like that of "\d": Python means the same, but warns."""
    if "r" in string[1].lower():
        return string[0]
    return string[1] + _ESCAPE.sub(lambda pair: pair[0] if pair[1] in _ESCAPED else "\\" + pair[0], string[2])


def _python_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise Unreadable("a call must name all its arguments")
    name = ast.unparse(node.func)
    if not NAME.fullmatch(name):
        raise Unreadable("a call must have a name")
    return name, {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
    raise Unreadable("an argument must be a literal that JSON has too")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise Unreadable("a key must be a text")
