"""POST /v1/messages and /v1/messages/count_tokens: answer a chat in the shape of Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from pydantic_core import from_json

from outrider_client.chats import ChatOptions
from outrider_gateway import usage
from outrider_gateway.asks import CHAT_NAMES, Ask, text_format
from outrider_gateway.dialects.as_chat import (
    Chat,
    content_text,
    fields,
    kind_of,
    mapping,
    part_text,
    text_field,
    tool_names,
)
from outrider_gateway.dialects.blocks import CallBegun, CallDone, CallGrown, TextBegun, TextDone, TextGrown, blocks
from outrider_gateway.dialects.chat import ChatParameters, chat_ask
from outrider_gateway.dialects.dialect import Answer, Dialect
from outrider_gateway.errors import ApiError, FieldNames, invalid, shown
from outrider_gateway.exchange import Exchange
from outrider_gateway.models import token_ids_of
from outrider_gateway.outputs import Outputs
from outrider_gateway.parameters import (
    Int32,
    Parameters,
    SamplingParameters,
)
from outrider_gateway.replies import BegunCall, Ended, NumberedCall
from outrider_gateway.streams import EventStream, event_of
from outrider_gateway.tools.calls import ToolCallFormat


class MessageChat(Parameters):
    """Holds a chat in the shape of Anthropic's Messages API: all of a request that becomes the prompt."""

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: Any = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessageParameters(MessageChat, SamplingParameters):
    """Holds a request to /v1/messages."""

    max_tokens: Int32
    stop_sequences: list[str] | None = None


Event = dict[str, Any]
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def count_tokens(exchange: Exchange) -> None:
    """Returns the number of tokens that a request has for the model. Raises ApiError, ClientGone."""
    given = await exchange.parameters(MessageChat)
    chat, options, choice, names = await exchange.heavy(partial(message_prompt, given))
    await exchange.upstream.served_model(given.model, exchange.token)
    await exchange.answer({"input_tokens": len(await token_ids_of(exchange, chat, options, names, choice))})


class MessageAnswer(Answer[MessageParameters]):
    """Writes the text of a request as a message and its blocks."""

    id_prefix = "msg_"
    ping = event_of({"type": "ping"}, "ping")

    def __init__(self, *common: Any) -> None:
        """See `Answer` for the arguments."""
        super().__init__(*common)
        self._content: list[dict[str, Any]] = []

    async def whole(self, outputs: Outputs) -> dict[str, Any]:
        """Returns the answer that is not streamed."""
        last: Event = {}
        async for event in self._events(outputs):
            last = event if event["type"] == "message_delta" else last
        return {**self._message(), **last["delta"], "usage": last["usage"], "metrics": last["metrics"]}

    async def stream(self, outputs: Outputs, stream: EventStream) -> None:
        """Sends the answer piece by piece."""
        counts = {"input_tokens": outputs.generations[0].num_prompt_tokens, "output_tokens": 0}
        begun = {**self._message(), "stop_reason": None, "stop_sequence": None, "usage": counts}
        await stream.send(_encoded({"type": "message_start", "message": begun}))
        async for event in self._events(outputs):
            await stream.send(_encoded(event))

    def failed(self, error: ApiError) -> bytes:
        """Returns the event that ends a failed stream."""
        return _encoded(error.anthropic_envelope(self.session_id))

    def _message(self) -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}{self.session_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": list(self._content),
        }

    async def _events(self, outputs: Outputs) -> AsyncIterator[Event]:
        """Yields the events after the first one."""
        async for block in blocks(outputs, self.ask.tool_use):
            match block:
                case TextBegun():
                    yield _block_start(block.index, {"type": "text", "text": ""})
                case TextGrown():
                    if block.piece:
                        yield _block_delta(block.index, {"type": "text_delta", "text": block.piece})
                case TextDone():
                    self._content.append({"type": "text", "text": block.text})
                    yield {"type": "content_block_stop", "index": block.index}
                case CallBegun():
                    yield _block_start(block.index, {**_tool_use(block.call), "input": {}})
                case CallGrown():
                    told = {"type": "input_json_delta", "partial_json": block.arguments}
                    yield _block_delta(block.index, told)
                case CallDone():
                    self._content.append({**_tool_use(block.call), "input": _input(block.call)})
                    yield {"type": "content_block_stop", "index": block.index}
                case Ended():
                    yield self._ended(block)
                    yield {"type": "message_stop"}

    def _ended(self, ended: Ended) -> Event:
        result, stop_string = ended.result, ended.result.stop_string
        reason = _STOP_REASONS[ended.finish_reason]
        if reason == "end_turn" and stop_string is not None:
            reason = "stop_sequence"
        elif reason == "max_tokens" and result.num_output_tokens < self.given.max_tokens:
            reason = "model_context_window_exceeded"
        # Anthropic's clients add three counts to get the whole prompt; the last one is always 0 here.
        counts = {
            "input_tokens": result.num_prompt_tokens - result.num_cached_prompt_tokens,
            "cache_read_input_tokens": result.num_cached_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": result.num_output_tokens,
        }
        return {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop_string if reason == "stop_sequence" else None},
            "usage": {**counts, **usage.prediction_counts([result], self.num_predicted)},
            "metrics": usage.metrics([result]),
        }


def _encoded(event: Event) -> bytes:
    return event_of(event, event["type"])


def _tool_use(call: BegunCall | NumberedCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _input(call: NumberedCall) -> Any:
    """Returns the arguments of a call as an object; of an incomplete call, what can be read."""
    if call.is_complete:
        return json.loads(call.arguments)
    try:
        return from_json(call.arguments, allow_partial=True)
    except ValueError:  # half of a surrogate pair, which this parser does not read
        return {}


def _block_start(index: int, block: dict[str, Any]) -> Event:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _block_delta(index: int, delta: dict[str, Any]) -> Event:
    return {"type": "content_block_delta", "index": index, "delta": delta}


_OF_BLOCKS = ("cache_control", "citations", "caller")
_OF_TOOLS = ("cache_control", "eager_input_streaming", "input_examples")
"""Fields of blocks and tools that change nothing here."""
_BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "tool_use"), "system": ("text",)}
"""Kinds of blocks that a role may have."""


def message_ask(given: MessageParameters, tool_call_format: ToolCallFormat) -> Ask:
    """Returns what a request to /v1/messages asks for. Raises ApiError.

    Args:
        given: The request.
        tool_call_format: How the model writes calls of tools.
    """
    chat, options, renamed = _chat(given)
    choice = None if given.tool_choice is None else _tool_choice(given.tool_choice)
    as_chat = ChatParameters.model_construct(
        **given.set_of(SamplingParameters),
        **options,
        messages=chat.messages,
        max_tokens=given.max_tokens,
        stop=given.stop_sequences,
        tool_choice=choice,
        parallel_tool_calls=_parallel(given.tool_choice),
    )
    renamed += [
        ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
        ("sampling.stop", "stop_sequences"),
        ("stop", "stop_sequences"),
    ]
    if (structure := _structure(given)) is not None:
        if given.structured_outputs is not None:
            raise invalid("output_config.format", "must be unset with structured_outputs: both say what the text is")
        as_chat.structured_outputs = dict(structure)
        renamed += [
            ("structured_outputs.json", "output_config.format.schema"),
            ("structured_outputs", "output_config.format"),
        ]
    return chat_ask(as_chat, tool_call_format, renamed)


def message_prompt(given: MessageChat) -> tuple[list[dict[str, Any]], ChatOptions, object, FieldNames]:
    """Returns the chat of a request as a prompt, its options, its choice of tools, and the names of its fields. Raises
    ApiError."""
    _parallel(given.tool_choice)
    _structure(given)
    chat, options, renamed = _chat(given)
    choice = None if given.tool_choice is None else _tool_choice(given.tool_choice)
    return chat.messages, options, choice, FieldNames([*renamed, *CHAT_NAMES])


def _chat(given: MessageChat) -> tuple[Chat, ChatOptions, list[tuple[str, str]]]:
    """Returns everything that becomes the prompt, and the names of its fields."""
    chat = Chat()
    if given.system is not None:
        chat.add("system", content_text(given.system, "system", ("text",), _OF_BLOCKS), "system")
    for index, message in enumerate(given.messages):
        _add(chat, message, f"messages[{index}]")
    options = ChatOptions()
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given.tools or ())]
    if tools:
        options["tools"] = tools
    if given.chat_template_kwargs is not None:
        options["chat_template_kwargs"] = given.chat_template_kwargs
    last = chat.messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        # As in Anthropic's API: the answer continues a last message of the assistant.
        options["continue_final_message"] = True
    renamed = [*chat.renamed, *tool_names(len(tools), "input_schema"), ("tool_choice.function", "tool_choice")]
    return chat, options, renamed


def _add(chat: Chat, message: Mapping[str, Any], place: str) -> None:
    told = fields(message, place, {"role", "content"})
    role, content = text_field(told, "role", place), told.get("content")
    if role not in _BLOCKS:
        raise invalid(f"{place}.role", f'must be "user", "assistant" or "system", got {shown(role)}')
    if isinstance(content, str):
        chat.add(role, content, place)
        return
    if not isinstance(content, list) or not content:
        rule = f"must be a text or a list of blocks, and not empty, got {shown(content)}"
        raise invalid(f"{place}.content", rule, code="invalid_type")
    texts: list[str] = []
    calls: list[tuple[dict[str, Any], str]] = []
    for index, block in enumerate(content):
        where = f"{place}.content[{index}]"
        match kind_of(block, where, _BLOCKS[role]):
            case "text":
                texts.append(part_text(block, where, ("text",), _OF_BLOCKS))
            case "tool_use":
                calls.append((fields(block, where, {"type", "id", "name", "input"}, _OF_BLOCKS), where))
            case _:
                _add_result(chat, block, where)
    if texts:
        chat.add(role, "".join(texts), place)
    for call, where in calls:
        _add_call(chat, call, where)


def _add_call(chat: Chat, call: Mapping[str, Any], place: str) -> None:
    arguments = call.get("input", {})
    if not isinstance(arguments, dict):
        raise invalid(f"{place}.input", f"must be an object, got {shown(arguments)}", code="invalid_type")
    call_id, name = text_field(call, "id", place), text_field(call, "name", place)
    chat.add_call(call_id, name, json.dumps(arguments, ensure_ascii=False), place)


def _add_result(chat: Chat, block: Mapping[str, Any], place: str) -> None:
    told = fields(block, place, {"type", "tool_use_id", "content", "is_error"}, _OF_BLOCKS)
    content = content_text(told.get("content", ""), f"{place}.content", ("text",), _OF_BLOCKS)
    if not isinstance(is_error := told.get("is_error", False), bool):
        raise invalid(f"{place}.is_error", f"must be true or false, got {shown(is_error)}", code="invalid_type")
    # Templates have no other place for an error.
    content = f"Error: {content}" if is_error else content
    chat.add("tool", content, place, tool_call_id=text_field(told, "tool_use_id", place))


def _tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") is not None:
        # Only Anthropic's own tools must have a type.
        kind_of(tool, place, ("custom",))
    told = fields(tool, place, {"type", "name", "description", "input_schema", "strict"}, _OF_TOOLS)
    if "input_schema" not in told:
        raise invalid(f"{place}.input_schema", "is required", code="missing_required_parameter")
    schema = mapping(told["input_schema"], f"{place}.input_schema")
    own = {name: told[name] for name in ("name", "description", "strict") if name in told}
    return {"type": "function", "function": {**own, "parameters": schema}}


def _tool_choice(given: Mapping[str, Any]) -> str | dict[str, Any]:
    kind = kind_of(given, "tool_choice", ("auto", "any", "tool", "none"))
    names = {"type", "name", "disable_parallel_tool_use"} if kind == "tool" else {"type", "disable_parallel_tool_use"}
    told = fields(given, "tool_choice", names)
    if kind == "tool":
        return {"type": "function", "function": {"name": text_field(told, "name", "tool_choice")}}
    return "required" if kind == "any" else kind


def _parallel(choice: Mapping[str, Any] | None) -> bool | None:
    """Returns whether a choice of tools allows parallel calls; None if it does not say."""
    disabled = (choice or {}).get("disable_parallel_tool_use")
    if disabled is None:
        return None
    if not isinstance(disabled, bool):
        rule = f"must be true or false, got {shown(disabled)}"
        raise invalid("tool_choice.disable_parallel_tool_use", rule, code="invalid_type")
    return not disabled


def _structure(given: MessageChat) -> Mapping[str, Any] | None:
    """Returns the structure that `output_config` asks for."""
    config = fields(given.output_config or {}, "output_config", {"format"})
    if "format" not in config:
        return None
    asked = fields(config["format"], "output_config.format", {"type", "schema"})
    kind_of(asked, "output_config.format", ("json_schema",))
    return text_format("json_schema", asked.get("schema"), "output_config.format.type", "output_config.format.schema")


messages = Dialect(MessageParameters, message_ask, MessageAnswer)
