"""Decides which replica a call goes to, how often it is repeated, and after what pause.

Does no input or output and reads no clock: `now` is in seconds since any fixed moment, the same one in all calls. Both
clients of the SDK and the edge use it.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Sequence

import grpc
from google.protobuf.message import Message

from outrider.core.load import ReplicaLoads
from outrider.wire.channels import NOT_TAKEN, doubled, first_turn
from outrider.wire.details import retry_after_s

NUM_ROUNDS = 4
"""Calls to each replica before a refusal is final, all within about a second."""
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 1.0
REFUSALS = NOT_TAKEN | {grpc.StatusCode.RESOURCE_EXHAUSTED}
"""Statuses of a server, or a proxy before it, that does not take the call now; another one may. Cancellations by the
caller itself do not come here."""


class Replicas:
    """Holds the replicas of one verifier, and what is known of their loads. `with` locks it for one thread."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)
        self._lock = threading.Lock()
        self._loads = ReplicaLoads(len(self.addresses), first_turn(len(self.addresses)))
        self.has_answered = False
        """True once one of them has answered."""
        self.is_closed = False
        """True once the caller has stopped: nothing is tried again."""

    def __enter__(self) -> ReplicaLoads:
        self._lock.acquire()
        return self._loads

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Attempts:
    """Follows one call across its attempts."""

    def __init__(
        self, replicas: Replicas, now: float, *, timeout_s: float | None = None, wait_s: float = math.inf
    ) -> None:
        """
        Args:
            replicas: Replicas of the server.
            now: The time.
            timeout_s: Time for all attempts together; None means no deadline.
            wait_s: Time after which a replica that has refused the call is not asked again. Each is asked once in any
                case.
        """
        self.replica = 0
        """The number of the replica that has the current attempt."""
        self._replicas, self._wait_s = replicas, wait_s
        self._began_at = self._last_message_at = now
        self._deadline = math.inf if timeout_s is None else now + timeout_s
        self._forget_failures()

    def remaining_s(self, now: float) -> float | None:
        """Returns the seconds until the deadline; None without a deadline."""
        return None if math.isinf(self._deadline) else max(0.001, self._deadline - now)

    @property
    def address(self) -> str:
        """The address of the replica that has the current attempt."""
        return self._replicas.addresses[self.replica]

    @property
    def is_closed(self) -> bool:
        """True once the caller has stopped."""
        return self._replicas.is_closed

    def begin(self, now: float) -> int:
        """Begins an attempt; returns the number of the replica to ask."""
        with self._replicas as loads:
            self.replica = loads.choose(now, self._num_failures)
        self._last_message_at = now
        return self.replica

    def on_answer(self, now: float) -> None:
        """Records that the replica has sent something."""
        self._last_message_at, self._replicas.has_answered = now, True
        with self._replicas as loads:
            loads.answered(self.replica)

    def on_error(self, now: float, code: grpc.StatusCode, details: Sequence[Message] = ()) -> float | None:
        """Takes in a failed attempt. Returns the seconds to wait before the next one; None: the error is final.

        Args:
            now: The time.
            code: The status.
            details: Details of the status, messages of google.rpc.
        """
        if not self._may_go_on(code, details) or self.is_closed or now >= self._deadline:
            return None
        # A full replica says when it may have room. A draining one does too, but another process is there sooner.
        is_full = code is grpc.StatusCode.RESOURCE_EXHAUSTED
        advised_s = (retry_after_s(details) if is_full else None) or 0.0
        with self._replicas as loads:
            loads.failed(self.replica, now, max(now - self._last_message_at, advised_s))
        self._num_failures[self.replica] += 1
        return None if self._has_tried_enough(now, code, details) else self._pause_s(now)

    def _may_go_on(self, code: grpc.StatusCode, details: Sequence[Message]) -> bool:
        """Returns False if the error would come again wherever the call goes."""
        return code in REFUSALS

    def _has_tried_enough(self, now: float, code: grpc.StatusCode, details: Sequence[Message]) -> bool:
        """Returns True if the caller should know of the error now."""
        return self._is_refused(now, code)

    def _is_refused(self, now: float, code: grpc.StatusCode, *, is_passing: bool = False) -> bool:
        """Returns True if each replica has refused often enough. `is_passing`: True if a server will take calls before
        long."""
        num_rounds = min(self._num_failures)
        # Each is asked once: a first replica that hangs until the time is over says nothing about the others.
        if num_rounds and now - self._began_at >= self._wait_s:
            return True
        # With one replica there is no other to try, and the error tells the caller when this one may have room.
        is_alone_and_full = code is grpc.StatusCode.RESOURCE_EXHAUSTED and len(self._num_failures) == 1
        return not is_passing and (num_rounds >= NUM_ROUNDS or is_alone_and_full)

    def _forget_failures(self) -> None:
        self._num_failures = [0] * len(self._replicas.addresses)
        self._num_pauses = 0

    def _pause_s(self, now: float) -> float:
        """Returns 0 until every replica has failed equally often; then more each time."""
        with self._replicas as loads:
            if loads.has_fresh(now) or min(self._num_failures) <= self._num_pauses:
                return 0.0
        # Callers that were refused together must not come back together.
        pause_s = doubled(FIRST_PAUSE_S, LAST_PAUSE_S, self._num_pauses) * random.uniform(0.8, 1.2)
        self._num_pauses += 1
        return min(pause_s, max(0.0, self._deadline - now))
