"""POST /v1/chat/completions: answers a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from outrider_client.generation import Chunk, Result
from outrider_client.requests import Prompt
from outrider_gateway import logprobs
from outrider_gateway.asks import CHAT_NAMES, Ask, ToolUse, ask_of, options_of
from outrider_gateway.dialects.as_chat import without_notes
from outrider_gateway.dialects.dialect import ChoicesAnswer, Dialect
from outrider_gateway.errors import from_option, invalid
from outrider_gateway.outputs import Outputs
from outrider_gateway.parameters import (
    GenerationParameters,
    Int32,
)
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
from outrider_gateway.streams import EventStream, TextEvents
from outrider_gateway.tools.calls import ToolCallFormat
from outrider_gateway.tools.grammar import hold_calls

_OF_CHATS = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class ChatParameters(GenerationParameters):
    """Holds a request to /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Int32 | None = None
    logprobs: bool = False
    top_logprobs: Int32 | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: Literal[False] = False
    echo: Literal[False] = False


def chat_ask(given: ChatParameters, tool_call_format: ToolCallFormat, renamed: Sequence[tuple[str, str]] = ()) -> Ask:
    """Returns what a request to /v1/chat/completions asks for. Raises ApiError.

    Args:
        given: The request.
        tool_call_format: How the model writes calls of tools.
        renamed: Names of the fields in a request of another API that was converted to this one, as in `FieldNames`.
    """
    options = options_of(given)
    renamed = [*renamed, *CHAT_NAMES, ("report.logprobs", "top_logprobs")]
    if given.max_completion_tokens is not None:
        if given.max_tokens not in (None, given.max_completion_tokens):
            raise invalid("max_tokens", "must be unset with max_completion_tokens, which says the same")
        options["max_tokens"] = given.max_completion_tokens
        renamed.append(("sampling.max_tokens", "max_completion_tokens"))
    if given.top_logprobs and not given.logprobs:
        raise invalid("top_logprobs", "must be unset or 0 unless logprobs is true")
    if given.logprobs:
        options["logprobs"] = given.top_logprobs or 0
    for name in _OF_CHATS:
        if (value := getattr(given, name)) is not None:
            options[name] = value  # type: ignore[literal-required]
    choice, is_parallel, tool_use = given.tool_choice, given.parallel_tool_calls, None
    if given.tools:
        if choice != "none":
            tool_use = ToolUse(tool_call_format, given.tools)
            # The markers of a call may be special tokens.
            options.setdefault("skip_special_tokens", False)
        renamed.append(("structured_outputs.grammar", "tools"))
    else:
        # Without tools there are no calls, and "auto" is the default that answers repeat.
        choice, is_parallel = None if choice == "auto" else choice, None
    messages = [without_notes(message) for message in given.messages]
    ask = ask_of(given, [cast(Prompt, messages)], options, renamed, tool_use=tool_use)
    try:
        return replace(ask, options=hold_calls(options, tool_call_format, choice, is_parallel))
    except (TypeError, ValueError) as error:
        raise from_option(error, ask.names) from None


class ChatAnswer(ChoicesAnswer[ChatParameters]):
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
        return {
            "index": index,
            "message": message,
            "logprobs": await self._logprobs(result),
            "finish_reason": reply.ended(index, result).finish_reason,
            "stop_reason": self.stop_reason(result),
            **self.details(result, chunks),
        }

    async def stream(self, outputs: Outputs, stream: EventStream) -> None:
        """Sends the answer piece by piece."""
        ask = self.ask
        results: list[Result | None] = [None] * outputs.num_choices
        texts = TextEvents(self.base, lambda index, piece: _delta(index, {"content": piece}), outputs.num_choices)
        for index in range(outputs.num_choices):
            more = {}
            if ask.returns_token_ids and index == 0:
                more["prompt_token_ids"] = list(outputs.generations[0].prompt_token_ids)
            await stream.send(self.event(_delta(index, {"role": "assistant", "content": ""}), **more))
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
        return await self.piece_event(outputs, choice, chunk)

    def _end(self, ended: Ended, results: list[Result | None]) -> bytes:
        results[ended.choice] = ended.result
        return self.last_event(_delta(ended.choice, {}), ended.finish_reason, ended.result, results)

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


chat_completions = Dialect(ChatParameters, chat_ask, ChatAnswer)
