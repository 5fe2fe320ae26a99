"""Streams to a peer that are opened again whenever they are lost, and the rules for when.

A peer may be missing, die, hang, refuse or come back at any time. A `ReconnectingStream` keeps one stream open through
all of this, and a `Reconnecting` a part of a stream. A `Breaker` keeps many streams from dialling a peer that is known
to be down. An `AnswerDeadline` says when a peer that owes answers counts as lost.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.core.params import InvalidParameter
from outrider.core.statistics import Absence, RunningMean
from outrider.peers.channel import PeerState
from outrider.telemetry.tasks import keep_running
from outrider.wire.channels import Unreadable, doubled, require_message
from outrider.wire.details import retry_after_s, rich_details

log = structlog.get_logger(__name__)

FIRST_RETRY_S, LAST_RETRY_S = 0.1, 1.0
"""Shortest and longest pause between two attempts; each is twice as long as the one before."""
REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Statuses with which the same request would fail again at once."""
UNUSABLE = (
    *REFUSALS,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)
"""Statuses of a peer that answers but cannot be used."""
BROKEN_CONNECTION = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
"""Statuses with which a call may end on a connection that no longer works. A NAT or a proxy may have forgotten the
connection, which gRPC itself notices only after half a minute; or bytes were changed, and the two ends read different
headers."""

_OVERWRITTEN = "Internal error from Core"


def backoff_s(attempt: int) -> float:
    """Seconds to wait before attempt number 1, 2, ...: 0.1, then twice as long each time, at most 1."""
    return doubled(FIRST_RETRY_S, LAST_RETRY_S, attempt - 1)


async def wait_before_retry(attempt: int) -> None:
    """Waits for `backoff_s(attempt)`."""
    await asyncio.sleep(backoff_s(attempt))


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """Returns the status of a failed call as one line for the logs."""
    return f"{error.code().name}: {error.details()}"


def is_overwritten(failure: Exception) -> bool:
    """Returns True if gRPC has lost the status of a call.

    A call that ends while one of our messages is being written does not fail with the peer's status but with INTERNAL
    and this text, of grpc.aio's own making. The peer may have ended it in order.
    """
    return (
        isinstance(failure, grpc.aio.AioRpcError)
        and failure.code() is grpc.StatusCode.INTERNAL
        and failure.details() == _OVERWRITTEN
    )


class Cause(Enum):
    """Names the ways in which a stream is lost."""

    STATUS = "status"
    """The call has ended, with the status in `Loss.code`; OK if the peer ended it in order."""
    SILENCE = "silence"
    """The peer owed an answer for too long."""
    GARBAGE = "garbage"
    """The peer sent bytes that cannot be parsed, or a message with impossible contents."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The end of a stream that should have gone on."""

    cause: Cause
    reason: str
    """One line for the logs."""
    code: grpc.StatusCode | None = None
    """Status of the call. None means that the call had not ended by itself."""
    is_overwritten: bool = False
    """True if gRPC has lost the status, see `is_overwritten`."""
    is_from_server: bool = False
    """True if the peer itself says that it does not serve now, see `NotServing`."""

    def absence(self, *, was_there: bool) -> Absence:
        """Returns why the peer is missing. `was_there`: True if the stream had been accepted."""
        if self.cause is Cause.SILENCE:
            return Absence.SLOW
        if self.cause is Cause.GARBAGE or self.code in UNUSABLE:
            return Absence.UNUSABLE
        if self.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Absence.FULL
        if was_there:
            return Absence.LOST
        return Absence.STARTING if self.is_from_server else Absence.UNREACHABLE


class Reconnecting(ABC):
    """Keeps something at a peer open, from construction to `stop`. Lives on the event loop.

    Implements the loop: wait until it is wanted, open and attend it, judge the loss, pause, repeat. A subclass says how
    it is opened and attended, and what a loss means.
    """

    def __init__(self, peer: PeerState) -> None:
        self._state = peer
        self._num_failures = 0
        """Losses in a row, up to the last one, before an answer came."""
        self._has_answered = False
        """True if the peer has answered since it was opened."""
        self._timeout = asyncio.timeout(None)
        self._is_stopped = False
        # The task begins at the loop's next turn, when the constructor of the subclass has set the rest.
        self._task = keep_running(f"stream to the {peer.name}", self._run)

    def stop(self) -> None:
        """Closes it for good."""
        self._is_stopped = True
        self._task.cancel()

    async def _wait_until_wanted(self) -> None:
        """Returns when it should be open: at once, if a subclass does not say otherwise."""
        return

    @abstractmethod
    async def _attend(self) -> None:
        """Opens it and serves it until it ends. Raises the error that has ended it, unless the peer ended it in order.
        Keeps the deadline in `_timeout` meanwhile."""

    @abstractmethod
    def _lose(self, loss: Loss) -> float | None:
        """Takes in that it is lost.

        Returns:
            Seconds until it is opened again. None means that nothing was lost: it is opened at once, and is not
            counted as a reconnect.
        """

    def _answered(self) -> None:
        """Records that the peer has answered."""
        self._has_answered, self._num_failures = True, 0

    def _expect_answer_by(self, when: float | None) -> None:
        """Sets the deadline for the next response, after which it counts as lost.

        Every response clears it. To be called only while it is open.

        Args:
            when: In the event loop's time. None means that no response is owed.
        """
        # An asyncio.Timeout that has expired cannot be set any more: it raises RuntimeError.
        if not self._timeout.expired():
            self._timeout.reschedule(when)

    async def _run(self) -> None:
        while True:
            await self._wait_until_wanted()
            self._has_answered = False
            try:
                await self._attend()
                loss = Loss(Cause.STATUS, f"the {self._state.name} ended the stream", grpc.StatusCode.OK)
            except grpc.aio.UsageError:
                return  # the channel was closed: this process no longer dials the peer
            except TimeoutError:
                loss = Loss(Cause.SILENCE, f"the {self._state.name} has not answered in time")
            except Unreadable as error:  # before AioRpcError, of which it is one
                loss = Loss(Cause.GARBAGE, reason_of(error))
            except InvalidParameter as error:
                loss = Loss(Cause.GARBAGE, f"it sent a message that cannot be one: {error}")
            except grpc.aio.AioRpcError as error:
                is_from_server = (
                    error.code() is grpc.StatusCode.UNAVAILABLE and retry_after_s(rich_details(error)) is not None
                )
                loss = Loss(Cause.STATUS, reason_of(error), error.code(), is_overwritten(error), is_from_server)
            except Exception as error:
                # A message that passed all checks has broken the code that takes it in. Without this task the peer
                # would not be dialled again.
                log.exception("peer.failed", peer=self._state.name)
                loss = Loss(Cause.GARBAGE, f"{type(error).__name__} at what it sent")
            if self._is_stopped:
                # When a call ends just as its reader is cancelled, grpc.aio raises the status and the cancellation is
                # lost: about one in a thousand, each of which would go on for ever.
                return
            self._num_failures += 1
            pause_s = self._lose(loss)
            if pause_s is None:
                self._num_failures = 0
                continue
            self._state.num_reconnects += 1
            await asyncio.sleep(pause_s)


_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class ReconnectingStream(Reconnecting, Generic[_Request, _Response]):
    """Keeps a stream to a peer open, from construction to `stop`. Lives on the event loop.

    A subclass says what is written and read, and what a loss means for it.
    """

    @abstractmethod
    def _open(self) -> grpc.aio.StreamStreamCall[_Request, _Response] | grpc.aio.UnaryStreamCall[Any, _Response]:
        """Begins a call, on a stub that was made just now."""

    def _requests(self) -> AsyncGenerator[_Request, None] | None:
        """Yields the requests of one stream; None means that the call has its only request already. Runs next to
        `_receive`."""
        return None

    @abstractmethod
    async def _receive(self, response: _Response) -> None:
        """Takes in a response. Calls `_answered` if it shows that the peer works. Raises InvalidParameter for
        impossible contents."""

    async def _attend(self) -> None:
        call, requests = self._open(), self._requests()
        # The writer does not run before this task waits, and so finds the timeout of this stream in `_timeout`.
        writer = None if requests is None else asyncio.create_task(write_all(call, requests))
        try:
            async with asyncio.timeout(None) as self._timeout:
                async for message in call:
                    response = require_message(message)
                    self._timeout.reschedule(None)
                    await self._receive(response)
        finally:
            if writer is not None:
                writer.cancel()
            # A call that is only dropped stays open until the garbage collector finds it.
            call.cancel()


async def write_all(call: Any, requests: AsyncGenerator[_Request, None]) -> None:
    """Writes requests to a call until there are no more, or the call has ended."""
    # A write to a call that has ended raises its status, or InvalidStateError once that was read. The reader of the
    # same call also gets the status, and alone judges it.
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        # Closed here: the garbage collector would close an unfinished generator only at some time.
        async with aclosing(requests):
            async for request in requests:
                await call.write(request)


_Stub = TypeVar("_Stub")

FIRST_PROBE_S, LAST_PROBE_S = 0.5, 2.0
"""Shortest and longest wait for the answer to a probe; each is twice as long as the one before."""
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 1.0
"""Shortest and longest time between the beginnings of two probes."""


class Probed(Protocol):
    """The part of a `PeerState` that a `Breaker` needs."""

    absence: Absence

    def stub(self, kind: Callable[[grpc.aio.Channel], _Stub]) -> _Stub:
        """Returns a stub for a call that begins now."""

    def down(self, reason: str) -> None:
        """Records that the peer has failed."""

    def dial_anew(self) -> None:
        """Replaces the connection, which may be at fault."""


class Breaker:
    """Keeps a process from dialling a peer that is down: closed while the peer is well, open from a failure until it
    answers SERVING. One probe asks for the whole process, instead of every session. Lives on the event loop."""

    def __init__(self, peer: Probed, on_closed: Callable[[], None] = lambda: None) -> None:
        """`on_closed` is called whenever the peer is back."""
        self._peer, self._on_closed = peer, on_closed
        self._closed = asyncio.Event()
        self._closed.set()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_closed(self) -> bool:
        """True unless the peer is known to be down."""
        return self._closed.is_set()

    async def wait_closed(self) -> None:
        """Returns when the peer may be dialled."""
        await self._closed.wait()

    def trip(self, reason: str, pause_s: float = 0.0) -> None:
        """Opens the breaker: the peer has failed, and is not dialled until it answers a probe.

        Args:
            reason: One line for the logs.
            pause_s: Seconds until the first probe.
        """
        self._peer.down(reason)
        if self.is_closed:
            self._closed.clear()
            self._task = keep_running("probe of a peer", partial(self._probe, pause_s))

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
                # A probe that had to wait was a pause itself. Random, so that verifiers that have lost the same peer do
                # not all come back at once.
                await asyncio.sleep(max(0.0, began + pause_s * random.uniform(0.8, 1.2) - clock()))
                pause_s, began = min(LAST_PAUSE_S, 2 * pause_s), clock()
                timeout_s = min(LAST_PROBE_S, 2 * timeout_s)
        except grpc.aio.UsageError:
            return  # the channel was closed: this process no longer dials the peer
        self._closed.set()
        self._on_closed()

    async def _serves(self, timeout_s: float) -> bool:
        """Returns True if the peer answers SERVING within the timeout."""
        stub = self._peer.stub(health_pb2_grpc.HealthStub)
        request = health_pb2.HealthCheckRequest()
        try:
            # Without wait_for_ready a call fails at once while the channel backs off between two attempts to connect,
            # and a peer that is back would be found only after that.
            response = await stub.Check(request, timeout=timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() in BROKEN_CONNECTION:
                self._peer.dial_anew()
            return error.code() is grpc.StatusCode.UNIMPLEMENTED  # it has no health checks, but it answers
        # None is what grpc.aio returns for bytes that it cannot parse.
        if response is None:
            return False
        is_serving: bool = response.status == health_pb2.HealthCheckResponse.SERVING
        if not is_serving:
            self._peer.absence = Absence.STARTING
        return is_serving


MIN_SILENCE_S = 1.0
"""A stream is never given up sooner: a loaded machine may pause for that long."""
USUAL_TIMES = 20
"""A peer counts as lost when an answer takes this many times as long as usual."""
FIRST_ANSWER_S = 5.0
"""Time for the first answer of a stream, before which there is a connection to make and a prompt to read."""
MAX_FIRST_ANSWER_S = 60.0
MIN_UNANSWERED = 3
"""Messages without an answer that make a peer suspect: one commit may leave nothing to draft that is not drafted
already, three in a row do not."""


class AnswerDeadline:
    """Says when a stream counts as lost because its peer owes answers. Times are those of one clock, in seconds."""

    def __init__(self, usual_s: RunningMean, num_tries: int) -> None:
        """
        Args:
            usual_s: Learns how long answers take; all streams of a peer share it.
            num_tries: Streams before this one that were never answered; each doubles the time for the first answer.
        """
        self._usual_s = usual_s
        self._first_answer_s = doubled(FIRST_ANSWER_S, MAX_FIRST_ANSWER_S, num_tries)
        self._is_warm = False
        self._since: float | None = None
        self._num_unanswered = 0

    def open(self, now: float) -> float:
        """Returns when a stream that is being opened now must be open."""
        return now + self._first_answer_s

    def sent(self, now: float) -> None:
        """Records that the peer was sent a message that asks for an answer."""
        # Counted from the oldest one: messages that follow must not put the deadline off.
        if self._since is None:
            self._since = now
        self._num_unanswered += 1

    def answered(self, now: float) -> None:
        """Records an answer."""
        # The first answer is left out of the mean: it includes reading the prompt.
        if self._is_warm and self._since is not None:
            self._usual_s.add(now - self._since)
        self._is_warm = True
        self.forgive()

    def forgive(self) -> None:
        """Records that the peer owes no answer."""
        self._since, self._num_unanswered = None, 0

    @property
    def limit_s(self) -> float:
        """Longest wait for an answer, in seconds."""
        if not self._is_warm:
            return self._first_answer_s
        return max(MIN_SILENCE_S, USUAL_TIMES * self._usual_s.get(0.0))

    @property
    def deadline(self) -> float | None:
        """Time at which the peer counts as lost; None means that it owes too little for that."""
        if self._since is None or self._num_unanswered < MIN_UNANSWERED:
            return None
        return self._since + self.limit_s
