"""The cloud's verifiers as an edge sees them: one is dialled, the others stand in for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

import grpc

from outrider.peers.channel import PeerState
from outrider.peers.reconnecting import reason_of, wait_before_retry
from outrider.security.peer_channel import PeerSecurity
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from outrider.wire.errors import RpcError, Unavailable

INFO_TIMEOUT_S = 10.0
"""A verifier that takes longer to describe itself counts as lost."""
Failure = grpc.aio.AioRpcError | RpcError
"""Error of a call to the cloud: its status, or ours where the verifier does not answer."""
Stub: TypeAlias = "verifier_pb2_grpc.VerifierServiceAsyncStub"

_T = TypeVar("_T")


def code_of(failure: Failure) -> grpc.StatusCode:
    """Returns the status of a failure."""
    return failure.code if isinstance(failure, RpcError) else failure.code()


def text_of(failure: Failure) -> str:
    """Describes a failure in one line for the logs."""
    return f"{failure.code.name}: {failure}" if isinstance(failure, RpcError) else reason_of(failure)


class Upstream:
    """Holds the channel to one verifier, and its description once that is known."""

    def __init__(self, address: str, security: PeerSecurity | None = None) -> None:
        """`security` None means plaintext, to this machine only."""
        self.state = PeerState("upstream", address, security)
        self._info: verifier_pb2.GetInfoResponse | None = None

    def stub(self, more: Sequence[tuple[str, str]] = ()) -> Stub:
        """Returns the stub for a call that begins now, with this metadata."""
        return self.state.stub(verifier_pb2_grpc.VerifierServiceStub, more)

    async def info(self, timeout_s: float | None) -> verifier_pb2.GetInfoResponse:
        """Returns the verifier's description, asked for once. Raises AioRpcError; Unavailable if there is no answer."""
        if self._info is None:
            # Where the application's own deadline is nearer, its passing says nothing about the verifier.
            is_hurried = timeout_s is not None and timeout_s < INFO_TIMEOUT_S
            limit_s = timeout_s if is_hurried else INFO_TIMEOUT_S
            try:
                self.know(await self.stub().GetInfo(verifier_pb2.GetInfoRequest(), timeout=limit_s))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or is_hurried:
                    raise
                raise Unavailable(f"{self.state.address} has not answered within {INFO_TIMEOUT_S:g} s") from error
        assert self._info is not None
        return self._info

    def know(self, info: verifier_pb2.GetInfoResponse) -> None:
        """Keeps the verifier's description."""
        self._info = info
        self.state.up()

    def forget(self) -> None:
        """Drops the description, which may not hold any more."""
        self._info = None


class Upstreams:
    """Holds all verifiers, and which one is dialled."""

    def __init__(self, addresses: Sequence[str], security: PeerSecurity | None = None) -> None:
        self._all = [Upstream(address, security) for address in addresses]
        self._index = 0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def current(self) -> Upstream:
        """The verifier that is dialled."""
        return self._all[self._index]

    @property
    def states(self) -> list[PeerState]:
        """States of all verifiers, for metrics."""
        return [upstream.state for upstream in self._all]

    def leave(self, upstream: Upstream, failure: Failure) -> None:
        """Dials the next verifier after this one has failed, or is full. Does nothing if another call has done so."""
        # Another process may answer at this address when it is back. One that is only full stays as it is known.
        if code_of(failure) is grpc.StatusCode.UNAVAILABLE:
            upstream.forget()
            upstream.state.down(text_of(failure))
        if upstream is self.current:
            self._index = (self._index + 1) % len(self._all)

    async def ask(self, call: Callable[[Stub], Awaitable[_T]]) -> _T:
        """Makes a short call to the first verifier that can be reached. Raises the last one's AioRpcError."""
        for _ in self._all[1:]:  # all attempts but the last, whose error is the caller's
            upstream = self.current
            try:
                return await call(upstream.stub())
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                self.leave(upstream, error)
        return await call(self.current.stub())

    async def greet(self) -> None:
        """Dials until a verifier has described itself, so that the first generation need not ask."""
        attempt = 0
        while True:
            upstream = self.current
            try:
                await upstream.info(None)
                return
            except (grpc.aio.AioRpcError, RpcError) as error:
                self.leave(upstream, error)
            attempt += 1
            await wait_before_retry(attempt)

    async def close(self) -> None:
        """Closes all channels, and every stream on them."""
        for upstream in self._all:
            await upstream.state.close()
