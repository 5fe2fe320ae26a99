"""POST /v1/completions: continues texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from outrider_client.client import Generation
from outrider_client.generation import Chunk, Result
from outrider_client.requests import Prompt
from outrider_gateway import logprobs
from outrider_gateway.asks import Ask, ask_of, options_of
from outrider_gateway.dialects.dialect import ChoicesAnswer, Dialect
from outrider_gateway.errors import invalid, shown
from outrider_gateway.outputs import Outputs
from outrider_gateway.parameters import (
    GenerationParameters,
    Int32,
    Text,
)
from outrider_gateway.streams import EventStream, TextEvents
from outrider_gateway.tools.calls import ToolCallFormat

MAX_PROMPTS = 1024
"""Most prompts of one request."""


class CompletionParameters(GenerationParameters):
    """Holds a request to /v1/completions."""

    prompt: Text
    max_tokens: Int32 | None = 16
    """OpenAI's default, and vLLM's."""
    logprobs: Int32 | None = None
    echo: bool = False
    add_special_tokens: Literal[True] = True


def completion_ask(given: CompletionParameters, _: ToolCallFormat) -> Ask:
    """Returns what a request to /v1/completions asks for. Raises ApiError."""
    options = options_of(given)
    if given.logprobs is not None:
        options["logprobs"] = given.logprobs
        options["text_ends"] = True
        if given.echo:
            options["prompt_logprobs"] = given.logprobs
    if given.echo:
        options["echo"] = True
    is_prompt_alone = given.echo and given.max_tokens == 0
    if is_prompt_alone:
        options["max_tokens"] = 1
    ask = ask_of(given, completion_prompts(given.prompt), options, echo=given.echo)
    return replace(ask, is_prompt_alone=is_prompt_alone)


def completion_prompts(prompt: object) -> list[Prompt]:
    """Returns the prompts of a completion: a text, token ids, or a list of one kind of them. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise invalid("prompt", f"must be a text, token ids, or a list of some, and not empty, got {shown(prompt)}")
    if len(prompt) > MAX_PROMPTS and not _is_token_ids(prompt):
        raise invalid("prompt", f"must have at most {MAX_PROMPTS} prompts, got {len(prompt)}")
    if _is_token_ids(prompt):
        return [prompt]
    for index, each in enumerate(prompt):
        if not (isinstance(each, str) or (isinstance(each, list) and each and _is_token_ids(each))):
            raise invalid(f"prompt[{index}]", f"must be a text or token ids, got {shown(each)}")
    return list(prompt)


def _is_token_ids(items: list[Any]) -> bool:
    return all(type(item) is int and abs(item) < 2**31 for item in items)


NOTHING = Chunk(token_ids=(), sources=(), text="", num_drafted=0)


class CompletionAnswer(ChoicesAnswer[CompletionParameters]):
    """Writes the continuations of texts."""

    object = "text_completion"
    id_prefix = "cmpl-"

    @property
    def stream_object(self) -> str:
        """The object type of the events: that of the whole answer."""
        return self.object

    async def whole(self, outputs: Outputs) -> dict[str, Any]:
        """Returns the answer that is not streamed."""
        chunks, results = await outputs.all()
        choices = [
            # Reports on a prompt come with the first of its texts.
            await self._choice(index, result, results[index - index % self.ask.n], chunks[index])
            for index, result in enumerate(results)
        ]
        return {**self.base, "choices": choices, **self.totals(results)}

    async def _choice(self, index: int, result: Result, first: Result, chunks: Sequence[Chunk]) -> dict[str, Any]:
        begin = first.prompt_text if self.ask.echo else ""
        ends = [end for chunk in chunks for end in chunk.text_ends]
        told = await self._logprobs(result, ends, 0, len(begin))
        choice = {
            **_choice(index, begin + result.text),
            "logprobs": await self._with_prompt(first, told) if self.ask.echo else told,
            "finish_reason": result.finish_reason.value,
            "stop_reason": self.stop_reason(result),
        }
        if self.ask.tells_prompt_logprobs:
            choice["prompt_logprobs"] = await self.prompt_logprobs(first)
        if self.ask.returns_token_ids:
            choice["prompt_token_ids"] = list(first.prompt_token_ids)
        return {**choice, **self.details(result, chunks)}

    async def stream(self, outputs: Outputs, stream: EventStream) -> None:
        """Sends the answer piece by piece."""
        results: list[Result | None] = [None] * outputs.num_choices
        texts = TextEvents(self.base, _choice, outputs.num_choices)
        begun = [False] * outputs.num_choices
        ends = [0] * outputs.num_choices
        async for choice, event in outputs:
            if not begun[choice]:
                begun[choice] = True
                if self.ask.echo or self.ask.returns_token_ids:
                    await stream.send(await self._beginning(outputs, choice))
            if not isinstance(event, Chunk):
                results[choice] = event
                await stream.send(self.last_event(_choice(choice, ""), event.finish_reason.value, event, results))
            elif self.has_details:
                await stream.send(await self._piece(outputs, choice, event, ends[choice]))
                ends[choice] = event.text_ends[-1] if event.text_ends else ends[choice]
            elif event.text:
                await stream.send(texts.event(choice, event.text))
        await self.end(stream, results)

    async def _beginning(self, outputs: Outputs, choice: int) -> bytes:
        """Returns the event before the generated text: the prompt, if it is asked for."""
        generation = outputs.generations[choice // self.ask.n]
        told = _choice(choice, generation.prompt_text if self.ask.echo else "")
        if self.ask.echo:
            told["logprobs"] = await self._with_prompt(generation, await self._logprobs(NOTHING, (), 0, 0))
        if self.ask.returns_token_ids:
            told |= {"prompt_token_ids": list(generation.prompt_token_ids), "token_ids": []}
        return self.event(told)

    async def _piece(self, outputs: Outputs, index: int, chunk: Chunk, begin: int) -> bytes:
        before = len(outputs.generations[index // self.ask.n].prompt_text) if self.ask.echo else 0
        told = await self._logprobs(chunk, chunk.text_ends, begin, before)
        return await self.piece_event(outputs, {**_choice(index, chunk.text), "logprobs": told}, chunk)

    async def _logprobs(
        self, told: Chunk | Result, ends: Sequence[int], begin: int, before: int
    ) -> dict[str, Any] | None:
        """Returns the log-probabilities of tokens; None if the request does not ask for them.

        Args:
            told: Chunk or result that has the tokens.
            ends: Where the text of each token ends in the generated text.
            begin: Where the text of the first token begins there.
            before: Length of the text before the generated one.
        """
        num_top = self.ask.options.get("logprobs")
        if num_top is None:
            return None
        begins = logprobs.begins_of(ends, begin, len(told.text) if isinstance(told, Result) else None)
        known = await logprobs.token_texts(self.upstream, told.token_ids, told.logprobs)
        places = [before + place for place in begins]
        return logprobs.completion_logprobs(told.token_ids, told.logprobs, places, known, num_top)

    async def _with_prompt(
        self, prompt: Result | Generation, told: dict[str, list[Any] | None] | None
    ) -> dict[str, list[Any] | None] | None:
        """Returns the log-probabilities of a prompt, followed by those of the tokens after it."""
        num_top = self.ask.options.get("logprobs")
        if num_top is None or told is None:
            return None
        token_ids, values = prompt.prompt_token_ids, prompt.prompt_logprobs
        known = await logprobs.token_texts(self.upstream, token_ids, values)
        begins = logprobs.begins_of(prompt.prompt_text_ends, 0)
        # The first token of a prompt has none.
        begun = logprobs.completion_logprobs(token_ids, [None, *values], begins, known, num_top)
        return {name: None if more is None else begun[name] + more for name, more in told.items()}


def _choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


completions = Dialect(CompletionParameters, completion_ask, CompletionAnswer)
