"""A generation that goes on in another call when its call breaks: SDK and edge follow the same rules.

Does no input or output and reads no clock, as `attempts`. A text is never lost and never doubled: the next call is
given the tokens that have arrived, and goes on after them with the same seed, which is exact.
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
"""Least time for the first message of a call, also shortly before the timeout, in seconds."""
MAX_FRUITLESS = 3
"""Calls in a row that may break without bringing a token. After more of them it is the request that breaks servers."""
BROKEN = REFUSALS | {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
"""Statuses that the end of a server, or of the path to it, has at its caller."""
MAX_CHOICES = 1024
"""Most texts of one request that are followed; servers take fewer."""


class Phase(Enum):
    """Names the states of a generation."""

    ASKING = "asking"
    """No server has taken it yet. Any model may begin it."""
    RUNNING = "running"
    """The server that has, or had, the latest call has taken it."""
    BROKEN = "broken"
    """A server had taken it; the server that has the next call has not taken it yet."""
    FINISHED = "finished"
    """All its texts have come to their ends."""
    FAILED = "failed"
    """Its last error was final."""


class Taken(Enum):
    """Says what is to become of a message."""

    EMIT = "emit"
    """It goes to the application."""
    SKIP = "skip"
    """The application has had the same of an earlier call."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Says that a call is of no more use. It counts as failed, with UNAVAILABLE: cancel it, and call `on_error`."""

    reason: str


@dataclass(slots=True)
class _Call:
    """Holds what is known of the call that runs."""

    has_spoken: bool = False
    """True if its server has said something of the generation."""
    has_read: bool = False
    """True if its server has told of its reading."""
    is_excused: bool = False
    """True if its end says nothing against the request."""


@dataclass(slots=True)
class _Text:
    """Holds what one of the texts has come to, over all calls."""

    token_ids: list[TokenId] = field(default_factory=list)
    num_characters: int = 0
    num_characters_before: int = 0
    """Characters that had come before the call that runs."""
    has_rest: bool = False
    is_finished: bool = False

    def append_chunk(self, chunk: verifier_pb2.Chunk) -> Taken:
        """Takes a chunk in. Its `text_ends` become those in the whole text: to the application all calls are one."""
        if not chunk.token_ids:
            # The rest of the text, which no token decides. A call that is resumed after it brings it again.
            if self.has_rest:
                return Taken.SKIP
            self.has_rest = True
        self.token_ids.extend(chunk.token_ids)
        chunk.text_ends[:] = [min(self.num_characters_before + end, 2**31 - 1) for end in chunk.text_ends]
        self.num_characters += len(chunk.text)
        return Taken.EMIT


class ResumableGeneration(Attempts):
    """Follows one generation across its calls: what has arrived, where and when it goes on, and when it is given up.

    Its reader begins a call with `begin` and `request`, waits for a message as long as `await_message` says, and hands
    it to `on_message`; or what came in its place to `on_silence` and `on_error`.
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
            request: The application's. It may resume texts itself.
            replicas: Verifiers.
            now: The time.
            timeout_s: Time for all calls together; None means no deadline.
            resumes: False means that it ends with the first call that a server has taken.
            resume_timeout_s: Time for which a generation that has begun looks for a server to go on.
            stall_timeout_s: Time for which a server may be silent; infinity means no limit.
            wait_s: Time for which a generation that has not begun looks for a server. Each is asked once.
        """
        super().__init__(replicas, now, timeout_s=timeout_s, wait_s=wait_s)
        self.phase = Phase.ASKING
        self._request, self._resumes = request, resumes
        self._resume_timeout_s, self._stall_timeout_s = resume_timeout_s, stall_timeout_s
        self._model: types_pb2.ModelInfo | None = None
        """The model that began the texts: no other one may go on with them."""
        self._seed: int | None = None
        """The seed in use; None while no server has told it."""
        # A number that no server takes counts as one.
        self._texts = [_Text() for _ in range(max(1, min(request.n, MAX_CHOICES)))]
        for text, choice in zip(self._texts, request.resume_choices, strict=False):
            text.is_finished = choice.is_finished
        self._call = _Call()
        self._broken_at: float | None = None
        """Time of the first of the breaks since a token, or the reading of the text, was told of."""
        self._num_fruitless = 0

    @property
    def num_texts(self) -> int:
        """Texts that are asked for."""
        return len(self._texts)

    def follow(self, elder: ResumableGeneration) -> None:
        """Counts as begun by the model of another text of the request: it goes on looking for one that serves it."""
        self.phase, self._model = Phase.BROKEN, elder._model

    def begin(self, now: float, replica: int | None = None) -> int:
        """Begins a call; returns the number of the replica to ask. `replica`: this one, whatever it has to do."""
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
        """Returns the request of the next call: what is left after the tokens that have arrived."""
        # The sampling as it was begun with: another server may have other defaults.
        request = with_sampling(self._request, self._model)
        # The first server may have drawn the seed: with the same one the noise, and so the text, goes on as begun.
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
        self._last_message_at = now  # the reader may have come late: that is not the server's silence
        limit_s = self._stall_timeout_s
        # A server that has not said a word of the resumed generation may use up only what is left of the time for it.
        if self._broken_at is not None and not self._call.has_spoken:
            limit_s = min(limit_s, max(LAST_CHANCE_S, self._broken_at + self._resume_timeout_s - now))
        return None if math.isinf(limit_s) else limit_s

    def check_model(self, model: types_pb2.ModelInfo) -> Lost | None:
        """Takes in the model of the replica that has the call: `Lost` if it would go on differently than the text was
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
        # Before all else: a replica with another model does not count as one that has answered.
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
            return Taken.EMIT  # it is there, and may refuse still
        self.phase = Phase.RUNNING
        # One of a text that was not asked for is for the application to refuse.
        text = self._texts[response.index] if response.index < len(self._texts) else _Text()
        match event:
            case "started":
                text.num_characters_before = text.num_characters
                if response.index == 0:  # those of the others are made of it
                    self._seed = response.started.seed
            case "reading":
                # It has taken the text over: from here on only silence counts.
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
        """Takes in that the time of `await_message` is over."""
        # It may be slow: that is no reason to suspect the request. One that has told of its reading would tell of that.
        self._call.is_excused = not self._call.has_read
        silent_s = now - self._last_message_at
        return Lost(f"{self.address} has told nothing of the generation for {silent_s:.3g} s")

    def on_error(self, now: float, code: grpc.StatusCode, details: Sequence[Message] = ()) -> float | None:
        """Takes in a failed call. See `Attempts.on_error`."""
        self.end()
        pause_s = super().on_error(now, code, details)
        if pause_s is None:
            self.phase = Phase.FAILED
        return pause_s

    def end(self) -> None:
        """Takes in that no call of the generation runs any more."""
        with self._replicas as loads:
            loads.end(self.replica, self)

    def _may_go_on(self, code: grpc.StatusCode, details: Sequence[Message]) -> bool:
        # A call that no server has taken yet is tried elsewhere in any case: there is no text to go on with.
        is_refusal = code in REFUSALS and self.phase is Phase.ASKING
        return code in BROKEN and (self._resumes or is_refusal) and not fails_again(details)

    def _has_tried_enough(self, now: float, code: grpc.StatusCode, details: Sequence[Message]) -> bool:
        if self.phase is Phase.ASKING:
            # There will be a server before long where one has answered before, or where this one loads or drains.
            is_promised = code in NOT_TAKEN and retry_after_s(details) is not None
            is_full = code is grpc.StatusCode.RESOURCE_EXHAUSTED
            has_answered = self._replicas.has_answered and not is_full
            return self._is_refused(now, code, is_passing=self._resumes and (is_promised or has_answered))
        if self._broken_at is None:
            self._broken_at = now
        # A server that refused the call has not begun with it: that says nothing against the request.
        if not self._call.is_excused and (self.phase is Phase.RUNNING or code not in REFUSALS):
            self._num_fruitless += 1
        return now - self._broken_at >= self._resume_timeout_s or self._num_fruitless > MAX_FRUITLESS


def difference(begun: types_pb2.ModelInfo, here: types_pb2.ModelInfo) -> str:
    """Returns why a text would not go on here as it was begun; empty if it would.

    Args:
        begun: The model that began it.
        here: The model that is asked to go on.
    """
    # The dtype, too: rounded differently, the same weights may choose another of two nearly equal tokens.
    if (begun.model_id, begun.tokenizer_hash, begun.dtype) != (here.model_id, here.tokenizer_hash, here.dtype):
        return f"serves {here.model_id} in {here.dtype}; the generation was begun by {begun.model_id} in {begun.dtype}"
    # Where the first server has promised nothing, as those do whose rows are not exact, nothing is broken.
    if begun.numerics_id and begun.numerics_id != here.numerics_id:
        return f"computes {here.model_id} with other weights, libraries or threads, or on another processor"
    return ""


def with_sampling(
    request: verifier_pb2.GenerateRequest, model: types_pb2.ModelInfo | None
) -> verifier_pb2.GenerateRequest:
    """Returns a copy that says of its sampling what the request leaves unset and servers may differ in, as the server
    of this model has it: its text is the same wherever it goes on. None: only a copy."""
    whole = verifier_pb2.GenerateRequest()
    whole.CopyFrom(request)
    if model is None:
        return whole
    defaults = model.default_sampling
    whole.sampling.CopyFrom(_WITHOUT_DEFAULTS)
    whole.sampling.MergeFrom(defaults)
    whole.sampling.MergeFrom(request.sampling)
    if defaults.HasField("max_tokens") and not request.sampling.HasField("max_tokens"):
        # Nobody has asked for just so many.
        whole.sampling.max_tokens = max(defaults.max_tokens, request.sampling.min_tokens)
        whole.clamp_max_tokens = True
    return whole


_WITHOUT_DEFAULTS = types_pb2.SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, repetition_penalty=1)
"""Sampling that counts where neither request nor model say anything."""
