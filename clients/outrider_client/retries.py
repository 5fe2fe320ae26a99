"""How often a call is tried that no replica takes, where, and after which pause. Knows nothing about channels and
loops: both clients use it."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence

import grpc

from outrider.v1 import types_pb2, verifier_pb2
from outrider.wire.channels import doubled
from outrider_client.errors import OutriderError, ResourceExhausted, Unavailable
from outrider_client.requests import GenerateOptions
from outrider_client.tracing import GenerationTrace

NUM_ROUNDS = 4
"""How often each replica is asked: within about a second."""
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 1.0
REFUSALS = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED})
"""The server does not take it now; another one may. CANCELLED is what gRPC makes of a call that comes in while a server
begins to stop; our own cancelling never comes this far."""


class RetryState:
    """The attempts of one call."""

    def __init__(
        self, replicas: Replicas, timeout_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`timeout_s` is for all of them together; None = no deadline."""
        self.replica = 0
        """The one that is asked now, by its number."""
        self._replicas, self._clock = replicas, clock
        self._deadline = math.inf if timeout_s is None else clock() + timeout_s
        self._heard_at = clock()
        self._forget_failures()

    @property
    def remaining_s(self) -> float | None:
        """What is left until the deadline; None = there is none."""
        return None if math.isinf(self._deadline) else max(0.001, self._deadline - self._clock())

    @property
    def is_closed(self) -> bool:
        """Whether the client has hung up."""
        return self._replicas.is_closed

    def begin(self) -> int:
        """The replica to ask now."""
        self.replica, self._heard_at = self._replicas.next(self._num_failures), self._clock()
        return self.replica

    def answered(self) -> None:
        """The replica has said something."""
        self._heard_at = self._clock()
        self._replicas.answered(self.replica)

    def after(self, error: OutriderError) -> float:
        """The attempt has failed: how long to wait before the next one, in seconds. Raises the error if it is final."""
        if error.code not in REFUSALS:
            raise error
        self._fail(error)
        self._count_refusal(error)
        return self._pause_s()

    def _forget_failures(self) -> None:
        self._num_failures = [0] * len(self._replicas.addresses)
        self._num_pauses = 0

    def _fail(self, error: OutriderError) -> None:
        """The replica is left alone for a while. Raises the error if there is no time left."""
        now = self._clock()
        if self.is_closed or now >= self._deadline:
            raise error
        retry_after_s = error.retry_after_s or 0.0 if isinstance(error, ResourceExhausted) else 0.0
        self._replicas.failed(self.replica, max(now - self._heard_at, retry_after_s))
        self._num_failures[self.replica] += 1

    def _count_refusal(self, error: OutriderError) -> None:
        """Whoever asks should soon know that nobody takes it. Raises the error if each was asked often enough."""
        is_full = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        if (is_full and len(self._num_failures) == 1) or min(self._num_failures) >= NUM_ROUNDS:
            raise error

    def _pause_s(self) -> float:
        """Nothing before every replica has failed as often as the others; then longer each time."""
        if self._replicas.has_fresh or min(self._num_failures) <= self._num_pauses:
            return 0.0
        pause_s = doubled(FIRST_PAUSE_S, LAST_PAUSE_S, self._num_pauses) * random.uniform(0.8, 1.2)
        self._num_pauses += 1
        return min(pause_s, max(0.0, self._deadline - self._clock()))


RESUME_TIMEOUT_S = 30.0
STALL_TIMEOUT_S = 30.0
LAST_CHANCE_S = 1.0
"""What a call has for its first message that is made shortly before the timeout."""
MAX_FRUITLESS = 3
"""Calls in a row that may break without a token of theirs. After more of them it is the request that breaks servers."""
BROKEN = REFUSALS | {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
"""What the end of a server, or of the way to it, looks like from here."""


class ResumableCall(RetryState):
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

    def on_message(self, response: verifier_pb2.GenerateResponse) -> None:
        """A message has come. Raises Unavailable if another model than the one that began would go on."""
        if response.WhichOneof("event") == "started":
            self._check_model(response.started.model)
        self.trace.on_message(response)
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


AVOID_S = 1.0
"""How long a replica that has failed is left alone, at least."""
MAX_AVOID_S = 30.0


class Replicas:
    """The addresses of one verifier. Thread-safe."""

    def __init__(self, addresses: str | Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """`addresses`: HOST:PORT, several separated by commas, or a sequence of them. Raises ValueError for none."""
        self.addresses = addresses_of(addresses)
        self._clock = clock
        self._lock = threading.Lock()
        self._turn = 0
        self._avoided_until = [0.0] * len(self.addresses)
        self.has_answered = False
        """Whether one of them ever has."""
        self.is_closed = False
        """Whether the client has hung up: nothing is to be tried again."""

    def next(self, num_failures: Sequence[int] = ()) -> int:
        """The number of the replica to ask: the next one in turn. If all have just failed, the one that has failed the
        least often by `num_failures`, a number for each; among equals, the first to come back."""
        with self._lock:
            now, count = self._clock(), len(self.addresses)

            def merit(number: int) -> tuple[float, float]:
                if self._avoided_until[number] <= now:
                    return -1.0, 0.0
                return num_failures[number] if num_failures else 0, self._avoided_until[number]

            chosen = min(((self._turn + offset) % count for offset in range(count)), key=merit)
            self._turn = (chosen + 1) % count
            return chosen

    def answered(self, number: int) -> None:
        """It is well."""
        self.has_answered = True
        self._avoided_until[number] = 0.0

    def failed(self, number: int, silent_s: float) -> None:
        """It has failed, after having said nothing for so long: it is left alone for as long, so that one that hangs is
        not found out by every call anew."""
        avoid_s = min(MAX_AVOID_S, max(AVOID_S, silent_s))
        with self._lock:
            self._avoided_until[number] = self._clock() + avoid_s

    @property
    def has_fresh(self) -> bool:
        """Whether one of them has not just failed."""
        return min(self._avoided_until) <= self._clock()


def addresses_of(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Each address once, in order. Raises ValueError if there is none."""
    listed = addresses.split(",") if isinstance(addresses, str) else addresses
    found = tuple(dict.fromkeys(address.strip() for address in listed if address.strip()))
    if not found:
        raise ValueError(f"address must name at least one server, HOST:PORT, got {addresses!r}")
    return found
