"""Converts requests to /v1/responses to chats: items of the input become messages, other names OpenAI's for chats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider_gateway.asks import Ask, chat_ask, text_format
from outrider_gateway.chats import Chat, content_text, fields, kind_of, mapping, text_field, tool_names
from outrider_gateway.errors import invalid, shown
from outrider_gateway.parameters import ChatParameters, ResponseParameters, SamplingParameters
from outrider_gateway.tools.calls import ToolCallFormat

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that asks for log-probabilities."""
REASONING = "reasoning.encrypted_content"
"""Value of `include` without effect here, as there are no reasoning items. Clients that store nothing always send
it."""
_PARTS = ("input_text", "output_text", "text")
_OF_PARTS = ("annotations", "logprobs", "prompt_cache_breakpoint")
_OF_ITEMS = ("id", "status", "phase", "created_by")
"""Fields of parts and items in answers, which have no meaning in a request."""


def response_ask(given: ResponseParameters, tool_call_format: ToolCallFormat) -> Ask:
    """Returns what a request to /v1/responses asks for. Raises ApiError.

    Args:
        given: The request.
        tool_call_format: How the model writes calls of tools.
    """
    chat, has_logprobs = _chat(given), _wants_logprobs(given)
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given.tools or ())]
    as_chat = ChatParameters.model_construct(
        **given.set_of(SamplingParameters),
        messages=chat.messages,
        max_completion_tokens=given.max_output_tokens,
        stop=given.stop,
        logprobs=has_logprobs,
        top_logprobs=given.top_logprobs if has_logprobs else None,
        tools=tools or None,
        tool_choice=_tool_choice(given.tool_choice),
        parallel_tool_calls=given.parallel_tool_calls,
        chat_template_kwargs=given.chat_template_kwargs,
    )
    renamed = [
        *chat.renamed,
        *tool_names(len(tools), "parameters"),
        ("tool_choice.function", "tool_choice"),
        ("sampling.max_tokens", "max_output_tokens"),
    ]
    if (structure := _structure(given)) is not None:
        as_chat.structured_outputs = dict(structure)
        renamed += [("structured_outputs.json", "text.format.schema"), ("structured_outputs", "text.format")]
    return chat_ask(as_chat, tool_call_format, renamed)


def _chat(given: ResponseParameters) -> Chat:
    chat = Chat()
    if given.instructions is not None:
        chat.add("system", given.instructions, "instructions")
    if isinstance(given.input, str):
        chat.add("user", given.input, "input")
        return chat
    if not isinstance(given.input, list) or not given.input:
        rule = f"must be a text or a list of items, and not empty, got {shown(given.input)}"
        raise invalid("input", rule, code="invalid_type")
    for index, item in enumerate(given.input):
        _add(chat, item, f"input[{index}]")
    return chat


def _add(chat: Chat, item: object, place: str) -> None:
    # A message may omit its type.
    item = {"type": "message", **mapping(item, place)}
    kind = kind_of(item, place, ("message", "function_call", "function_call_output"))
    if kind == "message":
        told = fields(item, place, {"type", "role", "content"}, _OF_ITEMS)
        role = text_field(told, "role", place)
        content = content_text(told.get("content"), f"{place}.content", _PARTS, _OF_PARTS)
        chat.add(role, content, place)
    elif kind == "function_call":
        told = fields(item, place, {"type", "call_id", "name", "arguments"}, _OF_ITEMS)
        call_id, name, arguments = (text_field(told, each, place) for each in ("call_id", "name", "arguments"))
        chat.add_call(call_id, name, arguments, place)
    else:
        told = fields(item, place, {"type", "call_id", "output"}, _OF_ITEMS)
        output = content_text(told.get("output"), f"{place}.output", _PARTS, _OF_PARTS)
        chat.add("tool", output, place, tool_call_id=text_field(told, "call_id", place))


def _tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    kind_of(tool, place, ("function",))
    told = fields(tool, place, {"type", "name", "description", "parameters", "strict"})
    if "parameters" in told:
        mapping(told["parameters"], f"{place}.parameters")
    return {"type": "function", "function": {name: value for name, value in told.items() if name != "type"}}


def _tool_choice(given: object) -> object:
    if not isinstance(given, dict):
        return given
    kind_of(given, "tool_choice", ("function",))
    told = fields(given, "tool_choice", {"type", "name"})
    return {"type": "function", "function": {"name": text_field(told, "name", "tool_choice")}}


def _structure(given: ResponseParameters) -> Mapping[str, Any] | None:
    """Returns the structure that `text` asks for."""
    text = fields(given.text or {}, "text", {"format", "verbosity"})
    if text.get("verbosity", "medium") != "medium":
        raise invalid("text.verbosity", f'must be unset or "medium", got {shown(text["verbosity"])}')
    if "format" not in text:
        return None
    asked = fields(text["format"], "text.format", {"type", "name", "description", "schema", "strict"})
    structure = text_format(asked.get("type"), asked.get("schema"), "text.format.type", "text.format.schema")
    if structure is not None and given.structured_outputs is not None:
        raise invalid("text.format", "must be unset with structured_outputs: both say what the text is")
    return structure


def _wants_logprobs(given: ResponseParameters) -> bool:
    included = given.include or ()
    for index, name in enumerate(included):
        if name not in (LOGPROBS, REASONING):
            rule = f'must be "{LOGPROBS}" or "{REASONING}", got {shown(name)}'
            raise invalid(f"include[{index}]", rule, code="unsupported_value")
    if given.top_logprobs and LOGPROBS not in included:
        raise invalid("top_logprobs", f'must be unset or 0 unless include has "{LOGPROBS}"')
    return LOGPROBS in included
