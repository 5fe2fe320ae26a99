"""The cloud's verifiers as an edge sees them: channels, descriptions, and which of them are lost."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from outrider.peers.channel import PeerState
from outrider.peers.reconnecting import reason_of, wait_before_retry
from outrider.security.peer_channel import PeerSecurity
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from outrider.wire.attempts import Attempts, Replicas
from outrider.wire.channels import NOT_TAKEN
from outrider.wire.details import rich_details
from outrider.wire.errors import RpcError, Unavailable

INFO_TIMEOUT_S = 10.0
"""Time, in seconds, after which a verifier that has not described itself counts as lost."""
Failure = grpc.aio.AioRpcError | RpcError
"""Error of a call to the cloud: its status, or ours if the verifier does not answer."""
Stub: TypeAlias = "verifier_pb2_grpc.VerifierServiceAsyncStub"

_T = TypeVar("_T")

_CAUSE = re.compile(
    "connection refused|connection reset|connection timed out|no route to host|network is unreachable|has not answered|"
    "domain name not found|name or service not known|dns resolution failed|handshake failed|certificate verify failed",
    re.I,
)
"""Matches the cause in gRPC's long sentences about a server that has not answered."""


def code_of(failure: Failure) -> grpc.StatusCode:
    """Returns the status of a failure."""
    return failure.code if isinstance(failure, RpcError) else failure.code()


def details_of(failure: Failure) -> Sequence[Message]:
    """Returns the details of a failure, messages of google.rpc."""
    return failure.details if isinstance(failure, RpcError) else rich_details(failure)


def cause_of(failure: Failure) -> str:
    """Returns in a few words why a verifier could not be reached; empty if it was reached and has failed the call
    itself."""
    if code_of(failure) is not grpc.StatusCode.UNAVAILABLE:
        return ""
    found = _CAUSE.search(str(failure) if isinstance(failure, RpcError) else failure.details() or "")
    return found[0].lower() if found else ""


def text_of(failure: Failure) -> str:
    """Describes a failure in one line for the logs."""
    return f"{failure.code.name}: {failure}" if isinstance(failure, RpcError) else reason_of(failure)


class Upstream:
    """Holds the channel to one verifier, and its description once that is known."""

    def __init__(self, address: str, number: int = 0, security: PeerSecurity | None = None) -> None:
        """
        Args:
            address: HOST:PORT.
            number: Its place among the addresses.
            security: None means plaintext, to this machine only.
        """
        self.number = number
        self.state = PeerState("upstream", address, security)
        self._info: verifier_pb2.GetInfoResponse | None = None

    def stub(self, more: Sequence[tuple[str, str]] = ()) -> Stub:
        """Returns the stub for a call that begins now, with this metadata."""
        return self.state.stub(verifier_pb2_grpc.VerifierServiceStub, more)

    async def info(self, timeout_s: float | None) -> verifier_pb2.GetInfoResponse:
        """Returns the verifier's description, asked for once. Raises AioRpcError; Unavailable if there is no answer."""
        if self._info is None:
            # If the application's own deadline is nearer, its passing says nothing about the verifier.
            is_hurried = timeout_s is not None and timeout_s < INFO_TIMEOUT_S
            limit_s = timeout_s if is_hurried else INFO_TIMEOUT_S
            try:
                self.learn_info(await self.stub().GetInfo(verifier_pb2.GetInfoRequest(), timeout=limit_s))
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or is_hurried:
                    raise
                raise Unavailable(f"{self.state.address} has not answered within {INFO_TIMEOUT_S:g} s") from error
        assert self._info is not None
        return self._info

    def learn_info(self, info: verifier_pb2.GetInfoResponse) -> None:
        """Keeps the verifier's description."""
        self._info = info
        self.state.up()

    def forget_info(self) -> None:
        """Drops the description, which may be outdated."""
        self._info = None


class Upstreams:
    """Holds all verifiers. The one for each call is chosen as the client SDK does among its replicas."""

    def __init__(self, addresses: Sequence[str], security: PeerSecurity | None = None) -> None:
        self._all = [Upstream(address, number, security) for number, address in enumerate(addresses)]
        self.replicas = Replicas(addresses)
        self._was_left = asyncio.Event()
        self._problem = ""
        """The reason why the last attempt to dial a verifier failed."""

    @property
    def names(self) -> str:
        """Addresses of all verifiers, with commas between."""
        return ",".join(upstream.state.address for upstream in self._all)

    @property
    def states(self) -> list[PeerState]:
        """States of all verifiers, for metrics."""
        return [upstream.state for upstream in self._all]

    def __getitem__(self, number: int) -> Upstream:
        return self._all[number]

    def on_failure(self, upstream: Upstream, failure: Failure) -> None:
        """Records that a verifier has failed, or is full. `replicas` decides which one is asked next."""
        # Another process may answer at this address when it is back. One that is only full keeps its description.
        if code_of(failure) in NOT_TAKEN:
            upstream.forget_info()
            upstream.state.down(text_of(failure))
            self._was_left.set()

    async def ask(self, call: Callable[[Stub], Awaitable[_T]]) -> _T:
        """Makes a short call to a verifier that can be reached. Raises the last one's AioRpcError."""
        attempts = Attempts(self.replicas, time.monotonic(), wait_s=0.0)
        while True:
            upstream = self._all[attempts.begin(time.monotonic())]
            try:
                answer = await call(upstream.stub())
            except grpc.aio.AioRpcError as error:
                self.on_failure(upstream, error)
                if attempts.on_error(time.monotonic(), error.code(), rich_details(error)) is None:
                    raise
            else:
                attempts.on_answer(time.monotonic())
                return answer

    async def watch(self, announce: Callable[[str], None]) -> None:
        """Dials all verifiers until one has described itself, so that generations need not ask; and again whenever
        none is left. Never returns.

        Args:
            announce: Called with a line at the start, and whenever the line changes.
        """
        told = ""
        while True:
            attempt = 0
            while not any(await asyncio.gather(*(self._greet(upstream) for upstream in self._all))):
                if told != (told := f"cloud: {self._problem}, trying"):
                    announce(told)
                attempt += 1
                await wait_before_retry(attempt)
            if told != (told := "cloud: connected"):
                announce(told)
            while any(state.is_connected for state in self.states):
                self._was_left.clear()
                await self._was_left.wait()

    async def _greet(self, upstream: Upstream) -> bool:
        began_at = time.monotonic()
        try:
            await upstream.info(None)
        except (grpc.aio.AioRpcError, RpcError) as error:
            self.on_failure(upstream, error)
            now = time.monotonic()
            with self.replicas as loads:
                loads.failed(upstream.number, now, now - began_at)
            cause = cause_of(error)
            self._problem = f"not reachable ({cause})" if cause else f"not ready ({text_of(error)})"
            return False
        return True

    async def close(self) -> None:
        """Closes all channels, and every stream on them."""
        for upstream in self._all:
            await upstream.state.close()
