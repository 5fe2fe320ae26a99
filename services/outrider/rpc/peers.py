"""The verifier's peers: a speculator and a datastore, each a channel for the process and a stream for the session.

A peer may be missing, die, hang or come back at any time. None of that is an error here: a stream tells its listener
that it was lost, and tries again with what is committed by then. Only the loss of sense (another tokenizer, another
protocol) ends the attempts of a session.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import grpc
import structlog

from outrider.core.params import InvalidParameter, SamplingParams
from outrider.core.speculation import SpeculationParams
from outrider.core.steering import Steering
from outrider.core.tree import Draft, DraftCost, TokenId
from outrider.rpc.convert import draft_from_proto, sampling_to_proto
from outrider.rpc.convert_speculation import speculation_to_proto
from outrider.rpc.handshake import Model, handshake
from outrider.rpc.server import CHANNEL_OPTIONS
from outrider.v1 import speculator_pb2, speculator_pb2_grpc, types_pb2

log = structlog.get_logger(__name__)

R = TypeVar("R")

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
SENSELESS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Trying again in the same session would fail in the same way."""


class PeerState:
    """A peer as the verifier sees it."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.is_connected = False
        self.last_error = ""
        self.num_shed_tokens = 0
        """Tokens that were to be recorded and were given up."""
        self.channel = grpc.aio.insecure_channel(
            address,
            options=[
                *CHANNEL_OPTIONS,
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 2000),
            ],
        )

    def up(self) -> None:
        """It has answered."""
        if not self.is_connected:
            log.info(f"{self.name}.connected", address=self.address)
        self.is_connected, self.last_error = True, ""

    def down(self, reason: str) -> None:
        """It has failed."""
        if self.is_connected or self.last_error != reason:
            log.warning(f"{self.name}.lost", address=self.address, reason=reason)
        self.is_connected, self.last_error = False, reason

    async def close(self) -> None:
        """Closes the channel and every stream on it."""
        await self.channel.close()


class Unreadable(Exception):
    """A peer has sent bytes that are no message."""

    def __init__(self) -> None:
        super().__init__("it sent bytes that are no message")


def readable(response: R | None) -> R:
    """A response as grpc.aio hands it out, where None stands for bytes that cannot be decoded. Raises Unreadable."""
    if response is None:
        raise Unreadable
    return response


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """One line for the logs."""
    return f"{error.code().name}: {error.details()}"


async def wait_before_retry(attempt: int) -> None:
    """Waits before attempt number 1, 2, ...: 0.1 s, then twice as long each time, at most 2 s."""
    await asyncio.sleep(min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** (attempt - 1)))


class SpeculationListener(Protocol):
    """Who wants a session's drafts. Called on the event loop."""

    def on_attached(self) -> None:
        """A stream is open; node ids begin anew."""

    def on_draft(self, draft: Draft, cost: DraftCost) -> None:
        """New nodes."""

    def on_detached(self) -> None:
        """The stream was lost."""


@dataclass(frozen=True, slots=True)
class SpeculationSpec:
    """What a speculator is told of a session."""

    session_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    speculation: SpeculationParams


class SpeculatorPeer:
    """The speculator that this verifier dials."""

    def __init__(self, address: str, model: Model) -> None:
        self.state = PeerState("speculator", address)
        self._model = model
        self._stub = speculator_pb2_grpc.SpeculatorServiceStub(self.state.channel)

    def speculate(
        self, spec: SpeculationSpec, committed: Sequence[TokenId], listener: SpeculationListener
    ) -> SpeculationStream:
        """Starts a session's stream; it lives until it is closed."""
        return SpeculationStream(self._stub, self.state, self._model, spec, committed, listener)


class SpeculationStream:
    """One session's stream to a speculator, opened again whenever it is lost. Lives on the event loop."""

    def __init__(
        self,
        stub: speculator_pb2_grpc.SpeculatorServiceAsyncStub,
        state: PeerState,
        model: Model,
        spec: SpeculationSpec,
        committed: Sequence[TokenId],
        listener: SpeculationListener,
    ) -> None:
        self._stub, self._state, self._model = stub, state, model
        self._spec, self._listener = spec, listener
        self._committed = list(committed)
        self._fresh = asyncio.Event()
        self._steering = Steering()
        self._is_steered = False
        self._task = asyncio.create_task(self._run())

    def commit(self, token_ids: Sequence[TokenId]) -> None:
        """Tells the speculator what the target said. Commits that it is too slow for are joined."""
        self._committed.extend(token_ids)
        self._fresh.set()

    def steer(self, steering: Steering) -> None:
        """Tells the speculator what was measured and decided. What it was told before and this leaves open, stays."""
        known = self._steering
        self._steering = Steering(
            steering.speculation or known.speculation,
            steering.forward_us or known.forward_us,
            steering.round_trip_us or known.round_trip_us,
        )
        self._is_steered = True
        self._fresh.set()

    def close(self) -> None:
        """Ends the session on the speculator."""
        self._task.cancel()

    async def _run(self) -> None:
        attempt = 0
        while True:
            was_attached = False
            call = self._stub.Speculate(self._requests())
            try:
                async for response in call:
                    if readable(response).WhichOneof("event") == "opened":
                        was_attached, attempt = True, 0
                        self._state.up()
                        self._listener.on_attached()
                    else:
                        drafted = response.draft
                        cost = DraftCost(drafted.forward_us, drafted.retrieval_us)
                        self._listener.on_draft(draft_from_proto(drafted.draft), cost)
                self._state.down("the speculator ended the stream")
            except grpc.aio.AioRpcError as error:
                self._state.down(reason_of(error))
                if error.code() in SENSELESS:
                    log.error("speculator.refused", session_id=self._spec.session_id, reason=reason_of(error))
                    self._listener.on_detached()
                    return
            except InvalidParameter as error:
                self._state.down(f"it sent a draft that cannot be one: {error}")
            except Unreadable as error:
                self._state.down(str(error))
            finally:
                # Cancelled between two steps of grpc.aio, it would stay open until the collector comes by.
                call.cancel()
            if was_attached or attempt == 0:
                self._listener.on_detached()
            attempt += 1
            await wait_before_retry(attempt)

    async def _requests(self) -> AsyncIterator[speculator_pb2.SpeculateRequest]:
        sent = len(self._committed)
        self._fresh.clear()
        yield speculator_pb2.SpeculateRequest(
            open=speculator_pb2.SpeculateOpen(
                handshake=handshake(self._model),
                session_id=self._spec.session_id,
                committed_token_ids=self._committed,
                num_prompt_tokens=self._spec.num_prompt_tokens,
                sampling=sampling_to_proto(self._spec.sampling),
                speculation=speculation_to_proto(self._spec.speculation),
            )
        )
        # A speculator that comes back has forgotten everything.
        self._is_steered = self._steering != Steering()
        while True:
            if self._is_steered:
                self._is_steered = False
                yield speculator_pb2.SpeculateRequest(steering=_steering_to_proto(self._steering))
            await self._fresh.wait()
            self._fresh.clear()
            fresh = self._committed[sent:]
            if fresh:
                commit = types_pb2.Commit(base_len=sent, token_ids=fresh)
                sent += len(fresh)
                yield speculator_pb2.SpeculateRequest(commit=commit)


def _steering_to_proto(steering: Steering) -> speculator_pb2.Steering:
    """What is unset means: as before."""
    message = speculator_pb2.Steering(forward_us=steering.forward_us, round_trip_us=steering.round_trip_us)
    if steering.speculation is not None:
        message.speculation.CopyFrom(speculation_to_proto(steering.speculation))
    return message
