"""Tool calls in the text that a model writes: each family of models marks them in its own way.

A call that is not well-formed stays part of the text. White space behind a call is dropped unless text comes after it,
and so is white space with which a text begins, if a call follows.

>>> parse_tool_calls('Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>')
('Let me see.', [ToolCall(name='weather', arguments='{"city": "Rome"}', id='')])
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeAlias

from outrider_client.growing_text import GrowingText, Reading, Unreadable


class ToolCallFormat(Enum):
    """A `ToolCallFormat` says how a model writes calls. The names are those of vLLM's parsers."""

    AUTO = "auto"
    """Every form below that begins with a marker which no other text begins with: not the bare ones."""
    HERMES = "hermes"
    """Hermes, Qwen 2.5 and 3: `<tool_call>{"name": "f", "arguments": {}}</tool_call>`."""
    MISTRAL = "mistral"
    """Mistral: `[TOOL_CALLS] [{"name": "f", "arguments": {}}]`, and since tokenizer v11 `[TOOL_CALLS]f[ARGS]{}`.
    Its markers are special tokens: generate with `skip_special_tokens=False`."""
    LLAMA3_JSON = "llama3_json"
    """Llama 3.1 and later: the text is `{"name": "f", "parameters": {}}`, several with `;` between them. The special
    token `<|python_tag|>` may stand before them."""
    PYTHONIC = "pythonic"
    """Llama 3.2 and 4: the text is `[f(a=1), g()]`. The special tokens `<|python_start|>` and `<|python_end|>` may
    stand around it."""
    DEEPSEEK_V3 = "deepseek_v3"
    """DeepSeek V3 and V3.1: `<｜tool▁call▁begin｜>`, a name, `<｜tool▁sep｜>`, arguments, and an end for each."""
    QWEN3_CODER = "qwen3_coder"
    """Qwen3-Coder: `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Holds a call that a model has written."""

    name: str
    """The function to call. It need not be one that the model was offered."""
    arguments: str
    """A JSON object as text. It need not fit the function's schema."""
    id: str = ""
    """The model's own name for the call. Empty with models that give none."""


Event: TypeAlias = str | ToolCall
"""A piece of the text around the calls, or a call."""


def parse_tool_calls(
    text: str, format: ToolCallFormat | str = ToolCallFormat.AUTO, *, tools: Iterable[Mapping[str, Any]] = ()
) -> tuple[str, list[ToolCall]]:
    """Splits a model's text into the text around its calls, and the calls.

    Args:
        text: The whole text.
        format: How the model writes calls.
        tools: What the model was offered, in OpenAI's shape: "qwen3_coder", which writes all values as text, takes
            their types from it. Without it they stay texts.

    Raises:
        ValueError: There is no such format.
    """
    stream = ToolCallStream(format, tools=tools)
    events = [*stream.feed(text), *stream.finish()]
    content = "".join(event for event in events if isinstance(event, str))
    return content, [event for event in events if isinstance(event, ToolCall)]


class ToolCallStream:
    """Splits a growing text. Joined, its events are what `parse_tool_calls` returns, however the text is cut.

    Text comes as soon as it cannot be the beginning of a call, a call when it is complete.

    >>> stream = ToolCallStream("hermes")
    >>> stream.feed("One moment.<tool")
    ['One moment.']
    >>> stream.feed('_call>{"name": "now", "arguments": {}}</tool_call>')
    [ToolCall(name='now', arguments='{}', id='')]
    >>> stream.finish()
    []
    """

    def __init__(
        self, format: ToolCallFormat | str = ToolCallFormat.AUTO, *, tools: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """The arguments are those of `parse_tool_calls`."""
        self._grammar = _grammar(_format(format), _schemas(tools))
        self._markers = re.compile("|".join(map(re.escape, self._grammar.marked)))
        self._text = GrowingText()
        self._events: list[Event] = []
        self._space = ""  # white space that is part of the text only if text comes behind it
        self._reading = self._read()

    def feed(self, piece: str) -> list[Event]:
        """Takes the next piece of the text; returns what is decided by it. Raises RuntimeError after `finish`."""
        if self._text.is_over:
            raise RuntimeError("the text is finished: a new one needs a new stream")
        self._text.text += piece
        next(self._reading)
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """Returns what is left of the text. No more may follow."""
        self._text.is_over = True
        # Without more text to wait for it reads to the end.
        for _ in self._reading:
            raise AssertionError("nothing may wait for text that never comes")
        events, self._events = self._events, []
        return events

    def _read(self) -> Reading[None]:
        self._space = yield from self._text.spaces()
        has_calls = False
        if (sign := (yield from self._text.ahead())) in self._grammar.bare:
            has_calls = yield from self._read_calls(self._grammar.bare[sign], sign)
        while marker := (yield from self._read_content()):
            self._text.position += len(marker)
            has_calls |= yield from self._read_calls(self._grammar.marked[marker], marker)
        if self._space and not has_calls:
            self._events.append(self._space)

    def _read_content(self) -> Reading[str]:
        """Reads up to the next marker and returns it; "" at the end of the text."""
        text = self._text
        while True:
            if match := self._markers.search(text.text, text.position):
                self._emit(text.text[text.position : match.start()])
                text.position = match.start()
                return match[0]
            end = len(text.text) - (0 if text.is_over else self._num_undecided())
            self._emit(text.text[text.position : end])
            text.position = end
            if text.is_over:
                return ""
            text.forget()
            yield

    def _num_undecided(self) -> int:
        """Counts the characters at the end of the text that may be the beginning of a marker."""
        rest = self._text.text[self._text.position :]
        longest = max(map(len, self._grammar.marked)) - 1
        for length in range(min(longest, len(rest)), 0, -1):
            if any(marker.startswith(rest[-length:]) for marker in self._grammar.marked):
                return length
        return 0

    def _read_calls(self, form: _Form, opener: str) -> Reading[bool]:
        """Reads the calls of one form. Returns False if there are none; then the opener alone was read, as text."""
        text, start = self._text, self._text.position
        try:
            calls = yield from form.read(text)
        # ValueError, of which Unreadable is one: a value that cannot be written as JSON.
        except (ValueError, RecursionError):
            # A bare form begins at its opener, a marked one behind it.
            text.position = start + (len(opener) if form.is_bare else 0)
            self._emit(opener)
            return False
        self._events += calls
        self._space = yield from text.spaces()
        if form.trailer and (yield from text.skips(form.trailer)):
            self._space = yield from text.spaces()
        return True

    def _emit(self, content: str) -> None:
        if content:
            self._events.append(self._space + content)
            self._space = ""


# What the forms are.

Read: TypeAlias = Callable[[GrowingText], Reading[list[ToolCall]]]
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Types of parameters: by function, by parameter, its JSON schema."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Holds a way to write calls behind an opener."""

    read: Read
    trailer: str = ""
    """A marker that is dropped if it comes behind the calls."""
    is_bare: bool = False
    """True if the form begins with the opener itself, and may only be the whole text."""


@dataclass(frozen=True, slots=True)
class _Grammar:
    """Holds the forms of a format by their openers."""

    marked: Mapping[str, _Form]
    bare: Mapping[str, _Form]
    """Its openers are the first characters of the text."""


def _format(name: ToolCallFormat | str) -> ToolCallFormat:
    try:
        return ToolCallFormat(name)
    except ValueError:
        names = ", ".join(each.value for each in ToolCallFormat)
        raise ValueError(f"format must be one of {names}, got {name!r}") from None


def _schemas(tools: Iterable[Mapping[str, Any]]) -> Schemas:
    schemas = {}
    for tool in tools:
        parameters = tool["function"].get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schemas[tool["function"]["name"]] = properties if isinstance(properties, Mapping) else {}
    return schemas


def _grammar(format: ToolCallFormat, schemas: Schemas) -> _Grammar:
    coder = partial(_read_qwen3_coder, schemas)
    deepseek = {
        CALLS_BEGIN: _Form(_read_deepseek_calls, CALLS_END),
        CALL_BEGIN: _Form(_read_deepseek_call, CALLS_END),
    }
    mistral = {"[TOOL_CALLS]": _Form(_read_mistral)}
    llama, pythonic = _Form(_read_llama3_json), _Form(_read_pythonic)
    match format:
        case ToolCallFormat.HERMES:
            return _Grammar({"<tool_call>": _Form(_read_hermes)}, {})
        case ToolCallFormat.MISTRAL:
            return _Grammar(mistral, {})
        case ToolCallFormat.LLAMA3_JSON:
            return _Grammar({"<|python_tag|>": llama}, {"{": _Form(_read_llama3_json, is_bare=True)})
        case ToolCallFormat.PYTHONIC:
            return _Grammar({"<|python_start|>": pythonic}, {"[": _Form(_read_pythonic, is_bare=True)})
        case ToolCallFormat.DEEPSEEK_V3:
            return _Grammar(deepseek, {})
        case ToolCallFormat.QWEN3_CODER:
            # The model sometimes forgets the outer marker before its call, but not behind it.
            bare = _Form(partial(_read_function, schemas), "</tool_call>")
            return _Grammar({"<tool_call>": _Form(coder), "<function=": bare}, {})
    either = _Form(partial(_read_tool_call, coder))
    others = {"<|python_tag|>": llama, "<|python_start|>": pythonic}
    return _Grammar({"<tool_call>": either, **mistral, **deepseek, **others}, {})


# How each is read, from behind its opener.

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

_NAME = re.compile(r"[\w.:/-]*")


def _read_tool_call(coder: Read, text: GrowingText) -> Reading[list[ToolCall]]:
    yield from text.spaces()
    is_json = (yield from text.ahead()) == "{"
    return (yield from (_read_hermes if is_json else coder)(text))


def _read_hermes(text: GrowingText) -> Reading[list[ToolCall]]:
    yield from text.spaces()
    call = _call((yield from text.json()), "arguments")
    yield from _read_end(text)
    return [call]


def _read_qwen3_coder(schemas: Schemas, text: GrowingText) -> Reading[list[ToolCall]]:
    yield from text.spaces()
    yield from text.expect("<function=")
    calls = yield from _read_function(schemas, text)
    yield from _read_end(text)
    return calls


def _read_function(schemas: Schemas, text: GrowingText) -> Reading[list[ToolCall]]:
    name = yield from _read_name(text)
    yield from text.expect(">")
    arguments: dict[str, Any] = {}
    while True:
        yield from text.spaces()
        if (yield from text.skips("</function>")):
            return [ToolCall(name, _as_json(arguments))]
        yield from text.expect("<parameter=")
        parameter = yield from _read_name(text)
        yield from text.expect(">")
        value = yield from text.until("</parameter>")
        # One line break on either side belongs to the format.
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[parameter] = _typed(value, schemas.get(name, {}).get(parameter, {}))


def _read_end(text: GrowingText) -> Reading[None]:
    yield from text.spaces()
    # A model may end behind a complete call without closing it.
    if (yield from text.ahead()):
        yield from text.expect("</tool_call>")


def _read_mistral(text: GrowingText) -> Reading[list[ToolCall]]:
    yield from text.spaces()
    if (yield from text.ahead()) == "[":
        values = yield from text.json()
        if not values:
            raise Unreadable("there must be a call")
        return [_call(value, "arguments") for value in values]
    name, call_id = (yield from _read_name(text)), ""
    if (yield from text.skips("[CALL_ID]")):
        call_id = yield from _read_name(text)
    yield from text.skips("[ARGS]")
    yield from text.spaces()
    return [ToolCall(name, _as_json((yield from text.json())), call_id)]


def _read_llama3_json(text: GrowingText) -> Reading[list[ToolCall]]:
    calls: list[ToolCall] = []
    while not calls or (yield from text.skips(";")):
        yield from text.spaces()
        if calls and not (yield from text.ahead()):
            break
        calls.append(_call((yield from text.json()), "parameters", "arguments", is_marked=False))
        yield from text.spaces()
    yield from _read_nothing(text)
    return calls


def _read_pythonic(text: GrowingText) -> Reading[list[ToolCall]]:
    yield from text.spaces()
    start = text.position
    # The brackets alone would hold back every text that begins with one.
    yield from text.expect("[")
    yield from text.spaces()
    yield from _read_name(text)
    yield from text.spaces()
    yield from text.expect("(")
    text.position = start
    calls = _python_calls((yield from text.brackets()))
    yield from text.skips("<|python_end|>")
    yield from text.spaces()
    yield from _read_nothing(text)
    return calls


def _read_deepseek_calls(text: GrowingText) -> Reading[list[ToolCall]]:
    yield from text.spaces()
    yield from text.expect(CALL_BEGIN)
    return (yield from _read_deepseek_call(text))


def _read_deepseek_call(text: GrowingText) -> Reading[list[ToolCall]]:
    name = yield from _read_name(text)
    yield from text.expect(CALL_SEPARATOR)
    yield from text.spaces()
    # V3.1 has the name before the separator; V3 the kind of tool, and behind it name and arguments in a code block.
    is_v3 = (yield from text.ahead()) != "{"
    if is_v3:
        name = yield from _read_name(text)
        yield from text.spaces()
        yield from text.expect("```json")
        yield from text.spaces()
    arguments = _as_json((yield from text.json()))
    yield from text.spaces()
    if is_v3:
        yield from text.expect("```")
        yield from text.spaces()
    yield from text.expect(CALL_END)
    return [ToolCall(name, arguments)]


def _read_name(text: GrowingText) -> Reading[str]:
    name = yield from text.run(_NAME)
    if not name:
        raise Unreadable("a name must come next")
    return name


def _read_nothing(text: GrowingText) -> Reading[None]:
    if sign := (yield from text.ahead()):
        raise Unreadable(f"the text must end, but goes on with {sign!r}")


# From values to calls.


def _call(value: Any, *keys: str, is_marked: bool = True) -> ToolCall:
    """Returns the call that a JSON value says. Raises Unreadable if it says none.

    Args:
        value: The JSON value.
        keys: Names that the arguments may have.
        is_marked: False if nothing but the value says that it is a call: then it must have arguments.
    """
    if not isinstance(value, dict) or not value.keys() <= {"name", "id", "type", *keys}:
        raise Unreadable("a call must have a name and arguments, and little else")
    given = [value[key] for key in keys if key in value]
    if len(given) > 1 or not (given or is_marked):
        raise Unreadable("a call must have its arguments once")
    name, call_id = value.get("name"), value.get("id", "")
    if not isinstance(name, str) or not name or not isinstance(call_id, str):
        raise Unreadable("a call must have a name")
    return ToolCall(name, _as_json(given[0] if given else {}), call_id)


def _as_json(arguments: object) -> str:
    """Returns arguments as JSON text. Raises Unreadable if they are no object; ValueError for infinite numbers."""
    if not isinstance(arguments, dict):
        raise Unreadable("arguments must be an object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: no UTF-8 can hold it, an escape sequence can
        return json.dumps(arguments)
    return text


def _typed(value: str, schema: object) -> Any:
    """Returns a value that was written as text, in the type of its schema; the text where it does not fit."""
    kinds = _kinds(schema)
    if not kinds or "string" in kinds:
        return None if value == "null" and "null" in kinds else value
    try:
        return json.loads(value, parse_constant=str)
    except (ValueError, RecursionError):
        # Some write Python's names.
        return {"True": True, "False": False, "None": None}.get(value, value)


def _kinds(schema: object) -> set[str]:
    """Returns the types that a JSON schema, or a list of some, allows at its top; none if it does not say."""
    if isinstance(schema, str):
        return {schema}
    if isinstance(schema, list):
        return {kind for part in schema for kind in _kinds(part)}
    if isinstance(schema, Mapping):
        return {kind for key in ("type", "anyOf", "oneOf") for kind in _kinds(schema.get(key))}
    return set()


_STRING = re.compile(r"""([a-zA-Z]*)("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')""", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = "\n\\'\"abfnrtv01234567xNuU"
_CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's names, which models mix up with Python's."""


def _python_calls(source: str) -> list[ToolCall]:
    """Returns the calls in a list of Python's. Raises Unreadable if it has something else."""
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


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise Unreadable("a call must name all its arguments")
    name = ast.unparse(node.func)
    if not _NAME.fullmatch(name):
        raise Unreadable("a call must have a name")
    return ToolCall(name, _as_json({keyword.arg: _literal(keyword.value) for keyword in node.keywords}))


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
