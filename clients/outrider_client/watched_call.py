"""A blocking call whose reads have a limit. A blocking stream of gRPC has none but the deadline of the whole call."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Protocol

import grpc

from outrider.v1 import verifier_pb2


class Stream(Protocol):
    """A running call (the type stubs of gRPC do not name it)."""

    def __iter__(self) -> Iterator[verifier_pb2.GenerateResponse]: ...

    def cancel(self) -> object: ...


class WatchedCall:
    """A running call. A thread cancels it when a read takes too long; the call ends when this object is dropped."""

    def __init__(self, call: Stream) -> None:
        self._call = call
        self._responses = iter(call)
        self._watch: _Watch | None = None

    def read(self, timeout_s: float | None) -> verifier_pb2.GenerateResponse | None:
        """The next message; None at the end. Raises grpc.RpcError, and TimeoutError after which the call is over."""
        if timeout_s is None:
            return next(self._responses, None)
        if self._watch is None:
            self._watch = _Watch(self._call)
        watch = self._watch
        watch.begin(timeout_s)
        try:
            response = next(self._responses, None)
        except grpc.RpcError as error:
            watch.end()
            if watch.has_fired:
                raise TimeoutError from error
            raise
        if response is None:
            watch.end()
        watch.pause()
        return response

    def cancel(self) -> None:
        """Ends the call: a pending read raises grpc.RpcError."""
        self._call.cancel()

    def __del__(self) -> None:
        if self._watch is not None:
            self._watch.end()


class _Watch:
    """The thread behind a call that is being read. It holds no reference to the call: dropping it ends it."""

    def __init__(self, call: Stream) -> None:
        self.has_fired = False
        """Whether it has cancelled the call."""
        self._call = weakref.ref(call)
        self._condition = threading.Condition()
        self._deadline = self._wakes_at = math.inf
        self._is_over = False
        threading.Thread(target=self._run, name="outrider-stall-watch", daemon=True).start()

    def begin(self, timeout_s: float) -> None:
        """A read begins."""
        with self._condition:
            self._deadline = time.monotonic() + timeout_s
            if self._deadline < self._wakes_at:
                self._condition.notify()

    def pause(self) -> None:
        """The read is over; nobody waits."""
        with self._condition:
            self._deadline = math.inf

    def end(self) -> None:
        """The call is over."""
        with self._condition:
            self._is_over = True
            self._condition.notify()

    def _run(self) -> None:
        with self._condition:
            while not self._is_over and not self.has_fired:
                # Most deadlines are moved before they pass: the thread wakes once in a timeout, not once a message.
                self._wakes_at = self._deadline
                wait_s = self._wakes_at - time.monotonic()
                self.has_fired = wait_s <= 0
                if not self.has_fired:
                    self._condition.wait(None if math.isinf(wait_s) else wait_s)
        call = self._call()
        if self.has_fired and call is not None:
            call.cancel()
