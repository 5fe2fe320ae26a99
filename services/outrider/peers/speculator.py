"""The speculator as a verifier sees it: a channel for the process, and a stream for each session.

A stream that is lost tells its listener so, and begins anew with what is committed by then, as soon as the speculator
is well again. One that refuses, or that cannot be understood, is asked again too, but more rarely.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import grpc
import structlog

from outrider.core.params import InvalidParameter, SamplingParams, SpeculationParams, Steering
from outrider.core.statistics import RunningMean, Traffic
from outrider.core.tree import Draft, TokenId
from outrider.peers.channel import SENSELESS, PeerState, reason_of, wait_before_retry
from outrider.peers.reconnecting import AnswerDeadline, Breaker
from outrider.security.peer_channel import PeerSecurity
from outrider.security.quotas import Clock, TokenBucket
from outrider.telemetry.tracing import SPECULATE, Span, current_span
from outrider.v1 import speculator_pb2, speculator_pb2_grpc, types_pb2
from outrider.wire.channels import Unreadable, doubled, require_message
from outrider.wire.convert import draft_from_proto, last_node_id, sampling_to_proto
from outrider.wire.handshake import Model, handshake
from outrider.wire.speculation import speculation_to_proto
from outrider.wire.steering import steering_to_proto

log = structlog.get_logger(__name__)

MAX_NODES_PER_S = 100_000.0
"""Several times what a wide beam of a small model grows, with a tree that holds 4096 nodes."""
BURST_S = 1.0
BYTES_PER_NODE = 512
"""A node with the longest useful distribution; one that says more counts for several."""


class DraftLimit:
    """What one stream's drafts may still hold. Drafts beyond it are dropped whole, as if they had been late."""

    def __init__(self, max_nodes_per_s: float, session_id: str, clock: Clock = time.monotonic) -> None:
        self._bucket = TokenBucket(max_nodes_per_s, BURST_S, clock)
        self._session_id = session_id
        self.num_dropped_nodes = 0

    def admits(self, draft: types_pb2.Draft) -> bool:
        """Whether a draft is to be looked at. Its size alone is looked at here."""
        lists = (draft.parent_offsets, draft.token_ids, draft.costs, draft.q_rows)
        num_nodes = max(1, *map(len, lists), draft.ByteSize() // BYTES_PER_NODE)
        if self._bucket.level >= num_nodes:
            self._bucket.take(num_nodes)
            return True
        if not self.num_dropped_nodes:
            limit = self._bucket.rate_per_s
            log.warning("drafts.dropped", session_id=self._session_id, max_nodes_per_s=limit)
        self.num_dropped_nodes += num_nodes
        return False


REFUSED_RETRY_S = 5.0
"""A peer that refuses, as one with another tokenizer does, may have been replaced by the right one after that time."""
GARBAGE_RETRY_S = 1.0
"""One that cannot be understood may be well and behind a bad wire: not so long, and not at once."""
MAX_PAUSED_TOKENS = 64
"""Commits to a speculator that is to pause are joined up to so many tokens: few messages meanwhile, and little to be
read before it goes on."""

Request: TypeAlias = speculator_pb2.SpeculateRequest


class SpeculationListener(Protocol):
    """Who wants a session's drafts. Called on the event loop."""

    def on_attached(self) -> None:
        """A stream is open; node ids begin anew."""

    def on_draft(self, draft: Draft) -> None:
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

    def __init__(
        self,
        address: str,
        model: Model,
        security: PeerSecurity | None = None,
        max_nodes_per_s: float = MAX_NODES_PER_S,
    ) -> None:
        """`max_nodes_per_s`: of one session's drafts; what is beyond is dropped."""
        self.state = PeerState("speculator", address, security)
        self.model = model
        self.max_nodes_per_s = max_nodes_per_s
        self.breaker = Breaker(self.state)
        self.usual_answer_s = RunningMean(0.1)
        """From a commit to the first draft after it."""

    def speculate(
        self, spec: SpeculationSpec, committed: Sequence[TokenId], listener: SpeculationListener
    ) -> SpeculationStream:
        """Starts a session's stream; it lives until it is closed."""
        return SpeculationStream(self, spec, committed, listener)

    async def close(self) -> None:
        """Hangs up."""
        self.breaker.stop()
        await self.state.close()


class SpeculationStream:
    """One session's stream to a speculator, opened again whenever it is lost. Lives on the event loop."""

    def __init__(
        self,
        peer: SpeculatorPeer,
        spec: SpeculationSpec,
        committed: Sequence[TokenId],
        listener: SpeculationListener,
    ) -> None:
        self._peer, self._spec, self._listener = peer, spec, listener
        self._session_span = current_span()
        self.traffic = Traffic()
        """Of all streams so far."""
        self._limit = DraftLimit(peer.max_nodes_per_s, spec.session_id)
        self._committed = list(committed)
        self._fresh = asyncio.Event()
        self._steering = Steering()
        self._is_steered = False
        self._last_node_id = 0
        """The latest that has arrived on this stream."""
        self._is_attached = True
        """As the listener believes: a session begins with the hope for drafts."""
        self._num_tries = self._num_silent = 0
        """Streams since the last draft; those of them that were silent."""
        self._silence = AnswerDeadline(peer.usual_answer_s, 0)
        self._timeout = asyncio.timeout(None)
        self._task = asyncio.create_task(self._run())

    def commit(self, token_ids: Sequence[TokenId]) -> None:
        """Tells the speculator what the target said. Commits that it is too slow for are joined."""
        self._committed.extend(token_ids)
        self._fresh.set()

    def steer(self, steering: Steering) -> None:
        """Tells the speculator what was measured and decided. What it was told before and this leaves open, stays."""
        self._steering = self._steering.then(steering)
        self._is_steered = True
        self._fresh.set()

    def close(self) -> None:
        """Ends the session on the speculator."""
        self._task.cancel()

    @property
    def _is_paused(self) -> bool:
        return self._steering.is_pause

    async def _run(self) -> None:
        breaker = self._peer.breaker
        while True:
            if not breaker.is_closed:
                self._lose()
            await breaker.wait_closed()
            retry_s = 0.0
            try:
                await self._attend()
                breaker.trip("the speculator ended the stream")
            except TimeoutError:
                self._num_silent += 1
                # Of several replicas behind the address, the others are found by whom there is an answer from at all.
                self._peer.state.dial_anew()
                breaker.trip(f"the speculator said nothing for {self._silence.limit_s:.2g} s")
            except grpc.aio.AioRpcError as error:
                retry_s = self._judge(error)
            except grpc.aio.UsageError:
                return  # the channel was closed: nobody dials any more
            except InvalidParameter as error:
                breaker.trip(f"it sent a draft that cannot be one: {error}", GARBAGE_RETRY_S)
            self._lose()
            self._peer.state.num_reconnects += 1
            self._num_tries += 1
            if self._num_tries > 1:
                await wait_before_retry(self._num_tries - 1)
            await asyncio.sleep(retry_s)

    def _judge(self, error: grpc.aio.AioRpcError) -> float:
        """What a failure says about the peer. Returns how long this session in particular should leave it alone, in
        seconds."""
        code, reason = error.code(), reason_of(error)
        if isinstance(error, Unreadable) or code is grpc.StatusCode.FAILED_PRECONDITION:
            # So it is for every session.
            self._peer.breaker.trip(reason, GARBAGE_RETRY_S if isinstance(error, Unreadable) else REFUSED_RETRY_S)
        elif code is grpc.StatusCode.UNIMPLEMENTED:
            # Either it is no speculator, or the two ends of a spoilt connection no longer read the same method.
            self._peer.state.dial_anew()
            self._peer.breaker.trip(reason, GARBAGE_RETRY_S)
        elif code in SENSELESS:
            log.error("speculator.refused", session_id=self._spec.session_id, reason=reason)
            self._peer.state.down(reason)
            return doubled(GARBAGE_RETRY_S, REFUSED_RETRY_S, self._num_tries)
        elif code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self._peer.state.down(reason)
        elif self._num_tries == 0:
            # It drafted until now. Behind the address may be others, to which the next attempt goes: only if that one
            # fails, too, is there nobody.
            self._peer.state.down(reason)
        else:
            self._peer.breaker.trip(reason)
        return 0.0

    def _lose(self) -> None:
        if self._is_attached:
            self._is_attached = False
            self._listener.on_detached()

    async def _attend(self) -> None:
        """One stream, until it ends. Raises TimeoutError if the peer owes an answer for too long."""
        with self._session_span.calling(SPECULATE, self._peer.state.address) as span:
            await self._listen(span)

    async def _listen(self, span: Span) -> None:
        clock = asyncio.get_running_loop().time
        self._silence = AnswerDeadline(self._peer.usual_answer_s, self._num_silent)
        stub = self._peer.state.stub(speculator_pb2_grpc.SpeculatorServiceStub, span.metadata, self.traffic)
        call = stub.Speculate()
        writer = asyncio.create_task(self._write(call))
        try:
            async with asyncio.timeout_at(self._silence.open(clock())) as self._timeout:
                async for message in call:
                    response = require_message(message)
                    self._timeout.reschedule(None)
                    if response.WhichOneof("event") == "opened":
                        self._is_attached = True
                        self._peer.state.up()
                        self._listener.on_attached()
                        continue
                    self._silence.answered(clock())
                    self._num_tries = self._num_silent = 0
                    drafted = response.draft
                    self._last_node_id = last_node_id(drafted.draft)
                    if self._limit.admits(drafted.draft):
                        draft = draft_from_proto(drafted.draft, drafted.forward_us, drafted.retrieval_us)
                        self._listener.on_draft(draft)
        finally:
            writer.cancel()
            call.cancel()

    async def _write(self, call: grpc.aio.StreamStreamCall[Request, speculator_pb2.SpeculateResponse]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async for request in self._requests():
                await call.write(request)
        # Whoever reads the stream hears of its end, too.

    async def _requests(self) -> AsyncIterator[Request]:
        sent, self._last_node_id = len(self._committed), 0
        self._fresh.clear()
        yield speculator_pb2.SpeculateRequest(
            open=speculator_pb2.SpeculateOpen(
                handshake=handshake(self._peer.model),
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
                yield speculator_pb2.SpeculateRequest(steering=steering_to_proto(self._steering))
            await self._fresh.wait()
            self._fresh.clear()
            fresh = self._committed[sent:]
            if fresh and (not self._is_paused or len(fresh) >= MAX_PAUSED_TOKENS):
                commit = types_pb2.Commit(base_len=sent, token_ids=fresh, acknowledged_node_id=self._last_node_id)
                sent += len(fresh)
                yield speculator_pb2.SpeculateRequest(commit=commit)
                self._expect_answer()

    def _expect_answer(self) -> None:
        """It was told a commit: unless it is to pause, it should have something to say."""
        if not self._is_attached or self._timeout.expired():
            return
        if self._is_paused:
            self._silence.forgive()
        else:
            self._silence.sent(asyncio.get_running_loop().time())
        self._timeout.reschedule(self._silence.deadline)
