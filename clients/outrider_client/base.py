"""The base of both clients: their configuration, the requests that they send, and the replicas that they ask.

`client.py` and `blocking.py` are the two halves that do the input and output, with asyncio and without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import Generic, Protocol, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.v1 import verifier_pb2
from outrider_client.channel import ChannelSecurity
from outrider_client.generation import Chunk, Transcript
from outrider_client.requests import GenerateOptions
from outrider_client.retries import Replicas, ResumableCall

Metadata = Sequence[tuple[str, str | bytes]]

DEFAULT_TIMEOUT_S = 30.0
"""Deadline of every call but `generate`."""
CANCELLED = "the generation was cancelled by its caller"


class Call(Protocol):
    """A `Call` is a running call of Generate. (The type stubs of gRPC do not name what both kinds have in common.)"""

    def cancel(self) -> object: ...


_Call = TypeVar("_Call", bound=Call)
_Channel = TypeVar("_Channel")

OpenCall = Callable[[verifier_pb2.GenerateRequest, int, float | None], _Call]
"""Opens a call for a request, to a replica by its number, with a deadline in seconds."""


class BaseGeneration(Transcript, Generic[_Call]):
    """Holds a transcript and the calls that fill it, one after the other."""

    def __init__(self, resumable: ResumableCall, open_call: OpenCall[_Call]) -> None:
        super().__init__(resumable.num_choices)
        self._resumable = resumable
        self._open_call = open_call
        self._call = self._open()
        self._early: deque[Chunk] = deque()
        """Chunks that came before `started` returned."""

    def _open(self) -> _Call:
        """Opens a call for the rest of the generation, to the replica whose turn it is."""
        replica = self._resumable.begin()
        request = self._resumable.request(self.seed, self.token_ids, self._resumption())
        return self._open_call(request, replica, self._resumable.remaining_s)

    def _cancel(self) -> None:
        self._call.cancel()
        self._resumable.cancel()


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
        self._replicas = Replicas(address)
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
        """Returns this client as another caller has it: with the same connections, and what is known of the replicas,
        but with another token. Made in microseconds; closing it closes nothing.

        Args:
            token: Sent with every call; empty means none. Raises ValueError for what no header can hold.
        """
        view = copy(self)
        view._is_view = True
        others = (pair for pair in self._own_metadata if pair[0].lower() != "authorization")
        view._metadata = (*others, *ChannelSecurity(token=token).metadata)
        return view

    def _resumable_call(self, request: verifier_pb2.GenerateRequest, options: GenerateOptions) -> ResumableCall:
        return ResumableCall(request, self._replicas, options)

    def _opener(self, methods: Sequence[Callable[..., _Call]], resumable: ResumableCall) -> OpenCall[_Call]:
        """Returns the function that opens the calls of a generation; `methods` has the method of each replica."""
        # Made once: all calls of a generation belong to one span.
        metadata = (*self._metadata, *resumable.trace.metadata)

        # The closure must not refer to the generation, whose call ends when the last reference to it goes.
        def open_call(request: verifier_pb2.GenerateRequest, replica: int, timeout_s: float | None) -> _Call:
            return methods[replica](request, timeout=timeout_s, metadata=metadata)

        return open_call


def is_serving(response: health_pb2.HealthCheckResponse) -> bool:
    """Returns True if a health check says that the service serves."""
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
