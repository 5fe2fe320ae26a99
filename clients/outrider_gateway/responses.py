"""POST /v1/responses and /v1/responses/input_tokens: answer a chat in the shape of OpenAI's Responses API. Nothing is
stored."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, cast

from outrider_client.chats import CHAT_OPTIONS, ChatOptions
from outrider_client.generation import Chunk, Result
from outrider_gateway import logprobs, usage
from outrider_gateway.answers import Answer
from outrider_gateway.blocks import CallBegun, CallDone, CallGrown, TextBegun, TextDone, TextGrown, blocks
from outrider_gateway.errors import ApiError
from outrider_gateway.exchange import Exchange
from outrider_gateway.models import token_ids_of
from outrider_gateway.outputs import Outputs
from outrider_gateway.parameters import ResponseParameters
from outrider_gateway.replies import BegunCall, Ended, NumberedCall
from outrider_gateway.response_asks import response_ask
from outrider_gateway.streams import EventStream, event_of

Event = dict[str, Any]


async def responses(exchange: Exchange) -> None:
    """Answers a request. Raises ApiError, OutriderError, ClientGone."""
    given = await exchange.parameters(ResponseParameters)
    call_format = await exchange.tool_call_format(given.tools)
    ask = await exchange.heavy(partial(response_ask, given, call_format))
    await exchange.generate(ask, partial(ResponseAnswer, given), given.model)


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


class ResponseAnswer(Answer):
    """Writes the text of a request as a response and its items."""

    id_prefix = "resp_"

    def __init__(self, given: ResponseParameters, *common: Any) -> None:
        """`given`: the request. A response repeats parts of it. `common`: what `Answer` takes."""
        super().__init__(*common)
        self._given = given
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
        given = self._given
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
