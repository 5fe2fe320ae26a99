"""Whether a peer is worth dialling. Once it is known to be down, one probe asks for the whole process whether it is
back, instead of every session for itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Protocol, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.core.statistics import RunningMean
from outrider.peers.channel import SPOILT
from outrider.wire.channels import doubled

_Stub = TypeVar("_Stub")

FIRST_PROBE_S, LAST_PROBE_S = 0.5, 2.0
"""What a probe waits for its answer: each twice as long as the one before."""
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 1.0


class Probed(Protocol):
    """A peer, as far as it is probed."""

    def stub(self, kind: Callable[[grpc.aio.Channel], _Stub]) -> _Stub:
        """For a call that begins now."""

    def down(self, reason: str) -> None:
        """It has failed."""

    def dial_anew(self) -> None:
        """The connection to it may be at fault."""


class Breaker:
    """Closed while the peer is well; open from a failure until it answers SERVING. Lives on the event loop."""

    def __init__(self, peer: Probed) -> None:
        self._peer = peer
        self._closed = asyncio.Event()
        self._closed.set()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_closed(self) -> bool:
        """Whether the peer is not known to be down."""
        return self._closed.is_set()

    async def wait_closed(self) -> None:
        """Returns when the peer may be dialled."""
        await self._closed.wait()

    def trip(self, reason: str, pause_s: float = 0.0) -> None:
        """The peer has failed: nobody dials it until it answers a probe, the first of which is made after a pause."""
        self._peer.down(reason)
        if self.is_closed:
            self._closed.clear()
            self._task = asyncio.create_task(self._probe(pause_s))

    def stop(self) -> None:
        """Ends the probing."""
        if self._task is not None:
            self._task.cancel()

    async def _probe(self, pause_s: float) -> None:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(pause_s)
        pause_s, timeout_s = FIRST_PAUSE_S, FIRST_PROBE_S
        began = clock()
        try:
            while not await self._serves(timeout_s):
                # A probe that had to wait has been a pause itself.
                await asyncio.sleep(max(0.0, began + pause_s * random.uniform(0.8, 1.2) - clock()))
                pause_s, began = min(LAST_PAUSE_S, 2 * pause_s), clock()
                timeout_s = min(LAST_PROBE_S, 2 * timeout_s)
        except grpc.aio.UsageError:
            return  # the channel was closed: nobody dials any more
        self._closed.set()

    async def _serves(self, timeout_s: float) -> bool:
        """Whether it answers SERVING. Waits for the connection, so that a peer that comes back is noticed at once."""
        stub = self._peer.stub(health_pb2_grpc.HealthStub)
        request = health_pb2.HealthCheckRequest()
        try:
            response = await stub.Check(request, timeout=timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() in SPOILT:
                self._peer.dial_anew()
            return error.code() is grpc.StatusCode.UNIMPLEMENTED  # it has no health checks, but it answers
        return response is not None and response.status == health_pb2.HealthCheckResponse.SERVING


MIN_SILENCE_S = 1.0
USUAL_TIMES = 20
FIRST_ANSWER_S = 5.0
"""For the first answer: it has a connection to make and a prompt to read."""
MAX_FIRST_ANSWER_S = 60.0
MIN_UNANSWERED = 3
"""One commit may leave nothing to draft that is not drafted already; so many in a row do not."""


class AnswerDeadline:
    """What one stream has been told and has not answered. Times are those of one clock, in seconds."""

    def __init__(self, usual_s: RunningMean, num_tries: int) -> None:
        """`usual_s` learns how long answers take; it is shared by all streams of a peer. `num_tries`: streams before
        this one that have never been answered; each doubles the time for the first answer."""
        self._usual_s = usual_s
        self._first_answer_s = doubled(FIRST_ANSWER_S, MAX_FIRST_ANSWER_S, num_tries)
        self._is_warm = False
        self._since: float | None = None
        self._num_unanswered = 0

    def open(self, now: float) -> float:
        """The stream is being opened; returns when it should be open at the latest."""
        return now + self._first_answer_s

    def sent(self, now: float) -> None:
        """It was told something that wants an answer."""
        if self._since is None:
            self._since = now
        self._num_unanswered += 1

    def answered(self, now: float) -> None:
        """It has answered."""
        if self._is_warm and self._since is not None:
            self._usual_s.add(now - self._since)
        self._is_warm = True
        self.forgive()

    def forgive(self) -> None:
        """It owes no answer."""
        self._since, self._num_unanswered = None, 0

    @property
    def limit_s(self) -> float:
        """How long it may say nothing."""
        if not self._is_warm:
            return self._first_answer_s
        return max(MIN_SILENCE_S, USUAL_TIMES * self._usual_s.get(0.0))

    @property
    def deadline(self) -> float | None:
        """When it counts as lost; None = it owes too little for that."""
        if self._since is None or self._num_unanswered < MIN_UNANSWERED:
            return None
        return self._since + self.limit_s
