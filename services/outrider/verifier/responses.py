"""The messages that answer Generate and Collaborate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outrider.core.session import Verdict
from outrider.models.text import TextCodec
from outrider.v1 import types_pb2, verifier_pb2
from outrider.verifier.generation import Generation
from outrider.verifier.listener import NoRoom, Reading
from outrider.verifier.stop_text import output_stream
from outrider.wire.convert import finish_reason_to_proto, source_to_proto, summary_to_proto
from outrider.wire.handshake import Model, model_info
from outrider.wire.reports import logprobs_to_proto, round_to_proto, speculative_decoding_to_proto

Event = (
    verifier_pb2.Started
    | verifier_pb2.Chunk
    | verifier_pb2.Finished
    | verifier_pb2.Waiting
    | verifier_pb2.Reading
    | verifier_pb2.PromptLogprobs
    | types_pb2.Steering
)

LOGPROBS_PER_MESSAGE = 1024
"""Prompt tokens of one message: each takes some 170 bytes with the most log-probabilities, and a message has 4 MB."""

FIELDS: dict[type[Event], str] = {
    verifier_pb2.Started: "started",
    verifier_pb2.Chunk: "chunk",
    verifier_pb2.Finished: "finished",
    verifier_pb2.Waiting: "waiting",
    verifier_pb2.Reading: "reading",
    verifier_pb2.PromptLogprobs: "prompt_logprobs",
    types_pb2.Steering: "steering",
}
"""Fields of the responses by the types of their messages; each response has one."""


def in_field(event: Event) -> dict[str, Any]:
    """Returns the fields of the response that carries an event. Only a CollaborateResponse has one for `Steering`."""
    return {FIELDS[type(event)]: event}


def is_of_text(event: Event) -> bool:
    """Returns True for an event that comes only after the prompt was read."""
    return isinstance(event, verifier_pb2.Chunk | verifier_pb2.Finished)


def of_news(news: NoRoom | Reading) -> verifier_pb2.Waiting | verifier_pb2.Reading:
    """Returns the message that says why there is no text."""
    if isinstance(news, NoRoom):
        return verifier_pb2.Waiting(num_waiting=news.num_waiting)
    return verifier_pb2.Reading(num_read_tokens=news.num_read_tokens, num_tokens=news.num_tokens)


class Responses:
    """Makes the messages about one generation, and decodes its text bit by bit on the way."""

    def __init__(self, generation: Generation, model: Model, codec: TextCodec) -> None:
        self._generation, self._model, self._codec = generation, model, codec
        self._text = output_stream(generation.spec, codec)
        # A character may have begun with bytes that an earlier call has sent.
        self._text.step(generation.spec.resume_token_ids)
        self._num_sent = self._text.num_characters
        """Characters that earlier calls have sent."""

    def started(self, load: verifier_pb2.VerifierLoad, *, shows_prompt: bool) -> verifier_pb2.Started:
        """Makes the first message.

        Args:
            load: The server's load.
            shows_prompt: True if the caller wants to know the tokens of its prompt.
        """
        spec = self._generation.spec
        echo = spec.report.echo
        return verifier_pb2.Started(
            session_id=spec.session_id,
            seed=spec.sampling.seed,
            num_prompt_tokens=len(spec.prompt_token_ids),
            prompt_token_ids=spec.prompt_token_ids if shows_prompt or echo else (),
            model=model_info(self._model),
            prompt_text=self._codec.decode(spec.prompt_token_ids) if echo else "",
            prompt_text_ends=self._prompt_text_ends() if echo and spec.report.text_ends else (),
            load=load,
        )

    def _prompt_text_ends(self) -> Iterator[int]:
        stream = self._codec.stream()
        for token_id in self._generation.spec.prompt_token_ids:
            stream.step([token_id])
            yield stream.num_characters + len(stream.outlook)

    def of_verdict(
        self, verdict: Verdict, acknowledged_node_id: int
    ) -> Iterator[verifier_pb2.PromptLogprobs | verifier_pb2.Chunk | verifier_pb2.Finished]:
        """Makes the messages of a round: a chunk if it committed tokens; at the end the rest of the text and Finished.
        Reports on the prompt come before the first chunk.

        Args:
            verdict: The outcome of the round.
            acknowledged_node_id: The latest node that has arrived from a caller that drafts.
        """
        for first in range(0, len(verdict.prompt_logprobs), LOGPROBS_PER_MESSAGE):
            some = verdict.prompt_logprobs[first : first + LOGPROBS_PER_MESSAGE]
            # The first token of a prompt has none.
            yield verifier_pb2.PromptLogprobs(first_position=1 + first, logprobs=logprobs_to_proto(some))
        text, text_ends = self._decoded(verdict)
        if verdict.token_ids:
            yield verifier_pb2.Chunk(
                token_ids=verdict.token_ids,
                sources=[source_to_proto(source) for source in verdict.sources],
                text=text,
                num_drafted=verdict.num_drafted,
                acknowledged_node_id=acknowledged_node_id,
                logprobs=logprobs_to_proto(verdict.logprobs),
                round=None if verdict.report is None else round_to_proto(verdict.report),
                text_ends=text_ends,
            )
        if verdict.finish_reason is not None:
            # A message of its own: a client that resumes after it knows that this text has come.
            if rest := self._text.finish() if verdict.text is None else verdict.last_text:
                yield verifier_pb2.Chunk(text=rest)
            yield self._finished(verdict)

    def _decoded(self, verdict: Verdict) -> tuple[str, Sequence[int]]:
        """Returns the text that the tokens of a round decide, and, if asked for, where the text of each token ends."""
        if verdict.text is not None:
            return verdict.text, verdict.text_ends
        if not self._generation.spec.report.text_ends:
            return self._text.step(verdict.token_ids), ()
        texts, ends = list[str](), list[int]()
        for token_id in verdict.token_ids:
            texts.append(self._text.step([token_id]))
            ends.append(self._text.num_characters + len(self._text.outlook) - self._num_sent)
        return "".join(texts), ends

    def _finished(self, verdict: Verdict) -> verifier_pb2.Finished:
        generation, spec = self._generation, self._generation.spec
        assert verdict.finish_reason is not None
        summary = summary_to_proto(
            spec.speculation.method,
            generation.statistics,
            spec.requested_method,
            generation.traffic,
            generation.why_missing,
        )
        num_spec_tokens = spec.speculation.num_speculative_tokens
        metrics = speculative_decoding_to_proto(generation.statistics, num_spec_tokens)
        summary.speculative_decoding.CopyFrom(metrics)
        return verifier_pb2.Finished(
            reason=finish_reason_to_proto(verdict.finish_reason),
            stop_token_id=verdict.stop_token_id,  # None leaves a field of a message unset
            stop_string=verdict.stop_string,
            num_prompt_tokens=len(spec.prompt_token_ids),
            num_cached_prompt_tokens=generation.num_cached_prompt_tokens,
            # Resumed tokens are part of the output.
            num_output_tokens=verdict.base_len + len(verdict.token_ids) - len(spec.prompt_token_ids),
            summary=summary,
        )
