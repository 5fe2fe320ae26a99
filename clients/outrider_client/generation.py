"""The output of a generation: its chunks, its result, and the transcript that both clients fill event by event.

Knows nothing about channels and loops. Both clients' generations are transcripts that a stream fills.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from outrider.core.params import Source
from outrider.core.reports import TokenLogprobs
from outrider.v1 import verifier_pb2
from outrider_client.errors import Internal
from outrider_client.missing import missing_in_words

# A `Source` has the number that it has on the wire.
_SOURCES = {source.value: source for source in Source}


class FinishReason(Enum):
    """A `FinishReason` says why a generation ended."""

    LENGTH = "length"
    """max_tokens, or the end of the context."""
    STOP = "stop"
    """The model's end-of-sequence token, one of stop_token_ids, or a stop string."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Holds the tokens that one round committed."""

    token_ids: tuple[int, ...]
    """Tokens in order. Empty only in the last chunk, if it has only the text of bytes that had waited for more."""
    sources: tuple[Source | None, ...]
    """The source of each token; None for a source that this version does not know."""
    text: str
    """Their text, as far as it is decided: bytes of an unfinished character come with a later chunk."""
    num_drafted: int
    """Chain tokens that were verified in this round."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the tokens, in parallel, where they were asked for."""
    index: int = 0
    """The text that it belongs to, where several were asked for."""
    round: verifier_pb2.RoundReport | None = None
    """The work of the round, where that was asked for."""
    text_ends: tuple[int, ...] = ()
    """Ends of the tokens' texts in the whole text of the generation, in characters, where they were asked for. Some of
    that text may come with later chunks. If it was cut at a stop string, it is shorter than its last ends."""


@dataclass(frozen=True, slots=True)
class Result:
    """Holds a complete generation."""

    text: str
    """The text of the output, without tokens that were resumed."""
    token_ids: tuple[int, ...]
    """The output, without tokens that were resumed and without a stop token."""
    finish_reason: FinishReason
    """The reason for its end."""
    stop_token_id: int | None
    """The token that stopped it; None if it ended for another reason."""
    seed: int
    """The seed in use: with it, the same request gives the same text."""
    num_prompt_tokens: int
    """Length of the prompt."""
    num_output_tokens: int
    """Length of the output, resumed tokens included."""
    summary: verifier_pb2.SpeculationSummary
    """Counts of speculation. Those of a resumed generation begin with its last call: the others are lost with the
    servers that held them."""
    num_resumes: int = 0
    """Number of times that the generation went on in another call."""
    stop_string: str | None = None
    """The stop string that ended it; None if it ended for another reason. The tokens that it is made of are among
    `token_ids`."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of `token_ids`, in parallel, where they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Those of the prompt from its second token on, where they were asked for."""
    prompt_token_ids: tuple[int, ...] = ()
    """The prompt as the target reads it, where `echo` asked for it."""
    prompt_text: str = ""
    """The text of these tokens, special ones left out."""
    prompt_text_ends: tuple[int, ...] = ()
    """Ends of these tokens' texts in it, in characters, where `echo` and `text_ends` asked for them."""
    choices: tuple[Result, ...] = ()
    """All texts, this one first, where several were asked for. The seed of each one reproduces it alone."""
    num_cached_prompt_tokens: int = 0
    """Tokens of the prompt that the server of the last call did not compute again: it had them from earlier
    generations."""

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the target's own included: 1 without speculation; 0 if there was no round."""
        rounds = self.summary.num_rounds
        # 1: a round also brings a token of the target's own, recovered or bonus.
        return 1 + self.summary.num_accepted_tokens / rounds if rounds else 0.0

    @property
    def missing_peers(self) -> tuple[str, ...]:
        """Services that were missing for a part of it, in words: which, why, and for how many rounds. Empty if none
        was. The text is the same."""
        return missing_in_words(self.summary)

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were kept; 0 if no token was drafted."""
        drafted = self.summary.num_drafted_tokens
        return self.summary.num_accepted_tokens / drafted if drafted else 0.0

    @property
    def bytes_per_accepted_token(self) -> float:
        """Bytes of messages between the target and its drafter, in both directions, for each drafted token that was
        kept; 0 if no token was."""
        num_bytes = self.summary.num_bytes_sent + self.summary.num_bytes_received
        return num_bytes / self.summary.num_accepted_tokens if self.summary.num_accepted_tokens else 0.0


class Transcript:
    """Holds the output so far, over all calls. It stays readable after an error, so that the generation can be resumed
    by hand as well.

    >>> again = client.generate(prompt, seed=lost.seed, resume_token_ids=lost.token_ids)    # doctest: +SKIP
    """

    def __init__(self, num_choices: int = 1) -> None:
        self._others = [Transcript() for _ in range(num_choices - 1)]
        """The transcripts of the other texts, where several were asked for."""
        self._own_result: Result | None = None
        self.session_id: str | None = None
        """Names the generation in the logs of all services; None before the server has admitted it. Another one after
        each resumption."""
        self.seed: int | None = None
        """The seed in use; None before the server has admitted the generation."""
        self.num_resumes = 0
        """Number of times that the generation went on in another call."""
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._started = verifier_pb2.Started()
        self._result: Result | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens so far, without resumed ones."""
        return tuple(self._token_ids)

    @property
    def text(self) -> str:
        """The text so far, without resumed tokens."""
        return "".join(self._texts)

    @property
    def model_id(self) -> str:
        """The target model, as its server names it; empty before the server has admitted the generation."""
        return self._started.model.model_id

    @property
    def result(self) -> Result:
        """The result. Raises RuntimeError while the generation goes on, and after it failed."""
        if self._result is None:
            raise RuntimeError("the generation has not finished: read it to its end first")
        return self._result

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt; 0 before the server has admitted the generation."""
        return self._started.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens that have come of all texts."""
        return sum(len(each._token_ids) for each in (self, *self._others))

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt as the target reads it, where `echo` asked for it; empty before the server has admitted it."""
        return tuple(self._started.prompt_token_ids)

    @property
    def prompt_text(self) -> str:
        """The text of these tokens, special ones left out."""
        return self._started.prompt_text

    @property
    def prompt_text_ends(self) -> tuple[int, ...]:
        """Ends of these tokens' texts in it, where `echo` and `text_ends` asked for them."""
        return tuple(self._started.prompt_text_ends)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt from its second token on, where they were asked for; all of them once the
        first chunk is there."""
        return tuple(self._prompt_logprobs)

    @property
    def results(self) -> tuple[Result | None, ...]:
        """The result of each of the texts; None for one that goes on."""
        return tuple(each._own_result for each in (self, *self._others))

    def _fold(self, response: verifier_pb2.GenerateResponse) -> Chunk | None:
        """Takes an event of any of the texts in; returns the chunk if it is one."""
        all_ = [self, *self._others]
        if response.index >= len(all_):
            raise Internal(f"the server speaks of text {response.index} of {len(all_)}")
        chunk = all_[response.index]._fold_own(response)
        results = [each._own_result for each in all_]
        if self._result is None and all(results):
            known = tuple(result for result in results if result is not None)
            self._result = replace(known[0], choices=known if len(known) > 1 else ())
        return chunk

    def _fold_own(self, response: verifier_pb2.GenerateResponse) -> Chunk | None:
        """Takes an event of this text in; returns the chunk if it is one."""
        match response.WhichOneof("event"):
            case "started":
                # Counted where a server takes the generation over: calls that were refused on the way are no resumes.
                if self.session_id is not None:
                    self.num_resumes += 1
                self.session_id = response.started.session_id
                self.seed = response.started.seed
                self._started = response.started
            case "prompt_logprobs":
                told = response.prompt_logprobs
                # A resumed call reports them again.
                del self._prompt_logprobs[max(0, told.first_position - 1) :]
                self._prompt_logprobs += map(_token_logprobs, told.logprobs)
            case "chunk":
                chunk = _chunk(response.chunk, response.index)
                self._token_ids.extend(chunk.token_ids)
                self._logprobs.extend(chunk.logprobs)
                self._texts.append(chunk.text)
                return chunk
            case "finished":
                self._own_result = self._finish(response.finished)
        return None  # also for an event that a newer server may send

    def _end(self) -> None:
        """Takes the end of the stream with status OK. Raises Internal if the generation has not finished."""
        if self._result is None:
            raise Internal("the server ended the stream without finishing the generation")

    def _finish(self, finished: verifier_pb2.Finished) -> Result:
        if self.seed is None:
            raise Internal("the server finished a generation that it had not started")
        stopped = finished.reason == verifier_pb2.FINISH_REASON_STOP
        return Result(
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            # By presence, not by value: 0 can be a stop token.
            stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
            seed=self.seed,
            num_prompt_tokens=self._started.num_prompt_tokens,
            num_output_tokens=finished.num_output_tokens,
            summary=finished.summary,
            num_resumes=self.num_resumes,
            stop_string=finished.stop_string if finished.HasField("stop_string") else None,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            prompt_token_ids=tuple(self._started.prompt_token_ids),
            prompt_text=self._started.prompt_text,
            prompt_text_ends=tuple(self._started.prompt_text_ends),
            num_cached_prompt_tokens=finished.num_cached_prompt_tokens,
        )


def known_sources(numbers: Iterable[int]) -> tuple[Source | None, ...]:
    """Returns the sources by their numbers on the wire; None for a number that this version does not know."""
    return tuple(_SOURCES.get(number) for number in numbers)


def _chunk(message: verifier_pb2.Chunk, index: int) -> Chunk:
    return Chunk(
        tuple(message.token_ids),
        known_sources(message.sources),
        message.text,
        message.num_drafted,
        tuple(map(_token_logprobs, message.logprobs)),
        index,
        message.round if message.HasField("round") else None,
        tuple(message.text_ends),
    )


def _token_logprobs(message: verifier_pb2.TokenLogprobs) -> TokenLogprobs:
    top = zip(message.top_token_ids, message.top_logprobs, strict=True)
    return TokenLogprobs(message.logprob, message.rank, tuple(top))
