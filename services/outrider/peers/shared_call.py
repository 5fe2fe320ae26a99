"""The call that the sessions of a process share at a speculator: one message carries the requests of all that have any.

Sessions come and go; whatever ends the call ends it for all of them, and each opens anew on the next one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import grpc

from outrider.core.statistics import Traffic
from outrider.peers.channel import PeerState
from outrider.peers.reconnecting import write_all
from outrider.v1 import speculator_pb2, speculator_pb2_grpc
from outrider.wire.channels import require_message

MAX_AGE_S = 5.0
"""Time for which a call takes further sessions: later ones may find other credentials, or another connection."""
MAX_MESSAGE_TOKENS = 16_384
"""Token ids from which on a message takes no further session: a text to be opened holds up others for no longer."""


class Member(Protocol):
    """A session on a shared call. Called on the event loop."""

    traffic: Traffic
    """Bytes that were exchanged for it so far: those of its own messages, without the message around them."""

    def add_requests(self, number: int, message: speculator_pb2.SpeculateRequest) -> int:
        """Adds the session's pending requests to a message; returns their number of token ids.

        Args:
            number: Names the session on this call.
            message: May hold requests of other sessions.
        """

    def on_response(self, response: speculator_pb2.SessionResponse) -> None:
        """Takes in a response. Raises InvalidParameter for impossible contents."""

    def on_call_over(self, error: BaseException | None) -> None:
        """Called when the session's call has ended, with the reason; None means that the peer has ended it in order."""


class SharedCall:
    """One `Speculate` call and its sessions. Lives on the event loop, from construction to the end of its last
    session."""

    def __init__(self, state: PeerState) -> None:
        self._state, self._num_dials = state, state.num_dials
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._numbers = itertools.count(1)
        self._members: dict[int, Member] = {}
        self._due: dict[int, None] = {}
        """Numbers of sessions with pending requests, in the order of their turns."""
        self._left: list[int] = []
        """Numbers of ended sessions whose end the speculator was not told yet."""
        self._wake = asyncio.Event()
        self._is_over = False
        self._task = asyncio.create_task(self._run())

    @property
    def takes_more(self) -> bool:
        """True if further sessions may join."""
        is_young = self._loop.time() - self._began < MAX_AGE_S
        return is_young and not self._is_over and self._num_dials == self._state.num_dials

    def join(self, member: Member) -> int:
        """Takes a session, whose opening is pending. Returns its number."""
        number = next(self._numbers)
        self._members[number] = member
        self.wake(number)
        return number

    def wake(self, number: int) -> None:
        """Marks a session as due: its requests are asked for, with those of all others that are due then."""
        self._due[number] = None
        self._wake.set()

    def leave(self, number: int) -> None:
        """Ends a session at the speculator. Idempotent."""
        if self._members.pop(number, None) is None:
            return
        self._due.pop(number, None)
        if self._members:
            self._left.append(number)
            self._wake.set()
        else:
            self._is_over = True
            self._task.cancel()

    async def _run(self) -> None:
        end: BaseException | None = None
        try:
            await self._attend(self._state.stub(speculator_pb2_grpc.SpeculatorServiceStub).Speculate())
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            end = error
        except asyncio.CancelledError as error:
            end = error  # by the last session, which has left, or because the channel was closed
            raise
        finally:
            self._is_over = True
            members, self._members = self._members, {}
            for member in members.values():
                member.on_call_over(end)

    async def _attend(self, call: grpc.aio.StreamStreamCall[Any, speculator_pb2.SpeculateResponse]) -> None:
        writer = asyncio.create_task(write_all(call, self._messages()))
        try:
            async for message in call:
                for response in require_message(message).sessions:
                    if (member := self._members.get(response.number)) is not None:
                        member.traffic.num_bytes_received += response.ByteSize()
                        _pass_on(member, response)
        finally:
            writer.cancel()
            # A call that is only dropped stays open until the garbage collector finds it.
            call.cancel()

    async def _messages(self) -> AsyncGenerator[speculator_pb2.SpeculateRequest, None]:
        while True:
            await self._wake.wait()
            message, num_tokens = speculator_pb2.SpeculateRequest(), 0
            for number in self._left:
                message.sessions.add(number=number).close.SetInParent()
            self._left.clear()
            traffics: dict[int, Traffic] = {}
            while self._due and num_tokens < MAX_MESSAGE_TOKENS:
                number = next(iter(self._due))
                del self._due[number]
                traffics[number] = self._members[number].traffic
                num_tokens += self._members[number].add_requests(number, message)
            if not self._due:
                self._wake.clear()
            if message.sessions:
                yield message
                # After the write, which may never have been made.
                for request in message.sessions:
                    if (traffic := traffics.get(request.number)) is not None:
                        traffic.num_bytes_sent += request.ByteSize()


def _pass_on(member: Member, response: speculator_pb2.SessionResponse) -> None:
    try:
        member.on_response(response)
    except Exception as error:
        member.on_call_over(error)  # what comes in for one is no reason to lose the others
