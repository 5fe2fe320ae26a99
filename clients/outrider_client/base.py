"""The base of both clients: their configuration, the requests that they send, and the replicas that they ask.

`client.py` and `blocking.py` are the two halves that do the input and output, with asyncio and without.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import Generic, Protocol, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.v1 import verifier_pb2
from outrider.wire.attempts import Attempts, Replicas
from outrider.wire.resumption import Lost, Phase, ResumableGeneration, Taken
from outrider_client.channel import ChannelSecurity, verifier_addresses
from outrider_client.errors import Cancelled, OutriderError, Unavailable
from outrider_client.generation import Chunk, Transcript
from outrider_client.requests import GenerateOptions
from outrider_client.tracing import GenerationTrace

Metadata = Sequence[tuple[str, str | bytes]]

DEFAULT_TIMEOUT_S = 30.0
"""Deadline of every call but `generate`."""
RESUME_TIMEOUT_S = 30.0
STALL_TIMEOUT_S = 30.0
CANCELLED = "the generation was cancelled by its caller"


class Call(Protocol):
    """A `Call` is a running call of Generate. (The type stubs of gRPC do not name what both kinds have in common.)"""

    def cancel(self) -> object: ...


_Call = TypeVar("_Call", bound=Call)
_Channel = TypeVar("_Channel")

OpenCall = Callable[[verifier_pb2.GenerateRequest, int, float | None], _Call]
"""Opens a call for a request, to a replica by its number, with a deadline in seconds."""


class BaseGeneration(Transcript, Generic[_Call]):
    """Holds a transcript and the calls that fill it, one after the other. `_state` decides when and where."""

    def __init__(self, state: ResumableGeneration, trace: GenerationTrace, open_call: OpenCall[_Call]) -> None:
        super().__init__(state.num_texts)
        self._state, self._trace, self._open_call = state, trace, open_call
        self._call = self._open()
        self._early: deque[Chunk] = deque()
        """Chunks that came before `started` returned."""

    def _open(self) -> _Call:
        """Opens a call for the rest of the generation, to the replica whose turn it is."""
        now = time.monotonic()
        replica = self._state.begin(now)
        self._trace.begin_call(self._state.address)
        return self._open_call(self._state.request(), replica, self._state.remaining_s(now))

    def _take_message(self, response: verifier_pb2.GenerateResponse) -> bool:
        """Takes a message in; returns False if the application has had it before. Raises Unavailable if the call must
        be left."""
        taken = self._state.on_message(time.monotonic(), response)
        if isinstance(taken, Lost):
            raise Unavailable(taken.reason)
        # The span of several texts ends with the last one.
        if not response.HasField("finished") or self._state.phase is Phase.FINISHED:
            self._trace.on_message(response)
        return taken is Taken.EMIT

    def _stalled(self) -> OutriderError:
        """Returns the error of a call that has been silent for too long."""
        return Unavailable(self._state.on_silence(time.monotonic()).reason)

    def _pause_s(self, error: OutriderError) -> float:
        """Returns the seconds to wait after a failed call before the next one. Raises the error if it is final."""
        self._call.cancel()  # that replica may be generating still
        try:
            pause_s = pause_after(self._state, error)
        except OutriderError:
            self._trace.fail(error)
            raise
        self._trace.go_on(error)
        return pause_s

    def _cancel(self) -> None:
        self._call.cancel()
        self._state.end()
        self._trace.cancel()


class BaseClient(Generic[_Channel]):
    """Holds the connections to the replicas of a verifier, and makes the requests for them."""

    def __init__(
        self,
        address: str | Sequence[str],
        metadata: Metadata,
        security: ChannelSecurity,
        open_channel: Callable[[str, grpc.ChannelCredentials | None], _Channel],
    ) -> None:
        """
        Args:
            address: HOST:PORT; several, with commas between them or as a sequence, are replicas of one verifier.
            metadata: Goes with every call.
            security: Credentials and token. Raises ValueError for an address that may not be dialled so.
            open_channel: Opens a channel that leaves every failure to us: gRPC would repeat calls on one replica only.
        """
        self._replicas = Replicas(verifier_addresses(address))
        self.address = ",".join(self._replicas.addresses)
        """The replicas, with commas between them."""
        self._own_metadata = tuple(metadata)
        self._metadata = (*metadata, *security.metadata)
        self._is_view = False
        """True if another client owns the connections."""
        # One for each replica: with one for all, gRPC would choose, and `Replicas` could not avoid one that has failed.
        self._channels = [open_channel(each, security.credentials_for(each)) for each in self._replicas.addresses]
        self._health_stubs = [health_pb2_grpc.HealthStub(channel) for channel in self._channels]

    def for_caller(self, token: str) -> Self:
        """Returns this client with another caller's token. It shares the connections, and what is known of the
        replicas. Made in microseconds; closing it closes nothing.

        Args:
            token: Sent with every call; empty means none. Raises ValueError for what no header can hold.
        """
        view = copy(self)
        view._is_view = True
        others = (pair for pair in self._own_metadata if pair[0].lower() != "authorization")
        view._metadata = (*others, *ChannelSecurity(token=token).metadata)
        return view

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._replicas, time.monotonic(), timeout_s=timeout_s)

    def _generation(
        self,
        request: verifier_pb2.GenerateRequest,
        options: GenerateOptions,
        methods: Sequence[Callable[..., _Call]],
    ) -> tuple[ResumableGeneration, GenerationTrace, OpenCall[_Call]]:
        """Returns the parts of a generation; `methods` has the method of each replica. Raises ValueError for a timeout
        that is not positive."""
        resume_timeout_s = _seconds("resume_timeout_s", options.get("resume_timeout_s"), RESUME_TIMEOUT_S)
        state = ResumableGeneration(
            request,
            self._replicas,
            time.monotonic(),
            timeout_s=options.get("timeout_s"),
            resumes=options.get("resume") is not False,
            resume_timeout_s=resume_timeout_s,
            stall_timeout_s=_seconds("stall_timeout_s", options.get("stall_timeout_s"), STALL_TIMEOUT_S),
            wait_s=resume_timeout_s,
        )
        trace = GenerationTrace(request)
        # Made once: all calls of a generation belong to one span.
        metadata = (*self._metadata, *trace.metadata)

        # The closure must not refer to the generation: its call ends when the last reference to the generation goes.
        def open_call(request: verifier_pb2.GenerateRequest, replica: int, timeout_s: float | None) -> _Call:
            return methods[replica](request, timeout=timeout_s, metadata=metadata)

        return state, trace, open_call


def is_serving(response: health_pb2.HealthCheckResponse) -> bool:
    """Returns True if a health check says that the service serves."""
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def pause_after(attempts: Attempts, error: OutriderError) -> float:
    """Returns the seconds to wait after a failed attempt before the next one. Raises the error if it is final,
    Cancelled if the client was closed."""
    pause_s = attempts.on_error(time.monotonic(), error.code, error.details)
    if pause_s is None and attempts.is_closed:
        raise Cancelled("the client was closed") from error
    if pause_s is None:
        raise error
    return pause_s


def _seconds(name: str, value: float | None, default: float) -> float:
    if value is None:
        return default
    if not value > 0:  # not `<= 0`, which NaN would pass
        raise ValueError(f"{name} must be > 0, got {value!r}")
    return float(value)
