"""Tool calls in the text that a model writes: each family of models marks them in its own way.

A call begins once its name and the beginning of its arguments have been read, and stays a call from then on: if the
text ends, or goes on as no call can, the arguments end there, and the rest is text. What proves to be no call before it
has begun stays part of the text. White space after a call is dropped unless text follows it. White space at the
beginning of a text is dropped if a call follows.

>>> parse_tool_calls('Let me see.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>')
('Let me see.', [ToolCall(name='weather', arguments='{"city": "Rome"}', id='', is_complete=True)])
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeAlias

from outrider_gateway.tools.events import CallBegun, CallEvents, CallGrown, Event, ToolCall
from outrider_gateway.tools.growing_text import GrowingText, Reading, Unreadable
from outrider_gateway.tools.python_calls import NAME, python_calls

__all__ = ["CallBegun", "CallGrown", "Event", "ToolCall", "ToolCallFormat", "ToolCallStream", "parse_tool_calls"]


class ToolCallFormat(Enum):
    """A `ToolCallFormat` says how a model writes calls. The names are those of vLLM's parsers."""

    AUTO = "auto"
    """All forms below whose marker begins no other text; bare forms are left out."""
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

    @classmethod
    def of_template(cls, chat_template: str) -> ToolCallFormat:
        """Returns the format of the calls in a chat template, recognized by its markers. AUTO if the template has none
        of them, or those of a family that is not known here.

        >>> ToolCallFormat.of_template("{{ '[TOOL_CALLS]' + calls | tojson }}")
        <ToolCallFormat.MISTRAL: 'mistral'>
        """
        if any(marker in chat_template for marker in _UNKNOWN_MARKERS):
            return cls.AUTO
        return next((cls(name) for marker, name in _TEMPLATE_MARKERS if marker in chat_template), cls.AUTO)


_TEMPLATE_MARKERS = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁call▁begin｜>", "deepseek_v3"),
    ("<|python_tag|>", "llama3_json"),
    # Llama 3.2 has no marker: its template tells the model in words what a call is.
    ('"parameters": dictionary of argument name', "llama3_json"),
    ("<|python_start|>", "pythonic"),
)
"""Markers in a chat template, and the format that each stands for. The first one found counts."""
_UNKNOWN_MARKERS = ("<arg_key>",)
"""Markers of calls that only look like one of these formats: those of GLM."""


def parse_tool_calls(
    text: str, format: ToolCallFormat | str = ToolCallFormat.AUTO, *, tools: Iterable[Mapping[str, Any]] = ()
) -> tuple[str, list[ToolCall]]:
    """Splits a model's text into the text around its calls, and the calls.

    Args:
        text: The whole text.
        format: How the model writes calls.
        tools: The tools that the model was offered, in OpenAI's shape. "qwen3_coder", which writes all values as text,
            takes their types from here; without them, values stay texts.

    Raises:
        ValueError: There is no such format.
    """
    stream = ToolCallStream(format, tools=tools)
    events = [*stream.feed(text), *stream.finish()]
    content = "".join(event for event in events if isinstance(event, str))
    return content, [event for event in events if isinstance(event, ToolCall)]


class ToolCallStream:
    """Splits a growing text. Joined, its events are what `parse_tool_calls` returns, however the text is cut.

    Text comes as soon as it cannot be the beginning of a call, and arguments as they are written. A call comes in one
    piece, when it is complete, if its arguments stand before its name, with "pythonic", and in a list of Mistral's,
    where the id comes last. An id after arguments that were already passed on comes with the whole call, not with its
    beginning.

    >>> stream = ToolCallStream("hermes")
    >>> stream.feed("One moment.<tool")
    ['One moment.']
    >>> stream.feed('_call>{"name": "now", "arguments": {"zone": "C')
    [CallBegun(name='now', id=''), CallGrown(arguments='{"zone": "C')]
    >>> stream.feed('ET"}}</tool_call>')
    [CallGrown(arguments='ET"}'), ToolCall(name='now', arguments='{"zone": "CET"}', id='', is_complete=True)]
    >>> stream.finish()
    []
    """

    def __init__(
        self, format: ToolCallFormat | str = ToolCallFormat.AUTO, *, tools: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """The arguments are those of `parse_tool_calls`."""
        self._grammar = _grammar(_format(format), _schemas(tools))
        self._text = GrowingText()
        self._told = CallEvents(self._text)
        self._space = ""  # white space that is part of the text only if text comes after it
        self._reading = self._read()

    def feed(self, piece: str) -> list[Event]:
        """Takes the next piece of the text; returns the events that it decides. Raises RuntimeError after `finish`."""
        if self._text.is_over:
            raise RuntimeError("the text is finished: a new one needs a new stream")
        self._text.text += piece
        next(self._reading)
        return self._told.take()

    def finish(self) -> list[Event]:
        """Returns the remaining events. No more text may follow."""
        self._text.is_over = True
        # With no more text to wait for, it reads to the end.
        for _ in self._reading:
            raise AssertionError("nothing may wait for text that never comes")
        return self._told.take()

    def _read(self) -> Reading[None]:
        text, marked = self._text, self._grammar.marked
        self._space = yield from text.spaces()
        has_calls = False
        if (sign := (yield from text.ahead())) in self._grammar.bare:
            has_calls = yield from self._read_calls(self._grammar.bare[sign], sign)
        while marker := (yield from text.before(marked, self._emit)):
            text.position += len(marker)
            has_calls |= yield from self._read_calls(marked[marker], marker)
        if self._space and not has_calls:
            self._told.add_content(self._space)

    def _read_calls(self, form: _Form, opener: str) -> Reading[bool]:
        """Reads the calls of one form. Returns False if there are none; then the opener alone was read, as text."""
        text, told, start = self._text, self._told, self._text.position
        told.open()
        try:
            yield from form.read(text, told)
            told.accept()
        # ValueError: Unreadable, or a value that cannot be written as JSON.
        except (ValueError, RecursionError):
            if not told.close():
                # A bare form begins at its opener, a marked one after it.
                text.position = start + (len(opener) if form.is_bare else 0)
                self._emit(opener)
                return False
        self._space = yield from text.spaces()
        if form.trailer and (yield from text.skips(form.trailer)):
            self._space = yield from text.spaces()
        return True

    def _emit(self, content: str) -> None:
        if content:
            self._told.add_content(self._space + content)
            self._space = ""
        if self._text.position > len(self._text.text) // 2:
            self._text.forget()


# The forms of each format.

Read: TypeAlias = Callable[[GrowingText, CallEvents], Reading[None]]
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schemas of parameters, by function and by parameter."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Holds a way to write calls after an opener."""

    read: Read
    trailer: str = ""
    """A marker that is dropped if it comes after the calls."""
    is_bare: bool = False
    """True if the form begins with the opener itself, and may only be the whole text."""


@dataclass(frozen=True, slots=True)
class _Grammar:
    """Holds the forms of a format by their openers."""

    marked: Mapping[str, _Form]
    bare: Mapping[str, _Form]
    """Forms whose opener must be the first character of the text."""


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
            # The model sometimes forgets the outer marker before its call, but not the one after it.
            bare = _Form(partial(_read_function, schemas), "</tool_call>")
            return _Grammar({"<tool_call>": _Form(coder), "<function=": bare}, {})
    either = _Form(partial(_read_tool_call, coder))
    others = {"<|python_tag|>": llama, "<|python_start|>": pythonic}
    return _Grammar({"<tool_call>": either, **mistral, **deepseek, **others}, {})


# How each form is read. Its opener has been read before.

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_PARAMETER_ENDS = ("\n</parameter>", "</parameter>")
CALL_BEGIN, CALL_SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _read_tool_call(coder: Read, text: GrowingText, told: CallEvents) -> Reading[None]:
    yield from text.spaces()
    is_json = (yield from text.ahead()) == "{"
    yield from (_read_hermes if is_json else coder)(text, told)


def _read_hermes(text: GrowingText, told: CallEvents) -> Reading[None]:
    yield from text.spaces()
    yield from _read_object(text, told, "arguments")
    yield from _read_end(text)


def _read_qwen3_coder(schemas: Schemas, text: GrowingText, told: CallEvents) -> Reading[None]:
    yield from text.spaces()
    yield from text.expect("<function=")
    yield from _read_function(schemas, text, told)
    yield from _read_end(text)


def _read_function(schemas: Schemas, text: GrowingText, told: CallEvents) -> Reading[None]:
    name = yield from _read_name(text)
    yield from text.expect(">")
    num_parameters = 0
    while True:
        yield from text.spaces()
        is_over = yield from text.skips("</function>")
        if not is_over:
            yield from text.expect("<parameter=")
            parameter = yield from _read_name(text)
            yield from text.expect(">")
        if not num_parameters:
            told.begin(name)
            told.grow("{")
        if is_over:
            told.grow("}")
            told.end()
            return
        told.grow(f"{', ' if num_parameters else ''}{_json_text(parameter)}: ")
        yield from _read_parameter(text, told, _kinds(schemas.get(name, {}).get(parameter, {})))
        num_parameters += 1


def _read_parameter(text: GrowingText, told: CallEvents, kinds: Collection[str]) -> Reading[None]:
    """Reads the value of a parameter. `kinds`: the types that it may have; empty means any."""
    # One line break on either side belongs to the format.
    yield from text.skips("\n")
    if kinds and ("string" not in kinds or "null" in kinds):
        # Only the whole value tells its type.
        value = yield from text.until("</parameter>")
        told.grow(_json_text(_typed(value.removesuffix("\n"), kinds)))
        return
    told.grow('"')
    if not (end := (yield from text.before(_PARAMETER_ENDS, lambda piece: told.grow(_json_text(piece)[1:-1])))):
        raise Unreadable("the value does not end")
    yield from text.expect(end)
    told.grow('"')


def _read_end(text: GrowingText) -> Reading[None]:
    yield from text.spaces()
    # A model may end after a complete call without closing it.
    if (yield from text.ahead()):
        yield from text.expect("</tool_call>")


def _read_mistral(text: GrowingText, told: CallEvents) -> Reading[None]:
    yield from text.spaces()
    if (yield from text.ahead()) == "[":
        # The id, which the model's own chat template asks for, comes last. So no call is passed on before its end.
        values = yield from text.json()
        if not values:
            raise Unreadable("there must be a call")
        for value in values:
            told.wait(_call(value, "arguments"))
        return
    name, call_id = (yield from _read_name(text)), ""
    if (yield from text.skips("[CALL_ID]")):
        call_id = yield from _read_name(text)
    yield from text.skips("[ARGS]")
    yield from text.spaces()
    yield from _read_arguments(text, told, name, call_id)


def _read_llama3_json(text: GrowingText, told: CallEvents) -> Reading[None]:
    is_first = True
    while is_first or (yield from text.skips(";")):
        yield from text.spaces()
        if not is_first and not (yield from text.ahead()):
            break
        yield from _read_object(text, told, "parameters", "arguments", is_marked=False)
        is_first = False
        yield from text.spaces()
    yield from _read_nothing(text)


def _read_pythonic(text: GrowingText, told: CallEvents) -> Reading[None]:
    yield from text.spaces()
    start = text.position
    # Waiting for the closing bracket alone would hold back every text that begins with a bracket.
    yield from text.expect("[")
    yield from text.spaces()
    yield from _read_name(text)
    yield from text.spaces()
    yield from text.expect("(")
    text.position = start
    for name, arguments in python_calls((yield from text.brackets())):
        told.wait(ToolCall(name, _as_json(arguments)))
    yield from text.skips("<|python_end|>")
    yield from text.spaces()
    yield from _read_nothing(text)


def _read_deepseek_calls(text: GrowingText, told: CallEvents) -> Reading[None]:
    yield from text.spaces()
    yield from text.expect(CALL_BEGIN)
    yield from _read_deepseek_call(text, told)


def _read_deepseek_call(text: GrowingText, told: CallEvents) -> Reading[None]:
    name = yield from _read_name(text)
    yield from text.expect(CALL_SEPARATOR)
    yield from text.spaces()
    # V3.1 has the name before the separator. V3 has the kind of tool there; name and arguments follow in a code block.
    is_v3 = (yield from text.ahead()) != "{"
    if is_v3:
        name = yield from _read_name(text)
        yield from text.spaces()
        yield from text.expect("```json")
        yield from text.spaces()
    yield from _read_arguments(text, told, name)
    yield from text.spaces()
    if is_v3:
        yield from text.expect("```")
        yield from text.spaces()
    yield from text.expect(CALL_END)


def _read_object(text: GrowingText, told: CallEvents, *keys: str, is_marked: bool = True) -> Reading[None]:
    """Reads a call that is a JSON object. The arguments are those of `_call`."""
    start = text.position
    try:
        given = yield from _read_head(text, keys)
    except Unreadable:
        # Its parts may stand in another order: then only the whole object tells which call it is.
        text.position = start
        told.wait(_call((yield from text.json()), *keys, is_marked=is_marked))
        return
    yield from _begin_arguments(text, told, given["name"], given.get("id", ""))
    try:
        behind = yield from _read_tail(text, {"id", "type"} - given.keys())
    except Unreadable:
        told.end()  # the arguments were whole
        raise
    told.end(behind.get("id", ""))
    told.accept()


def _read_head(text: GrowingText, keys: Sequence[str]) -> Reading[dict[str, str]]:
    """Reads a JSON object up to its arguments, which have one of these keys. Returns the fields before them, at least
    the name. Raises Unreadable if it is written in another way."""
    given: dict[str, str] = {}
    yield from text.expect("{")
    while (key := (yield from _read_key(text, {"name", "id", "type", *keys} - given.keys()))) not in keys:
        given[key] = yield from text.json_string()
        yield from text.json_spaces()
        yield from text.expect(",")
    if not given.get("name") or (yield from text.ahead()) != "{":
        raise Unreadable("a name must stand before the arguments, which are an object")
    return given


def _read_tail(text: GrowingText, keys: Set[str]) -> Reading[dict[str, str]]:
    """Reads the rest of a JSON object after its arguments. Returns the fields there. `keys` are those allowed."""
    given: dict[str, str] = {}
    yield from text.json_spaces()
    while (yield from text.skips(",")):
        key = yield from _read_key(text, keys - given.keys())
        given[key] = yield from text.json_string()
        yield from text.json_spaces()
    yield from text.expect("}")
    return given


def _read_key(text: GrowingText, keys: Collection[str]) -> Reading[str]:
    """Reads the next key of a JSON object, which must be one of these, up to its value."""
    yield from text.json_spaces()
    if (key := (yield from text.json_string())) not in keys:
        raise Unreadable(f"one of {', '.join(sorted(keys))} must come next")
    yield from text.json_spaces()
    yield from text.expect(":")
    yield from text.json_spaces()
    return key


def _read_arguments(text: GrowingText, told: CallEvents, name: str, call_id: str = "") -> Reading[None]:
    """Reads the arguments of a call. The call begins and ends with them."""
    yield from _begin_arguments(text, told, name, call_id)
    told.end()


def _begin_arguments(text: GrowingText, told: CallEvents, name: str, call_id: str) -> Reading[None]:
    """Reads the arguments of a call. The call begins with them."""
    if (yield from text.ahead()) != "{":
        raise Unreadable("arguments must be an object")
    told.begin(name, call_id)
    yield from text.json_pieces(told.grow)


def _read_name(text: GrowingText) -> Reading[str]:
    name = yield from text.run(NAME)
    if not name:
        raise Unreadable("a name must come next")
    return name


def _read_nothing(text: GrowingText) -> Reading[None]:
    if sign := (yield from text.ahead()):
        raise Unreadable(f"the text must end, but goes on with {sign!r}")


# From values to calls.


def _call(value: Any, *keys: str, is_marked: bool = True) -> ToolCall:
    """Returns the call that a JSON value describes. Raises Unreadable if it describes none.

    Args:
        value: The JSON value.
        keys: Names that the arguments may have.
        is_marked: False if only the value itself shows that it is a call: then it must have arguments.
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
    return _json_text(arguments)


def _json_text(value: object) -> str:
    """Returns a value as JSON text. Raises ValueError for infinite numbers."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: no UTF-8 can hold it, an escape sequence can
        return json.dumps(value)
    return text


def _typed(value: str, kinds: Collection[str]) -> Any:
    """Converts a value written as text to one of these types of JSON schemas; returns the text if it fits none."""
    if "string" in kinds:
        return None if value == "null" and "null" in kinds else value
    try:
        return json.loads(value, parse_constant=str)
    except (ValueError, RecursionError):
        # Some models write Python's names.
        return {"True": True, "False": False, "None": None}.get(value, value)


def _kinds(schema: object) -> set[str]:
    """Returns the types that a JSON schema, or a list of schemas, allows at the top level; empty if it does not say."""
    if isinstance(schema, str):
        return {schema}
    if isinstance(schema, list):
        return {kind for part in schema for kind in _kinds(part)}
    if isinstance(schema, Mapping):
        return {kind for key in ("type", "anyOf", "oneOf") for kind in _kinds(schema.get(key))}
    return set()
