"""POST /v1/completions: texts are continued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.gateway import logprobs, reports
from outrider.gateway.answers import ChoicesAnswer
from outrider.gateway.asks import completion_ask
from outrider.gateway.exchange import Exchange
from outrider.gateway.outputs import Outputs
from outrider.gateway.parameters import CompletionParameters
from outrider.gateway.streams import DONE, EventStream, TextEvents, event_of
from outrider_client.generation import Chunk, Result


async def completions(exchange: Exchange) -> None:
    """Answers a request. Raises ApiError, OutriderError, ClientGone."""
    given, ask = await exchange.asked(CompletionParameters, completion_ask)
    await exchange.generate(ask, CompletionAnswer, given.model)


class CompletionAnswer(ChoicesAnswer):
    """Tells the continuations of texts."""

    object = "text_completion"
    id_prefix = "cmpl-"

    @property
    def stream_object(self) -> str:
        """The kind of object that the events are: the same as the whole."""
        return self.object

    async def whole(self, outputs: Outputs) -> dict[str, Any]:
        """Returns the answer that is not streamed."""
        chunks, results = await outputs.all()
        choices = [await self._choice(index, result, chunks[index]) for index, result in enumerate(results)]
        return {**self.base, "choices": choices, **self.totals(results)}

    async def _choice(self, index: int, result: Result, chunks: Sequence[Chunk]) -> dict[str, Any]:
        begin = result.prompt_text if self.ask.echo else ""
        ends = [end for chunk in chunks for end in chunk.text_ends]
        choice = {
            **_choice(index, begin + result.text),
            "logprobs": await self._logprobs(result, ends, 0, prompt=result if self.ask.echo else None),
            "finish_reason": result.finish_reason.value,
            "stop_reason": self.stop_reason(result),
        }
        if self.ask.tells_prompt_logprobs:
            choice["prompt_logprobs"] = await self.prompt_logprobs(result)
        if self.ask.returns_token_ids:
            choice |= {"prompt_token_ids": list(result.prompt_token_ids), "token_ids": list(result.token_ids)}
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
                    await stream.send(self._beginning(outputs, choice))
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

    def _beginning(self, outputs: Outputs, choice: int) -> bytes:
        """Returns the event that comes before what is generated: the prompt, where it is asked for."""
        generation = outputs.generations[choice // self.ask.n]
        told = _choice(choice, generation.prompt_text if self.ask.echo else "")
        if self.ask.returns_token_ids:
            told |= {"prompt_token_ids": list(generation.prompt_token_ids), "token_ids": []}
        return event_of({**self.base, "choices": [told]})

    async def _piece(self, outputs: Outputs, index: int, chunk: Chunk, begin: int) -> bytes:
        choice = {**_choice(index, chunk.text), "logprobs": await self._logprobs(chunk, chunk.text_ends, begin)}
        if self.ask.returns_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        if self.ask.reports:
            choice["speculation"] = await reports.chunk_report(self.upstream, chunk, self.ask.reports)
        return event_of({**self.base, "choices": [choice], **self.usage_so_far(outputs, chunk)})

    async def _logprobs(
        self, told: Chunk | Result, ends: Sequence[int], begin: int, prompt: Result | None = None
    ) -> dict[str, Any] | None:
        """Returns the log-probabilities of tokens, those of the prompt before them where it is part of the text.

        Args:
            told: What has the tokens.
            ends: Where the text of each ends.
            begin: Where the text of the first one begins.
            prompt: What has the prompt; None if it is not to be told.
        """
        num_top = self.ask.options.get("logprobs")
        if num_top is None:
            return None
        token_ids, values = list(told.token_ids), list(told.logprobs)
        begins = logprobs.begins_of(ends, begin, len(told.text) if isinstance(told, Result) else None)
        known = await logprobs.token_texts(self.upstream, token_ids, values)
        if prompt is None:
            return logprobs.completion_logprobs(token_ids, values, begins, known, num_top)
        known |= await logprobs.token_texts(self.upstream, prompt.prompt_token_ids, prompt.prompt_logprobs)
        before = _lengths_before(prompt, known)
        return logprobs.completion_logprobs(
            [*prompt.prompt_token_ids, *token_ids],
            [None, *prompt.prompt_logprobs, *values],
            [*before, *(len(prompt.prompt_text) + begin for begin in begins)],
            known,
            num_top,
        )


def _lengths_before(prompt: Result, known: dict[int, bytes]) -> list[int]:
    """Returns where the text of each token of a prompt begins: as many characters as those before it have finished."""
    begins, text = [], b""
    for token_id in prompt.prompt_token_ids:
        begins.append(min(len(text.decode(errors="ignore")), len(prompt.prompt_text)))
        text += known[token_id]
    return begins


def _choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}
