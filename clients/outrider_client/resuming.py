"""How a generation outlives the call that it began in: when it goes on in another one, and what that one is asked.

What a target says is a function of the request, the seed and the tokens before it. So another replica, or the same one
once it is back, goes on exactly where a broken call ended, if it is given the seed in use and the tokens so far.
Knows nothing about channels and loops: both clients use it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import grpc

from outrider.v1 import types_pb2, verifier_pb2
from outrider_client.attempts import REFUSALS, Attempts
from outrider_client.errors import OutriderError, Unavailable
from outrider_client.replicas import Replicas
from outrider_client.requests import GenerateOptions
from outrider_client.tracing import GenerationTrace

RESUME_TIMEOUT_S = 30.0
STALL_TIMEOUT_S = 30.0
LAST_CHANCE_S = 1.0
"""What a call has for its first message that is made shortly before the timeout."""
MAX_FRUITLESS = 3
"""Calls in a row that may break without a token of theirs. After more of them it is the request that breaks servers."""
BROKEN = REFUSALS | {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
"""What the end of a server, or of the way to it, looks like from here."""


class Course(Attempts):
    """One generation across its calls. Used by the task, or the thread, that reads."""

    def __init__(
        self,
        request: verifier_pb2.GenerateRequest,
        replicas: Replicas,
        options: GenerateOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ValueError for a timeout that is none."""
        super().__init__(replicas, options.get("timeout_s"), clock)
        self._request = request
        self._resumes = options.get("resume") is not False
        self._resume_timeout_s = _seconds("resume_timeout_s", options.get("resume_timeout_s"), RESUME_TIMEOUT_S)
        self._stall_timeout_s = _seconds("stall_timeout_s", options.get("stall_timeout_s"), STALL_TIMEOUT_S)
        self._began_at = clock()
        self._model: types_pb2.ModelInfo | None = None
        """Whose text it is."""
        self._broken_at: float | None = None
        self._was_admitted = self._is_admitted = False
        self._is_excused = False
        """Whether the end of this call says nothing against the request."""
        self._num_fruitless = 0
        self.trace = GenerationTrace(request)

    def begin(self) -> int:
        """The replica to ask now."""
        replica = super().begin()
        self.trace.begin_call(self._replicas.addresses[replica])
        return replica

    def await_message(self) -> float | None:
        """The next message is waited for from now on: for how long, before the call counts as broken, in seconds;
        None = for ever."""
        self._heard_at = self._clock()  # what came while nobody read is no silence
        limit_s = self._stall_timeout_s
        if self._broken_at is not None and not self._is_admitted:
            left_s = self._broken_at + self._resume_timeout_s - self._clock()
            limit_s = min(limit_s, max(LAST_CHANCE_S, left_s))
        return None if math.isinf(limit_s) else limit_s

    def request(self, seed: int | None, token_ids: Sequence[int]) -> verifier_pb2.GenerateRequest:
        """What the next call asks: what is left of the request, after this seed and these tokens have arrived."""
        self._is_admitted = self._is_excused = False
        request = verifier_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        if seed is not None:
            request.sampling.seed = seed
        request.resume_token_ids.extend(token_ids)
        return request

    def hear(self, response: verifier_pb2.GenerateResponse) -> None:
        """A message has come. Raises Unavailable if another model than the one that began would go on."""
        if response.WhichOneof("event") == "started":
            self._check_model(response.started.model)
        self.trace.hear(response)
        self.answered()
        self._is_admitted = self._was_admitted = True
        if response.WhichOneof("event") == "chunk":
            self._is_excused = True
            self._broken_at, self._num_fruitless = None, 0
            self._forget_failures()

    def _check_model(self, model: types_pb2.ModelInfo) -> None:
        if not model.model_id:
            return  # an older server
        if self._model is None:
            self._model = model
        begun, here = self._model, model
        if (begun.model_id, begun.tokenizer_hash, begun.dtype) != (here.model_id, here.tokenizer_hash, here.dtype):
            raise Unavailable(
                f"{self._replicas.addresses[self.replica]} serves {here.model_id} in {here.dtype}; the generation was "
                f"begun by {begun.model_id} in {begun.dtype}"
            )

    def stalled(self) -> OutriderError:
        """What it means that nothing came for so long."""
        silent_s = self._clock() - self._heard_at
        self._is_excused = True  # it may be slow: that is no reason to suspect the request
        return Unavailable(f"nothing came from {self._replicas.addresses[self.replica]} for {silent_s:.3g} s")

    def after(self, error: OutriderError) -> float:
        """The call has failed: how long to wait before the next one, in seconds. Raises the error if it is final."""
        try:
            pause_s = self._judge(error)
        except OutriderError:
            self.trace.fail(error)
            raise
        self.trace.go_on(error)
        return pause_s

    def _judge(self, error: OutriderError) -> float:
        if error.code not in BROKEN or not (self._resumes or self._is_refusal(error)):
            raise error
        self._fail(error)
        if self._was_admitted:
            self._count_break(error)
        else:
            self._count_refusal(error)
        return self._pause_s()

    def _is_refusal(self, error: OutriderError) -> bool:
        return error.code in REFUSALS and not self._was_admitted

    def _count_refusal(self, error: OutriderError) -> None:
        if not (self._resumes and self._is_passing(error)):
            super()._count_refusal(error)
        if min(self._num_failures) and self._clock() - self._began_at >= self._resume_timeout_s:
            raise error

    def _is_passing(self, error: OutriderError) -> bool:
        """Whether there will be a server before long: there was one, or this one only loads or drains."""
        if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return False
        is_promised = isinstance(error, Unavailable) and error.retry_after_s is not None
        return is_promised or self._replicas.has_answered

    def _count_break(self, error: OutriderError) -> None:
        """It was on its way. Raises the error if it has been tried for long enough."""
        now = self._clock()
        if self._broken_at is None:
            self._broken_at = now
        if not self._is_excused and (self._is_admitted or error.code not in REFUSALS):
            self._num_fruitless += 1
        if now - self._broken_at >= self._resume_timeout_s or self._num_fruitless > MAX_FRUITLESS:
            raise error


def _seconds(name: str, value: float | None, default: float) -> float:
    if value is None:
        return default
    if not value > 0:
        raise ValueError(f"{name} must be > 0, got {value!r}")
    return float(value)
