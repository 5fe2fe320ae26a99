r"""The grammar of tool calls: it holds a text to the tools that a chat offers and to their schemas.

A text needs one if `tool_choice` asks for a call, if a tool is strict, or if `parallel_tool_calls` is false. The
grammar is written in the Lark dialect of llguidance. Text is free up to an opening marker, the trigger; after it only a
call is allowed, as its schema says. `calls` parses the resulting text.

| `tool_choice` | the text | arguments |
|---|---|---|
| "auto" | is free, but each marker begins a call of one of the tools | obey the schema of a strict tool |
| "required" | is calls and nothing else, at least one | obey the schema, unless `strict` is false |
| a function | is one call of it | obey the schema, unless `strict` is false |

Other arguments are any JSON object. A tool without `parameters` has none, as with OpenAI: its arguments are `{}`.

Markers are special tokens with some models and plain text with others; a client cannot know which. So the grammar has
them as text, and `special_tokens_as_text` makes the server, which knows, match every token by the text that it is
written as. Without that, llguidance (1.9) lets an added token that is special, or written as a tag, match only its own
name: `"<tool_call>"` would not match Qwen's token, and `<tool_call>` would not compile where no token has that name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from outrider_client.chats import ChatOptions, OfferedTool, fields_of, function_of, offered_tools, sendable
from outrider_client.requests import GenerateOptions
from outrider_gateway.tools.calls import CALL_BEGIN, CALL_END, CALL_SEPARATOR, CALLS_BEGIN, CALLS_END, ToolCallFormat

_NAME = re.compile(r"[\w.:/-]+")
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# The layout in which chat templates write calls, and so the one that models have learnt.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class UnheldCalls(ValueError):
    """No grammar can be written for the way in which the model writes calls."""

    def __init__(self, option: str, reason: str, format: ToolCallFormat) -> None:
        """`option`: asks for the grammar. `reason`: what it asks for, in words."""
        known = ", ".join(each.value for each in _RULES)
        self.option, self.reason = option, reason
        self.rule = f"needs calls that a schema can hold, as those of {known}: this model writes {format.value}"
        if format is ToolCallFormat.AUTO:
            # Name the variable, too: `outrider up` starts a gateway, and takes its variables.
            self.rule = (
                "needs to know how this model writes calls, and its chat template does not tell: start the gateway "
                f"with --tool-call-format (or OUTRIDER_GATEWAY_TOOL_CALL_FORMAT) {known}"
            )
        super().__init__(f"{reason} {self.rule}")


def hold_calls(
    options: Mapping[str, Any],
    format: ToolCallFormat,
    choice: str | Mapping[str, Any] | None = None,
    is_parallel: bool | None = None,
) -> GenerateOptions:
    """Returns the options of a generation that calls tools: the tools that the model is shown, and the grammar that
    holds it to them, if one is needed.

    Args:
        options: The other options; `tools` has the tools in OpenAI's shape.
        format: How the model writes calls.
        choice: Has the model call tools as it likes ("auto", the default), at least once ("required"), once the
            function of `{"type": "function", "function": {"name": ...}}`, or never: with "none" it is shown no tools.
        is_parallel: False: the text ends after its first call.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: Options contradict each other, or no grammar can be written for a tool.
        UnheldCalls: No grammar can be written for the format.
    """
    tools = offered_tools(options)
    mode, name = _choice(choice, tools)
    if not tools and is_parallel is not None:
        raise ValueError("parallel_tool_calls must be unset without tools")
    told = _shown(options, tools, mode)
    is_required = mode == "required"
    needs = {
        ("tool_choice", f"tool_choice {name or 'required'!r}"): is_required,
        ("tools", "strict tools"): any(tool.strict for tool in tools),
        ("parallel_tool_calls", "parallel_tool_calls false"): is_parallel is False,
    }
    reason = next((reason for reason, is_needed in needs.items() if is_needed), None)
    if "tools" in told and reason is not None:
        _check_room(options, reason[1])
        if format not in _RULES:
            raise UnheldCalls(*reason, format)
        called = [tool for tool in tools if name in (None, tool.message.name)]
        names, schemas = [_name(tool) for tool in called], [_schema(tool, is_required=is_required) for tool in called]
        is_single = is_parallel is False or name is not None
        grammar = "\n".join(["%llguidance {}", *_RULES[format](names, is_required, is_single), *_arguments(schemas)])
        told["structured_outputs"] = {"grammar": grammar, "special_tokens_as_text": True}
        told["skip_special_tokens"] = False
    return cast(GenerateOptions, told)


def shown_tools(options: Mapping[str, Any], choice: str | Mapping[str, Any] | None = None) -> ChatOptions:
    """Returns the options of a chat with the tools that the model is shown. Arguments and errors are those of
    `hold_calls`."""
    tools = offered_tools(options)
    mode, _ = _choice(choice, tools)
    return cast(ChatOptions, _shown(options, tools, mode))


def _shown(options: Mapping[str, Any], tools: Sequence[OfferedTool], mode: str) -> dict[str, Any]:
    told = {name: value for name, value in options.items() if name != "tools"}
    if tools and mode != "none":
        told["tools"] = [tool.message for tool in tools]
    return told


def _choice(given: str | Mapping[str, Any] | None, tools: Sequence[OfferedTool]) -> tuple[str, str | None]:
    """Returns "auto", "none" or "required"; and the one function to be called, None for any of the tools."""
    if given is None or given == "none":
        return given or "auto", None
    if not isinstance(given, Mapping) and given not in ("auto", "required"):
        rule = 'must be "auto", "none", "required", or {"type": "function", "function": {"name": ...}}'
        raise ValueError(f"tool_choice {rule}, got {given!r}")
    if not tools:
        raise ValueError(f'tool_choice must be unset or "none" without tools, got {given!r}')
    if not isinstance(given, Mapping):
        return given, None
    function = function_of(fields_of(given, ("type", "function"), "tool_choice"), ("name",), "tool_choice")
    name = sendable(function.get("name"), "tool_choice.function.name")
    if name not in (names := [tool.message.name for tool in tools]):
        raise ValueError(f"tool_choice.function.name must be one of {', '.join(names)}, got {name!r}")
    return "required", name


def _check_room(options: Mapping[str, Any], reason: str) -> None:
    if "structured_outputs" in options:
        raise ValueError(f"structured_outputs must be unset with {reason}: both say what the text is")
    if options.get("skip_special_tokens"):
        raise ValueError(f"skip_special_tokens must be unset or false with {reason}: a marker may be a special token")


def _name(tool: OfferedTool) -> str:
    if not _NAME.fullmatch(tool.message.name):
        raise ValueError(f"{tool.place}.name must be of letters, digits and _.:/- only, got {tool.message.name!r}")
    return tool.message.name


def _schema(tool: OfferedTool, *, is_required: bool) -> dict[str, Any]:
    """Returns the schema that the arguments of a call must obey."""
    if not tool.message.parameters:
        return _NO_ARGUMENTS
    if not (is_required if tool.strict is None else tool.strict):
        return {"type": "object"}
    try:
        schema = json.loads(tool.message.parameters)
    except ValueError as error:
        raise ValueError(f"{tool.place}.parameters must be JSON: {error}") from None
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise ValueError(f'{tool.place}.parameters must be a schema of "type": "object"')
    return {**schema, "type": "object"}


# The rules of each format. `names` are those of the tools; rule `arguments_0` has the arguments of the first one. TEXT
# ends with the lazy rule around it, TEXT followed by a marker: at the first marker.


def _hermes(names: Sequence[str], is_required: bool, is_single: bool) -> list[str]:
    opener = "<tool_call>"
    call = r'call: "\n" object "\n</tool_call>"'
    if is_required:
        start = f"start: {_times(f'{_text(opener)} call', _text(chr(10)), is_single)}"
    else:
        start = _free({opener: "call"}, is_single)
    return [start, call, _objects(names, "arguments")]


def _mistral(names: Sequence[str], is_required: bool, is_single: bool) -> list[str]:
    opener = "[TOOL_CALLS]"
    # A list until tokenizer v10; a name, perhaps followed by an id, since v11.
    calls = f'calls: " "? "[" {_times("object", _text(", "), is_single)} "]" | named'
    named = _either("named", [f'{_text(name)} id? "[ARGS]" arguments_{index}' for index, name in enumerate(names)])
    call_id = 'id: "[CALL_ID]" /[a-zA-Z0-9]{9}/'
    if is_required:
        start = f"start: {_times(f'{_text(opener)} calls', '', is_single)}"
    else:
        start = _free({opener: "calls"}, is_single)
    return [start, calls, named, call_id, _objects(names, "arguments")]


def _llama3_json(names: Sequence[str], is_required: bool, is_single: bool) -> list[str]:
    opener = "<|python_tag|>"
    calls = f"calls: {_times('object', _text('; '), is_single)}"
    if is_required:
        start = f"start: {_text(opener)}? calls"
    else:
        # A brace at the beginning is a marker, too. Nothing may follow the calls. White space is Python's.
        spaces = r"\s\x1c-\x1f"
        text = rf"TEXT: /[{spaces}]*([^{spaces}{{](?s:.*))?/"
        start = f"start: TEXT | calls | opened calls\nopened[lazy]: TEXT {_text(opener)}\n{text}"
    return [start, calls, _objects(names, "parameters")]


def _deepseek_v3(names: Sequence[str], is_required: bool, is_single: bool) -> list[str]:
    begin, end, separator = _text(CALL_BEGIN), _text(CALL_END), _text(CALL_SEPARATOR)
    calls = f"calls: {_times(f'{begin} call', _text(chr(10)) + '?', is_single)} {_text(CALLS_END)}"
    # V3.1 has the name before the separator. V3 has the kind of tool there; name and arguments follow in a code block.
    forms = []
    for index, name in enumerate(names):
        forms.append(f"{_text(name)} {separator} arguments_{index} {end}")
        block = _text(f"function{CALL_SEPARATOR}{name}\n```json\n")
        forms.append(rf'{block} arguments_{index} "\n```" "\n"? {end}')
    if is_required:
        start = f"start: {_text(CALLS_BEGIN)} calls"
    else:
        start = _free({CALLS_BEGIN: "calls", CALL_BEGIN: "call"}, is_single)
    return [start, calls, _either("call", forms)]


def _free(calls: Mapping[str, str], is_single: bool) -> str:
    """Returns the rules of free text with calls in it. `calls` has, by marker, the rule of what follows it. If only one
    call is allowed, the text ends after it."""
    opened = [f"opened_{index}[lazy]: TEXT {_text(marker)}" for index, marker in enumerate(calls)]
    either = " | ".join(f"opened_{index} {rule}" for index, rule in enumerate(calls.values()))
    start = f"start: TEXT | {either}" if is_single else f"start: ({either})* TEXT"
    return "\n".join([start, *opened, "TEXT: /(?s:.*)/"])


def _arguments(schemas: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the rules of the arguments. Each schema is a document of its own, so that its references hold."""
    return [
        f"arguments_{index}: %json {json.dumps({'x-guidance': _LAYOUT, **schema})}"
        for index, schema in enumerate(schemas)
    ]


def _objects(names: Sequence[str], key: str) -> str:
    """Returns the rule of a call that is a JSON object."""
    begins = [_text(f'{{"name": {_text(name)}, "{key}": ') for name in names]
    return _either("object", [f'{begin} arguments_{index} "}}"' for index, begin in enumerate(begins)])


def _either(rule: str, forms: Sequence[str]) -> str:
    return f"{rule}: {' | '.join(forms)}"


def _times(rule: str, separator: str, is_single: bool) -> str:
    """Returns the rule once if `is_single`; otherwise once or more, with a separator in between."""
    return rule if is_single else f"{rule} ({separator} {rule})*"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_RULES = {
    ToolCallFormat.HERMES: _hermes,
    ToolCallFormat.MISTRAL: _mistral,
    ToolCallFormat.LLAMA3_JSON: _llama3_json,
    ToolCallFormat.DEEPSEEK_V3: _deepseek_v3,
}
"""The formats whose arguments are JSON. The others have Python's literals, or texts between tags, which no schema
holds."""
