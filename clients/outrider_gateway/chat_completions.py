"""POST /v1/chat/completions: answers a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from outrider_client.generation import Chunk, Result
from outrider_gateway import logprobs, reports
from outrider_gateway.answers import ChoicesAnswer
from outrider_gateway.asks import chat_ask
from outrider_gateway.exchange import Exchange
from outrider_gateway.outputs import Outputs
from outrider_gateway.parameters import ChatParameters
from outrider_gateway.replies import (
    BegunCall,
    Ended,
    GrownCall,
    NumberedCall,
    Part,
    Reply,
    Said,
    calls_of,
    replies,
    text_of,
)
from outrider_gateway.streams import DONE, EventStream, TextEvents, event_of


async def chat_completions(exchange: Exchange) -> None:
    """Answers a request. Raises ApiError, OutriderError, ClientGone."""
    given = await exchange.parameters(ChatParameters)
    call_format = await exchange.tool_call_format(given.tools)
    ask = await exchange.heavy(partial(chat_ask, given, call_format))
    await exchange.generate(ask, ChatAnswer, given.model)


class ChatAnswer(ChoicesAnswer):
    """Writes the texts of a chat."""

    object = "chat.completion"
    id_prefix = "chatcmpl-"

    async def whole(self, outputs: Outputs) -> dict[str, Any]:
        """Returns the answer that is not streamed."""
        chunks, results = await outputs.all()
        choices = [await self._choice(index, result, chunks[index]) for index, result in enumerate(results)]
        told = {**self.base, "choices": choices, **self.totals(results)}
        if self.ask.tells_prompt_logprobs:
            told["prompt_logprobs"] = await self.prompt_logprobs(results[0])
        if self.ask.returns_token_ids:
            told["prompt_token_ids"] = list(results[0].prompt_token_ids)
        return told

    async def _choice(self, index: int, result: Result, chunks: Sequence[Chunk]) -> dict[str, Any]:
        reply = Reply(self.ask.tool_use)
        parts = [*reply.feed(result.text), *reply.finish()]
        text, calls = text_of(parts), calls_of(parts)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [_call(call, call.arguments) for call in calls]
        choice = {
            "index": index,
            "message": message,
            "logprobs": await self._logprobs(result),
            "finish_reason": reply.ended(index, result).finish_reason,
            "stop_reason": self.stop_reason(result),
        }
        if self.ask.returns_token_ids:
            choice["token_ids"] = list(result.token_ids)
        if self.ask.reports:
            choice["speculation"] = reports.token_report(chunks, len(result.text))
        return choice

    async def stream(self, outputs: Outputs, stream: EventStream) -> None:
        """Sends the answer piece by piece."""
        ask = self.ask
        results: list[Result | None] = [None] * outputs.num_choices
        texts = TextEvents(self.base, lambda index, piece: _delta(index, {"content": piece}), outputs.num_choices)
        for index in range(outputs.num_choices):
            first = {**self.base, "choices": [_delta(index, {"role": "assistant", "content": ""})]}
            if ask.returns_token_ids and index == 0:
                first["prompt_token_ids"] = list(outputs.generations[0].prompt_token_ids)
            await stream.send(event_of(first))
        if not (ask.tool_use or self.has_details):
            async for choice, event in outputs:
                if isinstance(event, Chunk):
                    if event.text:
                        await stream.send(texts.event(choice, event.text))
                else:
                    await stream.send(self._end(Reply(None).ended(choice, event), results))
        else:
            async for said in replies(outputs, ask.tool_use):
                if isinstance(said, Ended):
                    await stream.send(self._end(said, results))
                elif any(not isinstance(part, NumberedCall) for part in said.parts) or (
                    self.has_details and said.chunk is not None
                ):
                    await stream.send(await self._piece(outputs, said))
        await self.end(stream, results)
        await stream.send(DONE)

    async def _piece(self, outputs: Outputs, said: Said) -> bytes:
        delta: dict[str, Any] = {}
        text, calls = text_of(said.parts), _call_deltas(said.parts)
        if text or not calls:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = calls
        choice, chunk = _delta(said.choice, delta), said.chunk
        if chunk is not None:
            choice["logprobs"] = await self._logprobs(chunk)
            if self.ask.returns_token_ids:
                choice["token_ids"] = list(chunk.token_ids)
            if self.ask.reports:
                choice["speculation"] = await reports.chunk_report(self.upstream, chunk, self.ask.reports)
        return event_of({**self.base, "choices": [choice], **self.usage_so_far(outputs, chunk)})

    def _end(self, ended: Ended, results: list[Result | None]) -> bytes:
        results[ended.choice] = ended.result
        choice = {**_delta(ended.choice, {}), "finish_reason": ended.finish_reason}
        choice["stop_reason"] = self.stop_reason(ended.result)
        return event_of({**self.base, "choices": [choice], **self.last_words(results)})

    async def _logprobs(self, told: Chunk | Result) -> dict[str, Any] | None:
        if "logprobs" not in self.ask.options:
            return None
        known = await logprobs.token_texts(self.upstream, told.token_ids, told.logprobs)
        return logprobs.chat_logprobs(told.token_ids, told.logprobs, known)


def _delta(index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _call(call: BegunCall | NumberedCall, arguments: str) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _call_deltas(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Returns the parts of calls joined by call: clients take one entry for each call."""
    deltas: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case BegunCall():
                deltas[part.index] = {"index": part.index, **_call(part, "")}
            case GrownCall():
                delta = deltas.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
                delta["function"]["arguments"] += part.arguments
    return list(deltas.values())
