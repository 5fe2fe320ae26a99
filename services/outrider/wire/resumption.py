"""Rules for a generation that goes on in another call when its call breaks, for the SDK and the edge.

Does no input or output and reads no clock, as `attempts`. A text is never lost and never doubled: the next call gets
the tokens that have arrived, and goes on after them with the same seed, which is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import grpc
from google.protobuf.message import Message

from outrider.core.tree import TokenId
from outrider.v1 import types_pb2, verifier_pb2
from outrider.wire.attempts import REFUSALS, Attempts, Replicas
from outrider.wire.channels import NOT_TAKEN
from outrider.wire.details import fails_again, retry_after_s

LAST_CHANCE_S = 1.0
"""Least time for the first message of a call, even shortly before the timeout, in seconds."""
MAX_FRUITLESS = 3
"""Calls in a row that may break without bringing a token. After more of them, the request itself is taken to break
servers."""
BROKEN = REFUSALS | {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
"""Statuses that a caller sees when a server, or the path to it, ends."""
MAX_CHOICES = 1024
"""Most texts of one request that are followed; servers accept fewer."""


class Phase(Enum):
    """Names the states of a generation."""

    ASKING = "asking"
    """No server has taken it yet. Any model may begin it."""
    RUNNING = "running"
    """The server of the latest call has taken it."""
    BROKEN = "broken"
    """A server had taken it; the server of the next call has not taken it yet."""
    FINISHED = "finished"
    """All its texts are complete."""
    FAILED = "failed"
    """Its last error was final."""


class Taken(Enum):
    """Says what to do with a message."""

    EMIT = "emit"
    """It goes to the application."""
    SKIP = "skip"
    """It is dropped: the application has had the same from an earlier call."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Says that a call is useless. It counts as failed, with UNAVAILABLE: cancel it, and call `on_error`."""

    reason: str


@dataclass(slots=True)
class _Call:
    """Holds what is known of the running call."""

    has_spoken: bool = False
    """True if its server has sent a message about the generation."""
    has_read: bool = False
    """True if its server has reported that it reads the text."""
    is_excused: bool = False
    """True if its end is no evidence against the request."""


@dataclass(slots=True)
class _Text:
    """Holds what has arrived of one of the texts, over all calls."""

    token_ids: list[TokenId] = field(default_factory=list)
    num_characters: int = 0
    num_characters_before: int = 0
    """Characters that came before the running call."""
    has_rest: bool = False
    is_finished: bool = False

    def append_chunk(self, chunk: verifier_pb2.Chunk) -> Taken:
        """Takes a chunk in. Its `text_ends` become those in the whole text: the application sees all calls as one."""
        if not chunk.token_ids:
            # The rest of the text, which no token decides. A call that resumes after it sends it again.
            if self.has_rest:
                return Taken.SKIP
            self.has_rest = True
        self.token_ids.extend(chunk.token_ids)
        chunk.text_ends[:] = [min(self.num_characters_before + end, 2**31 - 1) for end in chunk.text_ends]
        self.num_characters += len(chunk.text)
        return Taken.EMIT


class ResumableGeneration(Attempts):
    """Follows one generation across its calls: records what has arrived, and decides where and when it goes on or is
    given up.

    Its reader begins a call with `begin` and `request`, waits for a message as long as `await_message` says, and hands
    it to `on_message`. If none comes, it calls `on_silence` or `on_error`.
    """

    def __init__(
        self,
        request: verifier_pb2.GenerateRequest,
        replicas: Replicas,
        now: float,
        *,
        timeout_s: float | None = None,
        resumes: bool = True,
        resume_timeout_s: float,
        stall_timeout_s: float,
        wait_s: float,
    ) -> None:
        """
        Args:
            request: The application's request. It may resume texts itself.
            replicas: Verifiers.
            now: The time.
            timeout_s: Time for all calls together; None means no deadline.
            resumes: False means that it ends with the first call that a server has taken.
            resume_timeout_s: Time for which a generation that has begun looks for a server to go on with.
            stall_timeout_s: Time for which a server may be silent; infinity means no limit.
            wait_s: Time for which a generation that has not begun looks for a server. Each is asked once in any case.
        """
        super().__init__(replicas, now, timeout_s=timeout_s, wait_s=wait_s)
        self.phase = Phase.ASKING
        self._request, self._resumes = request, resumes
        self._resume_timeout_s, self._stall_timeout_s = resume_timeout_s, stall_timeout_s
        self._model: types_pb2.ModelInfo | None = None
        """The model that began the texts. No other model may continue them."""
        self._seed: int | None = None
        """The seed in use; None until a server has told it."""
        # A number that no server accepts counts as one text.
        self._texts = [_Text() for _ in range(max(1, min(request.n, MAX_CHOICES)))]
        for text, choice in zip(self._texts, request.resume_choices, strict=False):
            text.is_finished = choice.is_finished
        self._call = _Call()
        self._broken_at: float | None = None
        """Time of the first break since the last token or report of reading."""
        self._num_fruitless = 0

    @property
    def num_texts(self) -> int:
        """Texts that are asked for."""
        return len(self._texts)

    def follow(self, elder: ResumableGeneration) -> None:
        """Counts as begun by the model of another text of the request: it looks for a server with that model."""
        self.phase, self._model = Phase.BROKEN, elder._model

    def begin(self, now: float, replica: int | None = None) -> int:
        """Begins a call; returns the number of the replica to ask. `replica`: ask this one, whatever its load."""
        self._call = _Call()
        if self.phase is Phase.RUNNING:
            self.phase = Phase.BROKEN
        with self._replicas as loads:
            if replica is None:
                replica = loads.choose(now, self._num_failures, self)
            else:
                loads.begin(replica, self)
        self.replica, self._last_message_at = replica, now
        return replica

    def request(self) -> verifier_pb2.GenerateRequest:
        """Returns the request of the next call: what remains after the tokens that have arrived."""
        # With the sampling of the first server: another server may have other defaults.
        request = with_sampling(self._request, self._model)
        # The first server may have drawn the seed: with the same seed the noise, and so the text, goes on as begun.
        if self._seed is not None:
            request.sampling.seed = self._seed
        # Extended, not set: the request may resume a text itself, and these tokens come after those.
        if len(self._texts) == 1:
            request.resume_token_ids.extend(self._texts[0].token_ids)
        elif any(text.token_ids or text.is_finished for text in self._texts):
            if not request.resume_choices:
                request.resume_choices.extend(verifier_pb2.ResumedChoice() for _ in self._texts)
            for choice, text in zip(request.resume_choices, self._texts, strict=False):
                choice.token_ids.extend(text.token_ids)
                choice.is_finished = text.is_finished
        return request

    def await_message(self, now: float) -> float | None:
        """Begins the wait for a message; returns the seconds until the call counts as broken, None for no limit."""
        self._last_message_at = now  # a late reader is not the server's silence
        limit_s = self._stall_timeout_s
        # A server that has sent nothing about the resumed generation may use only the remaining time for the
        # resumption.
        if self._broken_at is not None and not self._call.has_spoken:
            limit_s = min(limit_s, max(LAST_CHANCE_S, self._broken_at + self._resume_timeout_s - now))
        return None if math.isinf(limit_s) else limit_s

    def check_model(self, model: types_pb2.ModelInfo) -> Lost | None:
        """Checks the model of the called replica: `Lost` if it would continue the text differently than it was
        begun."""
        if not model.model_id:
            return None  # an older server
        if self._model is None or self.phase is Phase.ASKING:
            self._model = model
        problem = difference(self._model, model)
        return Lost(f"{self.address} {problem}") if problem else None

    def on_message(self, now: float, response: verifier_pb2.GenerateResponse) -> Taken | Lost:
        """Takes a message in. The `text_ends` of a chunk become those in the whole text."""
        if self.phase is Phase.FINISHED:
            return Taken.SKIP
        event = response.WhichOneof("event")
        # First: a replica with another model does not count as one that has answered.
        if event == "started":
            if (lost := self.check_model(response.started.model)) is not None:
                return lost
            load = response.started.load  # empty of an older server
            with self._replicas as loads:
                loads.started(
                    self.replica,
                    self,
                    now,
                    num_sessions=load.num_sessions,
                    num_queued=load.num_queued,
                    max_num_sessions=load.max_num_sessions,
                )
        self.on_answer(now)
        self._call.has_spoken = True
        if event == "waiting":
            return Taken.EMIT  # it is there, and may still refuse
        self.phase = Phase.RUNNING
        # The application must refuse a message about a text that was not asked for.
        text = self._texts[response.index] if response.index < len(self._texts) else _Text()
        match event:
            case "started":
                text.num_characters_before = text.num_characters
                if response.index == 0:  # the seeds of the others derive from it
                    self._seed = response.started.seed
            case "reading":
                # The server has taken the text over: from now on only silence counts.
                self._call.has_read, self._broken_at = True, None
            case "chunk":
                self._call.is_excused = True
                self._broken_at, self._num_fruitless = None, 0
                self._forget_failures()
                return text.append_chunk(response.chunk)
            case "finished":
                text.is_finished = True
                if all(each.is_finished for each in self._texts):
                    self.phase = Phase.FINISHED
                    self.end()
        return Taken.EMIT  # also an event that a newer server may send

    def on_silence(self, now: float) -> Lost:
        """Records that the time of `await_message` is over."""
        # The server may be slow, which is no reason to suspect the request. One that has reported its reading would
        # report that.
        self._call.is_excused = not self._call.has_read
        silent_s = now - self._last_message_at
        return Lost(f"{self.address} has told nothing of the generation for {silent_s:.3g} s")

    def on_error(self, now: float, code: grpc.StatusCode, details: Sequence[Message] = ()) -> float | None:
        """Records a failed call. See `Attempts.on_error`."""
        self.end()
        pause_s = super().on_error(now, code, details)
        if pause_s is None:
            self.phase = Phase.FAILED
        return pause_s

    def end(self) -> None:
        """Records that no call of the generation runs any more."""
        with self._replicas as loads:
            loads.end(self.replica, self)

    def _may_go_on(self, code: grpc.StatusCode, details: Sequence[Message]) -> bool:
        # A call that no server has taken yet is tried elsewhere in any case: there is no text to continue.
        is_refusal = code in REFUSALS and self.phase is Phase.ASKING
        return code in BROKEN and (self._resumes or is_refusal) and not fails_again(details)

    def _has_tried_enough(self, now: float, code: grpc.StatusCode, details: Sequence[Message]) -> bool:
        if self.phase is Phase.ASKING:
            # A server will be there before long if one has answered before, or if this one loads or drains.
            is_promised = code in NOT_TAKEN and retry_after_s(details) is not None
            is_full = code is grpc.StatusCode.RESOURCE_EXHAUSTED
            has_answered = self._replicas.has_answered and not is_full
            return self._is_refused(now, code, is_passing=self._resumes and (is_promised or has_answered))
        if self._broken_at is None:
            self._broken_at = now
        # A server that refused the call has not begun it: that is no evidence against the request.
        if not self._call.is_excused and (self.phase is Phase.RUNNING or code not in REFUSALS):
            self._num_fruitless += 1
        return now - self._broken_at >= self._resume_timeout_s or self._num_fruitless > MAX_FRUITLESS


def difference(begun: types_pb2.ModelInfo, here: types_pb2.ModelInfo) -> str:
    """Returns why a text would not go on as it was begun; empty if it would.

    Args:
        begun: The model that began it.
        here: The model that is asked to go on.
    """
    # The dtype, too: rounded differently, the same weights may choose another of two nearly equal tokens.
    if (begun.model_id, begun.tokenizer_hash, begun.dtype) != (here.model_id, here.tokenizer_hash, here.dtype):
        return f"serves {here.model_id} in {here.dtype}; the generation was begun by {begun.model_id} in {begun.dtype}"
    # If the first server has promised nothing, because its rows are not exact, no promise is broken.
    if begun.numerics_id and begun.numerics_id != here.numerics_id:
        return f"computes {here.model_id} with other weights, libraries or threads, or on another processor"
    return ""


def with_sampling(
    request: verifier_pb2.GenerateRequest, model: types_pb2.ModelInfo | None
) -> verifier_pb2.GenerateRequest:
    """Returns a copy of a request in which the unset sampling fields have the defaults of this model's server, where
    servers may differ: its text is the same wherever it goes on. None: only a copy."""
    whole = verifier_pb2.GenerateRequest()
    whole.CopyFrom(request)
    if model is None:
        return whole
    defaults = model.default_sampling
    whole.sampling.CopyFrom(_WITHOUT_DEFAULTS)
    whole.sampling.MergeFrom(defaults)
    whole.sampling.MergeFrom(request.sampling)
    if defaults.HasField("max_tokens") and not request.sampling.HasField("max_tokens"):
        # The request does not name the default, so its min_tokens may raise it.
        whole.sampling.max_tokens = max(defaults.max_tokens, request.sampling.min_tokens)
        whole.clamp_max_tokens = True
    return whole


_WITHOUT_DEFAULTS = types_pb2.SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, repetition_penalty=1)
"""Sampling that applies if neither request nor model say anything."""
