"""POST /v1/responses and /v1/responses/input_tokens: answer a chat in the shape of OpenAI's Responses API. Nothing is
stored."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

from outrider_client.chats import CHAT_OPTIONS, ChatOptions
from outrider_client.generation import Chunk, Result
from outrider_gateway import logprobs, usage
from outrider_gateway.asks import Ask, text_format
from outrider_gateway.dialects.as_chat import Chat, content_text, fields, kind_of, mapping, text_field, tool_names
from outrider_gateway.dialects.blocks import CallBegun, CallDone, CallGrown, TextBegun, TextDone, TextGrown, blocks
from outrider_gateway.dialects.chat import ChatParameters, chat_ask
from outrider_gateway.dialects.dialect import Answer, Dialect
from outrider_gateway.errors import ApiError, invalid, shown
from outrider_gateway.exchange import Exchange
from outrider_gateway.models import token_ids_of
from outrider_gateway.outputs import Outputs
from outrider_gateway.parameters import Int32, SamplingParameters, Stop
from outrider_gateway.replies import BegunCall, Ended, NumberedCall
from outrider_gateway.streams import EventStream, event_of
from outrider_gateway.tools.calls import ToolCallFormat


class ResponseStreamOptions(BaseModel):
    """Holds what a stream of a response tells beside the text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_obfuscation: bool = False
    """Has no effect: nothing is obfuscated."""


class ResponseParameters(SamplingParameters):
    """Holds a request to /v1/responses."""

    input: Any
    instructions: str | None = None
    max_output_tokens: Int32 | None = None
    stop: Stop | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: Int32 | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None


Event = dict[str, Any]


async def count_input_tokens(exchange: Exchange) -> None:
    """Returns the number of tokens that a request has for the model. Raises ApiError, OutriderError, ClientGone."""
    given = await exchange.parameters(ResponseParameters)
    await exchange.upstream.served_model(given.model, exchange.token)
    call_format = await exchange.tool_call_format(given.tools)
    ask = await exchange.heavy(partial(response_ask, given, call_format))
    options = cast(ChatOptions, {name: value for name, value in ask.options.items() if name in CHAT_OPTIONS})
    (prompt,) = ask.prompts
    num_tokens = len(await token_ids_of(exchange, prompt, options, ask.names))
    await exchange.answer({"object": "response.input_tokens", "input_tokens": num_tokens})


class ResponseAnswer(Answer[ResponseParameters]):
    """Writes the text of a request as a response and its items."""

    id_prefix = "resp_"

    def __init__(self, *common: Any) -> None:
        """See `Answer` for the arguments."""
        super().__init__(*common)
        self._items: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        """Log-probabilities of the block of text that has begun."""
        self._num_sent = 0

    async def whole(self, outputs: Outputs) -> dict[str, Any]:
        """Returns the answer that is not streamed."""
        response: dict[str, Any] = {}
        async for event in self._events(outputs):
            response = event.get("response", response)
        return response

    async def stream(self, outputs: Outputs, stream: EventStream) -> None:
        """Sends the answer piece by piece."""
        for name in ("response.created", "response.in_progress"):
            await stream.send(self._sent(_event(name, response=self._response("in_progress"))))
        async for event in self._events(outputs):
            await stream.send(self._sent(event))

    def failed(self, error: ApiError) -> bytes:
        """Returns the events that end a failed stream."""
        told = {"code": error.code, "message": error.message, "param": error.param}
        # OpenAI's own code for a failure of the server.
        reason = {"code": "server_error" if error.status >= 500 else error.code, "message": error.message}
        response = self._response("failed", error=reason)
        return self._sent(_event("error", **told)) + self._sent(_event("response.failed", response=response))

    def _sent(self, event: Event) -> bytes:
        numbered = {**event, "sequence_number": self._num_sent}
        self._num_sent += 1
        return event_of(numbered, event["type"])

    async def _events(self, outputs: Outputs) -> AsyncIterator[Event]:
        """Yields the events after the first ones; the last event has the whole response."""
        async for block in blocks(outputs, self.ask.tool_use):
            match block:
                case TextBegun():
                    self._logprobs = []
                    item = self._message(block.index, "in_progress", [])
                    yield _event("response.output_item.added", output_index=block.index, item=item)
                    part = _text_part("", [])
                    yield _event("response.content_part.added", **self._place(block.index), part=part)
                case TextGrown():
                    told = await self._logprobs_of(block.chunks)
                    self._logprobs += told
                    if block.piece or told:
                        yield _event(
                            "response.output_text.delta", **self._place(block.index), delta=block.piece, logprobs=told
                        )
                case TextDone():
                    for event in self._text_done(block):
                        yield event
                case CallBegun():
                    item = self._call(block.index, block.call, "in_progress", "")
                    yield _event("response.output_item.added", output_index=block.index, item=item)
                case CallGrown():
                    place = self._call_place(block.index)
                    yield _event("response.function_call_arguments.delta", **place, delta=block.arguments)
                case CallDone():
                    for event in self._call_done(block):
                        yield event
                case Ended():
                    yield self._ended(block)

    def _text_done(self, block: TextDone) -> list[Event]:
        part, place = _text_part(block.text, self._logprobs), self._place(block.index)
        item = self._message(block.index, "incomplete" if block.is_cut else "completed", [part])
        self._items.append(item)
        return [
            _event("response.output_text.done", **place, text=block.text, logprobs=self._logprobs),
            _event("response.content_part.done", **place, part=part),
            _event("response.output_item.done", output_index=block.index, item=item),
        ]

    def _call_done(self, block: CallDone) -> list[Event]:
        call, index = block.call, block.index
        item = self._call(index, call, "completed" if call.is_complete else "incomplete", call.arguments)
        self._items.append(item)
        told = {"name": call.name, "arguments": call.arguments}
        return [
            _event("response.function_call_arguments.done", **self._call_place(index), **told),
            _event("response.output_item.done", output_index=index, item=item),
        ]

    def _ended(self, ended: Ended) -> Event:
        status = "incomplete" if ended.is_cut else "completed"
        more: dict[str, Any] = {"usage": self._usage(ended.result), "metrics": usage.metrics([ended.result])}
        if ended.is_cut:
            # OpenAI has no name for an end within a call.
            is_long = ended.finish_reason == "length"
            more["incomplete_details"] = {"reason": "max_output_tokens" if is_long else ended.finish_reason}
        else:
            more["completed_at"] = int(time.time())
        return _event(f"response.{status}", response=self._response(status, **more))

    def _message(self, index: int, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        name = self._place(index)["item_id"]
        return {"id": name, "type": "message", "status": status, "role": "assistant", "content": content}

    def _call(self, index: int, call: BegunCall | NumberedCall, status: str, arguments: str) -> dict[str, Any]:
        return {
            "id": self._call_place(index)["item_id"],
            "type": "function_call",
            "status": status,
            "call_id": call.id,
            "name": call.name,
            "arguments": arguments,
        }

    def _call_place(self, index: int) -> dict[str, Any]:
        return {"item_id": f"fc_{self.session_id}_{index}", "output_index": index}

    def _place(self, index: int) -> dict[str, Any]:
        """Returns the place of a message's only part."""
        return {"item_id": f"msg_{self.session_id}_{index}", "output_index": index, "content_index": 0}

    async def _logprobs_of(self, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
        if "logprobs" not in self.ask.options:
            return []
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        told = [each for chunk in chunks for each in chunk.logprobs]
        known = await logprobs.token_texts(self.upstream, token_ids, told)
        content: list[dict[str, Any]] = logprobs.chat_logprobs(token_ids, told, known)["content"]
        return content

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        given = self.given
        return {
            "id": f"{self.id_prefix}{self.session_id}",
            "object": "response",
            "created_at": self.created_at,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "model": self.model,
            "output": list(self._items),
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "previous_response_id": None,
            "background": False,
            "store": False,
            "temperature": given.temperature,
            "top_p": given.top_p,
            "top_logprobs": given.top_logprobs or 0,
            "text": {"format": {"type": "text"}, **(given.text or {})},
            "tool_choice": given.tool_choice or "auto",
            "tools": [{"parameters": None, "strict": None, **tool} for tool in given.tools or ()],
            "truncation": "disabled",
            "metadata": given.metadata or {},
            "user": given.user,
            "usage": None,
            **more,
        }

    def _usage(self, result: Result) -> dict[str, Any]:
        return {
            "input_tokens": result.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": result.num_cached_prompt_tokens, "cache_write_tokens": 0},
            "output_tokens": result.num_output_tokens,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                **usage.prediction_counts([result], self.num_predicted),
            },
            "total_tokens": result.num_prompt_tokens + result.num_output_tokens,
        }


def _event(kind: str, **fields: Any) -> Event:
    return {"type": kind, **fields}


def _text_part(text: str, told: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": told}


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


responses = Dialect(ResponseParameters, response_ask, ResponseAnswer)
