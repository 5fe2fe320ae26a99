"""POST /v1/messages and /v1/messages/count_tokens: answer a chat in the shape of Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from pydantic_core import from_json

from outrider_gateway import usage
from outrider_gateway.answers import Answer
from outrider_gateway.blocks import CallBegun, CallDone, CallGrown, TextBegun, TextDone, TextGrown, blocks
from outrider_gateway.errors import ApiError
from outrider_gateway.exchange import Exchange
from outrider_gateway.message_asks import message_ask, message_prompt
from outrider_gateway.models import token_ids_of
from outrider_gateway.outputs import Outputs
from outrider_gateway.parameters import MessageChat, MessageParameters
from outrider_gateway.replies import BegunCall, Ended, NumberedCall
from outrider_gateway.streams import EventStream, event_of

Event = dict[str, Any]
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def messages(exchange: Exchange) -> None:
    """Answers a request. Raises ApiError, OutriderError, ClientGone."""
    given = await exchange.parameters(MessageParameters)
    call_format = await exchange.tool_call_format(given.tools)
    ask = await exchange.heavy(partial(message_ask, given, call_format))
    await exchange.generate(ask, partial(MessageAnswer, given.max_tokens), given.model)


async def count_tokens(exchange: Exchange) -> None:
    """Returns the number of tokens that a request has for the model. Raises ApiError, ClientGone."""
    given = await exchange.parameters(MessageChat)
    chat, options, choice, names = await exchange.heavy(partial(message_prompt, given))
    await exchange.upstream.served_model(given.model, exchange.token)
    await exchange.answer({"input_tokens": len(await token_ids_of(exchange, chat, options, names, choice))})


class MessageAnswer(Answer):
    """Writes the text of a request as a message and its blocks."""

    id_prefix = "msg_"
    ping = event_of({"type": "ping"}, "ping")

    def __init__(self, max_tokens: int, *common: Any) -> None:
        """`max_tokens`: most tokens that the text may have. `common`: what `Answer` takes."""
        super().__init__(*common)
        self._max_tokens = max_tokens
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
        elif reason == "max_tokens" and result.num_output_tokens < self._max_tokens:
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
