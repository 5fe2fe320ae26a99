r"""The grammar of tool calls: it holds a text to the tools that a chat offers and to their schemas.

A text needs one where `tool_choice` asks for a call, where a tool is strict, and where `parallel_tool_calls` is false;
`tool_call_format` says how the model marks its calls. A call is a schema behind a trigger: the grammar, in the Lark
dialect of llguidance, lets text be free up to an opening marker, and from there on allows nothing but a call. The text
that comes, `outrider_client.tool_calls` reads back.

| `tool_choice` | the text | arguments |
|---|---|---|
| "auto" | is free, but each marker begins a call of one of the tools | obey the schema of a strict tool |
| "required" | is calls and nothing else, at least one | obey the schema, unless `strict` is false |
| a function | is one call of it | obey the schema, unless `strict` is false |

Other arguments are any JSON object. A tool without `parameters` has none, as with OpenAI: its arguments are `{}`.

Markers are special tokens with some models, plain text with others, and a client cannot know. So the grammar has them
as text, and `special_tokens_as_text` makes the server, which knows, count every token as the text that it is written
as. Without that, llguidance (1.9) lets an added token that is special, or written as a tag, match its own name alone:
`"<tool_call>"` would not match Qwen's token, and `<tool_call>` would not compile where no token has that name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from outrider_client.chats import OfferedTool, offered_tools, tool_choice
from outrider_client.tool_calls import CALL_BEGIN, CALL_END, CALL_SEPARATOR, CALLS_BEGIN, CALLS_END, ToolCallFormat

_NAME = re.compile(r"[\w.:/-]+")
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# As chat templates write calls, and so as models have learnt to.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tool_call_structure(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the structure that the options of a generation ask of its tool calls, as `structured_outputs` has it;
    None if they ask none.

    Args:
        options: The `GenerateOptions` that are set.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: Options contradict each other, or no grammar can be written for the format or for a tool.
    """
    tools = offered_tools(options)
    choice = tool_choice(options, tools)
    is_parallel, format = options.get("parallel_tool_calls"), _format(options.get("tool_call_format"))
    if not isinstance(is_parallel, bool | None):
        raise TypeError(f"parallel_tool_calls must be true or false, got {type(is_parallel).__name__}")
    if not tools:
        for name in ("parallel_tool_calls", "tool_call_format"):
            if name in options:
                raise ValueError(f"{name} must be unset without tools")
        return None
    is_required = choice.mode == "required"
    needs = {
        f"tool_choice {choice.name or 'required'!r}": is_required,
        "strict tools": any(tool.strict for tool in tools),
        "parallel_tool_calls false": is_parallel is False,
    }
    reasons = [reason for reason, is_needed in needs.items() if is_needed]
    if choice.mode == "none" or not reasons:
        return None
    _check_room(options, reasons[0])
    if format not in _RULES:
        known = ", ".join(each.value for each in _RULES)
        raise ValueError(f"tool_call_format must be one of {known} with {reasons[0]}, got {format.value!r}")
    called = [tool for tool in tools if choice.name in (None, tool.message.name)]
    names, schemas = [_name(tool) for tool in called], [_schema(tool, is_required=is_required) for tool in called]
    is_single = is_parallel is False or choice.name is not None
    grammar = [*_RULES[format](names, is_required, is_single), *_arguments(schemas)]
    return {"grammar": "\n".join(["%llguidance {}", *grammar]), "special_tokens_as_text": True}


def _format(given: object) -> ToolCallFormat:
    try:
        return ToolCallFormat.AUTO if given is None else ToolCallFormat(given)
    except ValueError:
        names = ", ".join(each.value for each in ToolCallFormat)
        raise ValueError(f"tool_call_format must be one of {names}, got {given!r}") from None


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


# The rules of each format: `names` are those of the tools, rule `arguments_0` has the arguments of the first one. TEXT
# ends where a lazy rule, TEXT with a marker behind it, comes to its end.


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
    # A list until tokenizer v10, a name since v11, which may have an id behind it.
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
        # A brace at the beginning is a marker, too; nothing may stand behind the calls. Python's white space.
        spaces = r"\s\x1c-\x1f"
        text = rf"TEXT: /[{spaces}]*([^{spaces}{{](?s:.*))?/"
        start = f"start: TEXT | calls | opened calls\nopened[lazy]: TEXT {_text(opener)}\n{text}"
    return [start, calls, _objects(names, "parameters")]


def _deepseek_v3(names: Sequence[str], is_required: bool, is_single: bool) -> list[str]:
    begin, end, separator = _text(CALL_BEGIN), _text(CALL_END), _text(CALL_SEPARATOR)
    calls = f"calls: {_times(f'{begin} call', _text(chr(10)) + '?', is_single)} {_text(CALLS_END)}"
    # V3.1 has the name before the separator; V3 the kind of tool, and behind it name and arguments in a code block.
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
    """Returns rules of free text with calls in it: by marker, the rule of what comes behind it. Where only one call is
    allowed, the text ends behind it."""
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
    """Returns the rule once, or any number of times, at least once, with a separator between them."""
    return rule if is_single else f"{rule} ({separator} {rule})*"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_RULES = {
    ToolCallFormat.HERMES: _hermes,
    ToolCallFormat.MISTRAL: _mistral,
    ToolCallFormat.LLAMA3_JSON: _llama3_json,
    ToolCallFormat.DEEPSEEK_V3: _deepseek_v3,
}
"""The formats whose arguments are JSON. In the others they are Python's literals, or texts between tags, which no
schema holds."""
