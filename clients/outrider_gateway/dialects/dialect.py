"""The seam between HTTP and a generation: a dialect is an API in which texts are asked for.

Its parameters become an `Ask`, whatever the API; the ask becomes `Outputs`, the events of the SDK's generations; and
its `Answer` writes these in the API's shape, whole or as a stream.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from outrider_client.errors import OutriderError
from outrider_client.generation import Chunk, Result
from outrider_gateway import leniency, logprobs, reports, usage
from outrider_gateway.asks import Ask
from outrider_gateway.errors import ApiError, from_upstream
from outrider_gateway.exchange import REQUEST_ID, Exchange
from outrider_gateway.outputs import Outputs, unless_gone
from outrider_gateway.parameters import SamplingParameters
from outrider_gateway.streams import DONE, EventStream, answer, event_of
from outrider_gateway.tools.calls import ToolCallFormat
from outrider_gateway.upstream import Upstream

P = TypeVar("P", bound=SamplingParameters)


@dataclass(frozen=True)
class Dialect(Generic[P]):
    """An API in which texts are asked for. Called, it answers a request."""

    parameters: type[P]
    """The parameters of a request."""
    ask: Callable[[P, ToolCallFormat], Ask]
    """Returns what a request asks for, by a model that writes its calls in this format. Raises ApiError."""
    answer: type[Answer[P]]

    async def __call__(self, exchange: Exchange) -> None:
        """Answers a request. Raises ApiError, OutriderError, ClientGone."""
        given = await exchange.parameters(self.parameters)
        call_format = await exchange.tool_call_format(getattr(given, "tools", None))
        ask = await exchange.heavy(lambda: self.ask(given, call_format))
        client, receive, metrics = exchange.client(), exchange.receive, exchange.metrics
        async with Outputs(client, ask, exchange.heavy) as outputs:
            try:
                with metrics.waiting():
                    made = await unless_gone(receive, self._begin(exchange, given, ask, outputs))
                headers = {REQUEST_ID: outputs.session_id, **leniency.header(exchange.left_aside)}
                if ask.stream is not None:
                    stream = EventStream(receive, exchange.send, exchange.settings.stall_timeout_s, made.ping)
                    with metrics.stream():
                        await stream.run(headers, lambda: made.stream(outputs, stream), made.failed, ask.names)
                else:
                    with metrics.running():
                        whole = await unless_gone(receive, made.whole(outputs))
                    await answer(exchange.send, 200, whole, headers)
            except OutriderError as error:
                raise from_upstream(error, ask.names) from error
            finally:
                metrics.count(outputs.generations)

    async def _begin(self, exchange: Exchange, given: P, ask: Ask, outputs: Outputs) -> Answer[P]:
        model = await exchange.upstream.served_model(given.model, exchange.token)
        await outputs.start()
        # With the gateway's own token, if it has one: for the caller it is one request.
        own = exchange.upstream.own(exchange.token)
        num_predicted = len(await own.tokenize(ask.prediction)) if ask.prediction else None
        return self.answer(exchange.upstream, given, ask, model, outputs.session_id, num_predicted)


class Answer(ABC, Generic[P]):
    """Writes the texts of one request."""

    id_prefix: ClassVar[str]
    ping: ClassVar[bytes] = b": ping\n\n"
    """Sent when a stream is silent."""

    def __init__(
        self, upstream: Upstream, given: P, ask: Ask, model: str, session_id: str, num_predicted: int | None
    ) -> None:
        """`given`: the request. `num_predicted`: tokens of the predicted output; None if there is none."""
        self.upstream, self.given, self.ask, self.model = upstream, given, ask, model
        self.num_predicted = num_predicted
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


class ChoicesAnswer(Answer[P]):
    """Writes the texts of one request as numbered choices."""

    object: ClassVar[str]

    def __init__(
        self, upstream: Upstream, given: P, ask: Ask, model: str, session_id: str, num_predicted: int | None
    ) -> None:
        """See `Answer` for the arguments."""
        super().__init__(upstream, given, ask, model, session_id, num_predicted)
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

    def _last_words(self, results: Sequence[Result | None]) -> dict[str, Any]:
        # Only with the last text, so that it is sent once.
        ended = [result for result in results if result is not None]
        if len(ended) < len(results) or (self.ask.stream is not None and self.ask.stream.include_usage):
            return {}
        return self._of_speculation(ended)

    async def end(self, stream: EventStream, results: Sequence[Result | None]) -> None:
        """Sends the event with the usage, if the request asks for it, and the last one."""
        if self.ask.stream is not None and self.ask.stream.include_usage:
            ended = [result for result in results if result is not None]
            await stream.send(event_of({**self.base, "choices": [], **self.totals(ended)}))
        await stream.send(DONE)

    def event(self, choice: Mapping[str, Any], **more: Any) -> bytes:
        """Returns an event with one choice."""
        return event_of({**self.base, "choices": [choice], **more})

    async def piece_event(self, outputs: Outputs, choice: dict[str, Any], chunk: Chunk | None) -> bytes:
        """Returns the event of a piece of a text, with what the request asks to know of its chunk."""
        if chunk is not None and self.ask.returns_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        if chunk is not None and self.ask.reports:
            choice["speculation"] = await reports.chunk_report(self.upstream, chunk, self.ask.reports)
        return self.event(choice, **self._usage_so_far(outputs, chunk))

    def last_event(
        self, choice: Mapping[str, Any], finish_reason: str, result: Result, results: Sequence[Result | None]
    ) -> bytes:
        """Returns the event that ends a text. It reports on speculation unless an event with the usage follows."""
        last = {**choice, "finish_reason": finish_reason, "stop_reason": self.stop_reason(result)}
        return self.event(last, **self._last_words(results))

    def details(self, result: Result, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Returns additional fields of the choice of a whole text."""
        told: dict[str, Any] = {}
        if self.ask.returns_token_ids:
            told["token_ids"] = list(result.token_ids)
        if self.ask.reports:
            told["speculation"] = reports.token_report(chunks, len(result.text))
        return told

    def _usage_so_far(self, outputs: Outputs, chunk: Chunk | None) -> dict[str, Any]:
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
