"""POST /v1/completions: continues texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from outrider_client.client import Generation
from outrider_client.generation import Chunk, Result
from outrider_gateway import logprobs, reports
from outrider_gateway.answers import ChoicesAnswer
from outrider_gateway.asks import completion_ask
from outrider_gateway.exchange import Exchange
from outrider_gateway.outputs import Outputs
from outrider_gateway.parameters import CompletionParameters
from outrider_gateway.streams import DONE, EventStream, TextEvents, event_of

NOTHING = Chunk(token_ids=(), sources=(), text="", num_drafted=0)


async def completions(exchange: Exchange) -> None:
    """Answers a request. Raises ApiError, OutriderError, ClientGone."""
    given = await exchange.parameters(CompletionParameters)
    ask = await exchange.heavy(partial(completion_ask, given))
    await exchange.generate(ask, CompletionAnswer, given.model)


class CompletionAnswer(ChoicesAnswer):
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
            choice |= {"prompt_token_ids": list(first.prompt_token_ids), "token_ids": list(result.token_ids)}
        if self.ask.reports:
            choice["speculation"] = reports.token_report(chunks, len(result.text))
        return choice

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
                last = {**_choice(choice, ""), "finish_reason": event.finish_reason.value}
                last["stop_reason"] = self.stop_reason(event)
                await stream.send(event_of({**self.base, "choices": [last], **self.last_words(results)}))
            elif self.has_details:
                await stream.send(await self._piece(outputs, choice, event, ends[choice]))
                ends[choice] = event.text_ends[-1] if event.text_ends else ends[choice]
            elif event.text:
                await stream.send(texts.event(choice, event.text))
        await self.end(stream, results)
        await stream.send(DONE)

    async def _beginning(self, outputs: Outputs, choice: int) -> bytes:
        """Returns the event before the generated text: the prompt, if it is asked for."""
        generation = outputs.generations[choice // self.ask.n]
        told = _choice(choice, generation.prompt_text if self.ask.echo else "")
        if self.ask.echo:
            told["logprobs"] = await self._with_prompt(generation, await self._logprobs(NOTHING, (), 0, 0))
        if self.ask.returns_token_ids:
            told |= {"prompt_token_ids": list(generation.prompt_token_ids), "token_ids": []}
        return event_of({**self.base, "choices": [told]})

    async def _piece(self, outputs: Outputs, index: int, chunk: Chunk, begin: int) -> bytes:
        before = len(outputs.generations[index // self.ask.n].prompt_text) if self.ask.echo else 0
        told = await self._logprobs(chunk, chunk.text_ends, begin, before)
        choice = {**_choice(index, chunk.text), "logprobs": told}
        if self.ask.returns_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        if self.ask.reports:
            choice["speculation"] = await reports.chunk_report(self.upstream, chunk, self.ask.reports)
        return event_of({**self.base, "choices": [choice], **self.usage_so_far(outputs, chunk)})

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
