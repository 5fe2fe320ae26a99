"""Base classes for answers to requests that generate, and for those with choices."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from outrider_client.generation import Chunk, Result
from outrider_gateway import logprobs, usage
from outrider_gateway.asks import Ask
from outrider_gateway.errors import ApiError
from outrider_gateway.outputs import Outputs
from outrider_gateway.streams import DONE, EventStream, event_of
from outrider_gateway.upstream import Upstream


class Answer(ABC):
    """Writes the texts of one request."""

    id_prefix: ClassVar[str]
    ping: ClassVar[bytes] = b": ping\n\n"
    """Sent when a stream is silent."""

    def __init__(self, upstream: Upstream, ask: Ask, model: str, session_id: str, num_predicted: int | None) -> None:
        """`num_predicted`: tokens of the predicted output; None if there is none."""
        self.upstream, self.ask, self.model, self.num_predicted = upstream, ask, model, num_predicted
        self.session_id, self.created_at = session_id, int(time.time())

    @abstractmethod
    async def whole(self, outputs: Outputs) -> dict[str, Any]:
        """Returns the answer that is not streamed."""

    @abstractmethod
    async def stream(self, outputs: Outputs, stream: EventStream) -> None:
        """Sends the answer piece by piece."""

    def failed(self, error: ApiError) -> bytes:
        """Returns the events that end a failed stream."""
        return event_of(error.envelope) + DONE


class ChoicesAnswer(Answer):
    """Writes the texts of one request as numbered choices."""

    object: ClassVar[str]

    def __init__(self, upstream: Upstream, ask: Ask, model: str, session_id: str, num_predicted: int | None) -> None:
        """See `Answer` for the arguments."""
        super().__init__(upstream, ask, model, session_id, num_predicted)
        self.base: dict[str, Any] = {
            "id": f"{self.id_prefix}{session_id}",
            "object": self.object if ask.stream is None else self.stream_object,
            "created": self.created_at,
            "model": model,
        }
        """The first fields of the answer and of each of its events."""
        self.has_details = bool(
            ask.reports
            or ask.returns_token_ids
            or "logprobs" in ask.options
            or (ask.stream is not None and ask.stream.continuous_usage_stats)
        )
        """True if pieces of the text carry more than their text."""
        self._num_output = 0

    @property
    def stream_object(self) -> str:
        """The object type of the events."""
        return f"{self.object}.chunk"

    def stop_reason(self, result: Result) -> str | int | None:
        """Returns the stop string or stop token of the request that has stopped a text."""
        if result.stop_string is not None:
            return result.stop_string
        return result.stop_token_id if result.stop_token_id in self.ask.stop_token_ids else None

    def totals(self, results: Sequence[Result]) -> dict[str, Any]:
        """Returns the report on all texts together, at the end."""
        return {
            "usage": usage.usage(results, self.ask.n, self.num_predicted),
            "metrics": usage.metrics(results),
            **self._of_speculation(results),
        }

    def _of_speculation(self, results: Sequence[Result]) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self.ask.reports:
            told["speculation"] = usage.speculation(results)
        if self.ask.has_timings:
            told["timings"] = usage.timings(results)
        return told

    def last_words(self, results: Sequence[Result | None]) -> dict[str, Any]:
        """Returns additional fields of the event that ends a text: the reports on speculation, if the text is the last
        one and no event with the usage follows."""
        ended = [result for result in results if result is not None]
        if len(ended) < len(results) or (self.ask.stream is not None and self.ask.stream.include_usage):
            return {}
        return self._of_speculation(ended)

    async def end(self, stream: EventStream, results: Sequence[Result | None]) -> None:
        """Sends the event with the usage, if the request asks for it."""
        if self.ask.stream is not None and self.ask.stream.include_usage:
            ended = [result for result in results if result is not None]
            await stream.send(event_of({**self.base, "choices": [], **self.totals(ended)}))

    def usage_so_far(self, outputs: Outputs, chunk: Chunk | None) -> dict[str, Any]:
        """Returns the usage up to a chunk, if each event should have it."""
        if self.ask.stream is None or not self.ask.stream.continuous_usage_stats:
            return {}
        self._num_output += len(chunk.token_ids) if chunk is not None else 0
        prompts = sum(generation.num_prompt_tokens for generation in outputs.generations)
        return {"usage": usage.token_counts(prompts, self._num_output)}

    async def prompt_logprobs(self, result: Result) -> list[dict[str, Any] | None]:
        """Returns the log-probabilities of a prompt in vLLM's shape."""
        told, token_ids = result.prompt_logprobs, result.prompt_token_ids
        known = await logprobs.token_texts(self.upstream, token_ids, told)
        return logprobs.prompt_logprobs(token_ids, told, known)
