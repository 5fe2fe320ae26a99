"""How often a call is tried that no replica takes, where, and after which pause. Knows nothing about channels and
loops: both clients use it."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import grpc

from outrider.rpc.backoff import doubled
from outrider_client.errors import OutriderError, ResourceExhausted
from outrider_client.replicas import Replicas

NUM_ROUNDS = 4
"""How often each replica is asked: within about a second."""
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 1.0
REFUSALS = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED})
"""The server does not take it now; another one may. CANCELLED is what gRPC makes of a call that comes in while a server
begins to stop; our own cancelling never comes this far."""


class Attempts:
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
