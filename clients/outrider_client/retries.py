"""Decides where a call goes, how often it is repeated, and after which pause: for one call, and for a generation that
goes on in another call. Knows nothing about channels and loops: both clients use it."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence

import grpc

from outrider.core.load import ReplicaLoads
from outrider.v1 import types_pb2, verifier_pb2
from outrider.wire.channels import doubled, first_turn
from outrider.wire.details import fails_again
from outrider.wire.resumption import MAX_CHOICES, difference, with_sampling
from outrider_client.channel import verifier_addresses
from outrider_client.errors import Cancelled, OutriderError, ResourceExhausted, Unavailable
from outrider_client.requests import GenerateOptions
from outrider_client.tracing import GenerationTrace


class Replicas:
    """Holds the addresses of one verifier, and chooses the one for the next call. Thread-safe."""

    def __init__(self, addresses: str | Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """`addresses`: HOST:PORT, several separated by commas, or a sequence of them. Raises ValueError without any,
        and for a URL."""
        self.addresses = verifier_addresses(addresses)
        self._clock = clock
        self._lock = threading.Lock()
        self._loads = ReplicaLoads(len(self.addresses), first_turn(len(self.addresses)))
        self.has_answered = False
        """True once one of them has answered."""
        self.is_closed = False
        """True once the client is closed: nothing is tried again."""

    def next(self, num_failures: Sequence[int] = (), generation: object | None = None) -> int:
        """Returns the number of the replica to ask. See `ReplicaLoads.choose`."""
        with self._lock:
            return self._loads.choose(self._clock(), num_failures, generation)

    def started(self, number: int, generation: object, load: verifier_pb2.VerifierLoad) -> None:
        """Takes in that a replica has begun with a generation, and what it says of its load; nothing if that is empty,
        as of an older server."""
        with self._lock:
            self._loads.started(
                number,
                generation,
                self._clock(),
                num_sessions=load.num_sessions,
                num_queued=load.num_queued,
                max_num_sessions=load.max_num_sessions,
            )

    def ended(self, number: int, generation: object) -> None:
        """Takes in that a generation is over at a replica."""
        with self._lock:
            self._loads.end(number, generation)

    def answered(self, number: int) -> None:
        """Records that a replica has answered: it gets calls in its turn again."""
        self.has_answered = True
        self._loads.answered(number)

    def failed(self, number: int, silent_s: float) -> None:
        """Records that a replica has failed after sending nothing for `silent_s`, and is to be left alone for a
        while."""
        with self._lock:
            self._loads.failed(number, self._clock(), silent_s)

    @property
    def has_fresh(self) -> bool:
        """True if a replica has not just failed."""
        return self._loads.has_fresh(self._clock())


NUM_ROUNDS = 4
"""Calls to each replica before a refusal is final, all within about a second."""
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 1.0
REFUSALS = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
"""The server does not take the call now; another one may."""


class RetryState:
    """Follows one call across its attempts."""

    def __init__(
        self, replicas: Replicas, timeout_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`timeout_s` is for all attempts together; None means no deadline."""
        self.replica = 0
        """The number of the replica that has the current attempt."""
        self._replicas, self._clock = replicas, clock
        self._deadline = math.inf if timeout_s is None else clock() + timeout_s
        self._last_message_at = clock()
        self._forget_failures()

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline; None without a deadline."""
        return None if math.isinf(self._deadline) else max(0.001, self._deadline - self._clock())

    @property
    def address(self) -> str:
        """The address of the replica that has the current attempt."""
        return self._replicas.addresses[self.replica]

    @property
    def is_closed(self) -> bool:
        """True once the client is closed."""
        return self._replicas.is_closed

    def begin(self) -> int:
        """Begins an attempt; returns the number of the replica to ask."""
        self.replica, self._last_message_at = self._next_replica(), self._clock()
        return self.replica

    def _next_replica(self) -> int:
        return self._replicas.next(self._num_failures)

    def answered(self) -> None:
        """Records that the replica has sent something."""
        self._last_message_at = self._clock()
        self._replicas.answered(self.replica)

    def after(self, error: OutriderError) -> float:
        """Records a failed attempt; returns the seconds until the next one. Raises the error if it is final."""
        if error.code not in REFUSALS:
            raise error
        self._fail(error)
        self._count_refusal(error)
        return self._pause_s()

    def _forget_failures(self) -> None:
        self._num_failures = [0] * len(self._replicas.addresses)
        self._num_pauses = 0

    def _fail(self, error: OutriderError) -> None:
        """Leaves the replica alone for a while. Raises the error if there is no time left, Cancelled if the client was
        closed."""
        now = self._clock()
        if self.is_closed:
            raise Cancelled("the client was closed") from error
        if now >= self._deadline:
            raise error
        retry_after_s = error.retry_after_s or 0.0 if isinstance(error, ResourceExhausted) else 0.0
        self._replicas.failed(self.replica, max(now - self._last_message_at, retry_after_s))
        self._num_failures[self.replica] += 1

    def _count_refusal(self, error: OutriderError) -> None:
        """Raises the error if each replica has refused often enough: the caller should know of it soon."""
        is_full = error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        # With one replica there is no other to try, and the error tells the caller when this one may have room.
        if (is_full and len(self._num_failures) == 1) or min(self._num_failures) >= NUM_ROUNDS:
            raise error

    def _pause_s(self) -> float:
        """Returns 0 until every replica has failed as often as the others; then more each time."""
        if self._replicas.has_fresh or min(self._num_failures) <= self._num_pauses:
            return 0.0
        # Clients that were refused together must not come back together.
        pause_s = doubled(FIRST_PAUSE_S, LAST_PAUSE_S, self._num_pauses) * random.uniform(0.8, 1.2)
        self._num_pauses += 1
        return min(pause_s, max(0.0, self._deadline - self._clock()))


RESUME_TIMEOUT_S = 30.0
STALL_TIMEOUT_S = 30.0
LAST_CHANCE_S = 1.0
"""Least time for the first message of a call, also shortly before the timeout, in seconds."""
MAX_FRUITLESS = 3
"""Calls in a row that may break without bringing a token. After more of them it is the request that breaks servers."""
BROKEN = REFUSALS | {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
"""Statuses that the end of a server, or of the path to it, has here."""


class ResumableCall(RetryState):
    """Follows one generation across its calls. Used by the task, or the thread, that reads."""

    def __init__(
        self,
        request: verifier_pb2.GenerateRequest,
        replicas: Replicas,
        options: GenerateOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ValueError for a timeout that is not positive."""
        super().__init__(replicas, options.get("timeout_s"), clock)
        self._request = request
        self._resumes = options.get("resume") is not False
        self._resume_timeout_s = _seconds("resume_timeout_s", options.get("resume_timeout_s"), RESUME_TIMEOUT_S)
        self._stall_timeout_s = _seconds("stall_timeout_s", options.get("stall_timeout_s"), STALL_TIMEOUT_S)
        self._began_at = clock()
        self._model: types_pb2.ModelInfo | None = None
        """The model that began the text: no other one may go on with it."""
        self._broken_at: float | None = None
        self._was_admitted = self._is_admitted = False
        self._has_spoken = self._has_read = False
        """True if this call's server has said something, and if it has told of its reading."""
        self._is_excused = False
        """True if the end of this call says nothing against the request."""
        self._num_fruitless = 0
        self._num_unfinished = self.num_choices - sum(choice.is_finished for choice in request.resume_choices)
        """Texts of which the end has not come."""
        self.trace = GenerationTrace(request)

    def begin(self) -> int:
        """Begins an attempt; returns the number of the replica to ask."""
        replica = super().begin()
        self.trace.begin_call(self._replicas.addresses[replica])
        return replica

    def _next_replica(self) -> int:
        return self._replicas.next(self._num_failures, self)

    def end(self) -> None:
        """Records that no call of the generation runs any more."""
        self._replicas.ended(self.replica, self)

    def cancel(self) -> None:
        """Records that the application ends the generation."""
        self.end()
        self.trace.cancel()

    def await_message(self) -> float | None:
        """Begins the wait for a message; returns the seconds until the call counts as broken, None for no limit."""
        self._last_message_at = self._clock()  # the caller may have read late: that is not the server's silence
        limit_s = self._stall_timeout_s
        # A server that has not said a word of the resumed generation may use up only what is left of the time for it.
        if self._broken_at is not None and not self._has_spoken:
            left_s = self._broken_at + self._resume_timeout_s - self._clock()
            limit_s = min(limit_s, max(LAST_CHANCE_S, left_s))
        return None if math.isinf(limit_s) else limit_s

    @property
    def num_choices(self) -> int:
        """Texts that are asked for. A number that no server takes counts as one."""
        return max(1, min(self._request.n, MAX_CHOICES))

    def request(
        self, seed: int | None, token_ids: Sequence[int], choices: Sequence[verifier_pb2.ResumedChoice] = ()
    ) -> verifier_pb2.GenerateRequest:
        """Returns the request of the next call: what is left after this seed and these tokens have arrived.

        Args:
            seed: The seed in use; None if no server has told it yet.
            token_ids: Tokens that have arrived.
            choices: In their place, those of several texts.
        """
        self._is_admitted = self._is_excused = self._has_spoken = self._has_read = False
        request = verifier_pb2.GenerateRequest()
        # The sampling as it was begun with: another server may have other defaults.
        request.CopyFrom(self._request if self._model is None else with_sampling(self._request, self._model))
        # The first server may have drawn the seed: with the same one the noise, and so the text, goes on as begun.
        if seed is not None:
            request.sampling.seed = seed
        # Extended, not set: the request may resume a text itself, and `token_ids` are those behind that.
        if not choices:
            request.resume_token_ids.extend(token_ids)
        elif seed is not None:
            # What the request itself resumes comes first.
            for choice, begun in zip(choices, request.resume_choices, strict=False):
                choice.token_ids[:] = [*begun.token_ids, *choice.token_ids]
            del request.resume_choices[:]
            request.resume_choices.extend(choices)
        return request

    def on_message(self, response: verifier_pb2.GenerateResponse) -> None:
        """Takes a message. Raises Unavailable if another model than the one that began would go on."""
        # Before all else: a replica with another model does not count as one that has answered.
        if response.WhichOneof("event") == "started":
            self._check_model(response.started.model)
            self._replicas.started(self.replica, self, response.started.load)
        is_last = True
        if response.WhichOneof("event") == "finished":
            self._num_unfinished -= 1
            is_last = self._num_unfinished <= 0
            if is_last:
                self.end()
        # The span of several texts ends with the last one.
        if is_last:
            self.trace.on_message(response)
        self.answered()
        self._has_spoken = True
        if response.WhichOneof("event") == "waiting":
            return  # it is there, and may refuse still
        self._is_admitted = self._was_admitted = True
        if response.WhichOneof("event") == "reading":
            # It has taken the text over: from here on only silence counts.
            self._has_read, self._broken_at = True, None
        if response.WhichOneof("event") == "chunk":
            self._is_excused = True
            self._broken_at, self._num_fruitless = None, 0
            self._forget_failures()

    def _check_model(self, model: types_pb2.ModelInfo) -> None:
        if not model.model_id:
            return  # an older server
        if self._model is None:
            self._model = model
        if problem := difference(self._model, model):
            raise Unavailable(f"{self.address} {problem}")

    def stalled(self) -> OutriderError:
        """Returns the error of a call that has been silent for too long."""
        silent_s = self._clock() - self._last_message_at
        # It may be slow: that is no reason to suspect the request. One that has told of its reading would tell of that.
        self._is_excused = not self._has_read
        return Unavailable(f"{self.address} has told nothing of the generation for {silent_s:.3g} s")

    def after(self, error: OutriderError) -> float:
        """Records a failed call; returns the seconds to wait before the next one. Raises the error if it is final."""
        self.end()
        try:
            pause_s = self._judge(error)
        except OutriderError:
            self.trace.fail(error)
            raise
        self.trace.go_on(error)
        return pause_s

    def _judge(self, error: OutriderError) -> float:
        # Without `resume`, too, a call that no server has taken yet is tried elsewhere: there is no text to go on with.
        if error.code not in BROKEN or not (self._resumes or self._is_refusal(error)) or fails_again(error.details):
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
        # `min`: a first replica that hangs until the time is over must not keep the others from being asked once.
        if min(self._num_failures) and self._clock() - self._began_at >= self._resume_timeout_s:
            raise error

    def _is_passing(self, error: OutriderError) -> bool:
        """Returns True if there will be a server before long: one has answered before, or this one loads or drains."""
        if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return False
        is_promised = isinstance(error, Unavailable) and error.retry_after_s is not None
        return is_promised or self._replicas.has_answered

    def _count_break(self, error: OutriderError) -> None:
        """Counts a call that broke on the way. Raises the error if resuming was tried for long enough."""
        now = self._clock()
        if self._broken_at is None:
            self._broken_at = now
        # A server that refused the call has not begun with it: that says nothing against the request.
        if not self._is_excused and (self._is_admitted or error.code not in REFUSALS):
            self._num_fruitless += 1
        if now - self._broken_at >= self._resume_timeout_s or self._num_fruitless > MAX_FRUITLESS:
            raise error


def _seconds(name: str, value: float | None, default: float) -> float:
    if value is None:
        return default
    if not value > 0:  # not `<= 0`, which NaN would pass
        raise ValueError(f"{name} must be > 0, got {value!r}")
    return float(value)
