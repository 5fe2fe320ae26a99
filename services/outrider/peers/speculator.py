"""The speculator as a verifier sees it: a channel for the process, and a stream for each session on a call that all
share.

A lost stream is reported to its listener, and opened again with the tokens committed by then as soon as the speculator
is well. A speculator that refuses, or that sends unreadable messages, is also dialled again, but more rarely.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
import structlog

from outrider.core.load import LoadEstimate
from outrider.core.params import SamplingParams
from outrider.core.speculation import SpeculationParams, Steering
from outrider.core.statistics import Absence, RunningMean, Traffic
from outrider.core.structure import Structure
from outrider.core.tree import Draft, TokenId
from outrider.peers.channel import PeerState, is_balanced
from outrider.peers.reconnecting import (
    REFUSALS,
    AnswerDeadline,
    Breaker,
    Cause,
    Loss,
    Reconnecting,
    backoff_s,
)
from outrider.peers.shared_call import SharedCall
from outrider.security.peer_channel import PeerSecurity
from outrider.security.quotas import Clock, TokenBucket
from outrider.telemetry.metrics import Metrics
from outrider.telemetry.tracing import NO_SPAN, SPECULATE, current_span
from outrider.v1 import speculator_pb2, types_pb2, verifier_pb2
from outrider.wire.channels import doubled
from outrider.wire.convert import MAX_TIME_US, draft_from_proto, last_node_id
from outrider.wire.errors import ended_from_proto
from outrider.wire.handshake import Model, handshake
from outrider.wire.sampling import sampling_to_proto
from outrider.wire.speculation import speculation_to_proto
from outrider.wire.steering import steering_to_proto
from outrider.wire.structure import structure_to_proto

log = structlog.get_logger(__name__)

MAX_NODES_PER_S = 100_000.0
"""Several times what a wide beam of a small model grows, with a tree that holds 4096 nodes."""
BURST_S = 1.0
"""Seconds of that rate that may come at once."""
BYTES_PER_NODE = 512
"""Size of a node with the longest useful distribution; a larger one counts for several."""


class DraftLimit:
    """Limits the nodes of one stream's drafts. Drafts beyond the limit are dropped whole, as if they had been late."""

    def __init__(self, max_nodes_per_s: float, session_id: str, clock: Clock = time.monotonic) -> None:
        self._bucket = TokenBucket(max_nodes_per_s, BURST_S, clock)
        self._session_id = session_id
        self.num_dropped_nodes = 0

    def admits(self, draft: types_pb2.Draft) -> bool:
        """Returns True if a draft is within the limit, and counts it. Looks at its size only."""
        # A peer that fills one list only, or sends long distributions, costs as much as one that sends many nodes.
        lists = (draft.parent_offsets, draft.token_ids, draft.costs, draft.q_rows)
        num_nodes = max(1, *map(len, lists), draft.ByteSize() // BYTES_PER_NODE)
        if self._bucket.level >= num_nodes:
            self._bucket.take(num_nodes)
            return True
        # Logged once per session: a speculator beyond its limit would fill the log otherwise.
        if not self.num_dropped_nodes:
            limit = self._bucket.rate_per_s
            log.warning("drafts.dropped", session_id=self._session_id, max_nodes_per_s=limit)
        self.num_dropped_nodes += num_nodes
        return False


REFUSED_RETRY_S = 5.0
"""Pause after a refusal: a peer with another tokenizer may have been replaced by the right one after that time."""
GARBAGE_RETRY_S = 1.0
"""Pause after bytes that cannot be understood: the peer may be well and only the connection bad."""
FULL_S = 1.0
"""Time for which a speculator that has refused a session because it is full gets no session while another speculator is
available."""
MAX_PAUSED_TOKENS = 64
"""Most tokens whose commits are joined while the speculator is paused: few messages meanwhile, and little to read
afterwards."""


class SpeculationListener(Protocol):
    """Receives a session's drafts. Called on the event loop."""

    def on_attached(self, forward_us: int) -> None:
        """Takes in that a stream is open; its node ids start again. `forward_us` is the time of a draft forward, in
        microseconds; 0 means not known."""

    def on_draft(self, draft: Draft) -> None:
        """Takes in new nodes."""

    def on_detached(self, absence: Absence) -> None:
        """Takes in that the stream was lost, or that there is none, and why."""


@dataclass(frozen=True, slots=True)
class SpeculationSpec:
    """Describes a session to a speculator."""

    session_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    speculation: SpeculationParams
    max_forward_us: int = 0
    """A speculator whose draft forward takes longer than this, in microseconds, waits for steering before it reads the
    prompt. 0 means that it does not wait."""
    prefix_salt: str = ""
    """Sessions of the same salt find each other's prefixes there; empty means that this one shares none."""
    structure: Structure | None = None
    """Description of the texts that the output must be one of."""


class Speculation(Protocol):
    """Drafts for one session until it is closed, wherever the draft model is. Lives on the event loop."""

    traffic: Traffic
    """Bytes that were exchanged for this session so far."""

    def send_commit(self) -> None:
        """Tells of the tokens that were added to the committed ones."""

    def send_steering(self, steering: Steering) -> None:
        """Tells of measurements and decisions. Fields that are not set keep their last value."""

    def close(self) -> None:
        """Ends the session there."""


class Speculators(Protocol):
    """Draft for a verifier's sessions: peers that it dials, or a draft model in its own process."""

    @property
    def states(self) -> list[PeerState]:
        """All peers that are dialled."""

    def speculate(
        self, spec: SpeculationSpec, committed: Sequence[TokenId], listener: SpeculationListener
    ) -> Speculation:
        """Starts a session; it lives until it is closed. See `SpeculatorPeer.speculate`."""

    def infos(self) -> list[verifier_pb2.PeerInfo]:
        """Describes each of them for a caller of the verifier."""

    def metrics(self) -> Metrics:
        """Yields what is known of each. Safe to call in any thread."""

    async def close(self) -> None:
        """Ends all drafting."""


class SpeculatorPeer:
    """Holds the speculator that this verifier dials: its channel, its breaker and its usual answer time."""

    def __init__(
        self,
        address: str,
        model: Model,
        security: PeerSecurity | None = None,
        max_nodes_per_s: float = MAX_NODES_PER_S,
        *,
        host: str = "",
        on_back: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes the channel; nothing is dialled before the first session.

        Args:
            address: See `PeerState`.
            model: The target, which the speculator's model must match.
            security: See `PeerState`.
            max_nodes_per_s: Limit of one session's drafts; nodes beyond it are dropped.
            host: See `PeerState`.
            on_back: Called whenever the speculator is well again after it was down.
        """
        self.state = PeerState("speculator", address, security, host)
        self.model = model
        self.max_nodes_per_s = max_nodes_per_s
        self.has_stand_ins = False
        """True if sessions that it loses can go to another speculator: it then counts as down at its first failure."""
        self.breaker = Breaker(self.state, self._come_back)
        self.usual_answer_s = RunningMean(0.1)
        """Seconds from a commit to the first draft after it."""
        self.load = LoadEstimate()
        self._full_until = 0.0
        self._on_back = on_back
        self._call: SharedCall | None = None
        """The call that a new session joins, if it takes more."""
        self._is_balanced = is_balanced(address)

    def _come_back(self) -> None:
        self.load.forget()  # it may be another process
        self._on_back()

    @property
    def has_room(self) -> bool:
        """True if it may take another session, as far as is known: it is not down, and not full."""
        is_refusing = asyncio.get_running_loop().time() < self._full_until
        return self.breaker.is_closed and not is_refusing and not self.load.is_full

    def refuse(self) -> None:
        """Records that it has refused a session because it is full."""
        self._full_until = asyncio.get_running_loop().time() + FULL_S

    def learn_load(self, load: speculator_pb2.SpeculatorLoad, stream: SpeculationStream | None = None) -> None:
        """Takes in what it says of its load, with the opening of `stream` if that is given."""
        self.load.report(load.num_sessions, load.max_num_sessions, load.busy_percent / 100, stream)

    def speculate(
        self,
        spec: SpeculationSpec,
        committed: Sequence[TokenId],
        listener: SpeculationListener,
        traffic: Traffic | None = None,
    ) -> SpeculationStream:
        """Starts a session's stream; it lives until it is closed.

        Args:
            spec: The session.
            committed: Token ids of the prompt, and those generated so far. The caller adds to it what is committed
                later, and calls `send_commit`.
            listener: Receives the drafts.
            traffic: Counts the stream's bytes. None means counts of its own.
        """
        return SpeculationStream(self, spec, committed, listener, traffic)

    def shared_call(self) -> SharedCall:
        """Returns the call for a session that begins now."""
        # Calls take turns among replicas that only gRPC knows: each session there has a call of its own.
        if self._call is None or self._is_balanced or not self._call.takes_more:
            self._call = SharedCall(self.state)
        return self._call

    def info(self) -> verifier_pb2.PeerInfo:
        """Describes it, including its load, for a caller of this server."""
        info, load = self.state.info(), self.load
        info.num_own_sessions, info.num_sessions = load.num_own_sessions, load.num_sessions
        info.max_num_sessions, info.busy_percent = load.max_num_sessions, round(100 * load.busy)
        return info

    async def close(self) -> None:
        """Closes the channel and every stream on it."""
        self.breaker.stop()
        await self.state.close()


class SpeculationStream(Reconnecting):
    """Sends one session's commits to a speculator, and hands its drafts to a listener. Lives on the event loop.

    To its owner it is a stream; to gRPC it is a part of a call that sessions share.
    """

    def __init__(
        self,
        peer: SpeculatorPeer,
        spec: SpeculationSpec,
        committed: Sequence[TokenId],
        listener: SpeculationListener,
        traffic: Traffic | None = None,
    ) -> None:
        super().__init__(peer.state)
        self._peer, self._spec, self._listener = peer, spec, listener
        self._session_span, self._call_span = current_span(), NO_SPAN
        self._clock = asyncio.get_running_loop().time
        self.traffic = Traffic() if traffic is None else traffic
        """Bytes of all streams of this session so far."""
        # Now, and not when the stream opens: if many sessions begin at once, each must see those before it.
        peer.load.begin(self)
        self._limit = DraftLimit(peer.max_nodes_per_s, spec.session_id)
        self._committed = committed
        self._num_sent = 0
        """Committed tokens that this stream has sent; 0 before it has sent its opening."""
        self._call: SharedCall | None = None
        self._number = 0
        """Names this stream on the call."""
        self._end: asyncio.Future[BaseException | None] | None = None
        """Completed with the error that has ended this stream. None before the first one."""
        self._steering = Steering()
        self._unsent = Steering()
        """The part of it that this stream has not sent."""
        self._last_node_id = 0
        """Id of the latest node that has arrived on this stream."""
        self._is_attached = True
        """True until the listener is told otherwise: a session begins expecting drafts."""
        self._is_open = False
        """True if the speculator has taken this stream."""
        self._num_silent = 0
        """Number of streams in a row, since the last draft, that were lost by silence."""
        self._answer_deadline = AnswerDeadline(peer.usual_answer_s, 0)

    def send_commit(self) -> None:
        """Sends the tokens that were added to the committed ones. Commits are joined if the speculator is too slow for
        them, or pauses."""
        if not self._is_paused or len(self._committed) - self._num_sent >= MAX_PAUSED_TOKENS:
            self._wake()

    def send_steering(self, steering: Steering) -> None:
        """Sends measurements and decisions. Fields that are not set keep their last value."""
        self._steering = self._steering.then(steering)
        self._unsent = self._unsent.then(steering)
        self._wake()

    def close(self) -> None:
        """Ends the session on the speculator."""
        self._peer.load.end(self)
        self.stop()
        # Not when the task ends, which is later: tokens committed since are not needed.
        self._leave()

    @property
    def is_lost(self) -> bool:
        """True while there is no stream, and the listener knows."""
        return not self._is_attached

    @property
    def _is_paused(self) -> bool:
        return self._steering.is_pause

    def _wake(self) -> None:
        if self._call is not None:
            self._call.wake(self._number)

    def _leave(self) -> None:
        if self._call is not None:
            self._call.leave(self._number)
            self._call = None

    async def _wait_until_wanted(self) -> None:
        if not self._peer.breaker.is_closed:
            self._detach(self._state.absence)
        await self._peer.breaker.wait_closed()

    def _detach(self, absence: Absence) -> None:
        if self._is_attached:
            self._is_attached = False
            self._listener.on_detached(absence)

    async def _attend(self) -> None:
        with self._session_span.calling(SPECULATE, self._state.address) as self._call_span:
            self._answer_deadline = AnswerDeadline(self._peer.usual_answer_s, self._num_silent)
            self._is_open, self._num_sent, self._last_node_id = False, 0, 0
            self._peer.load.begin(self)
            self._end = asyncio.get_running_loop().create_future()
            self._call = self._peer.shared_call()
            self._number = self._call.join(self)
            try:
                async with asyncio.timeout(None) as self._timeout:
                    self._expect_answer_by(self._answer_deadline.open(self._clock()))
                    error = await self._end
            finally:
                self._leave()
            if error is not None:
                raise error

    def on_call_over(self, error: BaseException | None) -> None:
        """See `Member`."""
        if self._end is not None and not self._end.done():
            self._end.set_result(error)

    def on_response(self, response: speculator_pb2.SessionResponse) -> None:
        """See `Member`."""
        self._expect_answer_by(None)
        match response.WhichOneof("event"):
            case "draft":
                self._take(response.draft)
            case "opened":
                self._open(response.opened)
            case "ended":
                self.on_call_over(ended_from_proto(response.ended))

    def _open(self, opened: speculator_pb2.SpeculateOpened) -> None:
        self._is_open = self._is_attached = True
        self._state.up()
        if opened.HasField("load"):
            self._peer.learn_load(opened.load, self)
        else:
            self._peer.load.opened(self)
        self._listener.on_attached(min(opened.forward_us, MAX_TIME_US))

    def _take(self, drafted: speculator_pb2.SpeculatorDraft) -> None:
        self._answered()
        self._answer_deadline.answered(self._clock())
        self._num_silent = 0
        if drafted.HasField("load"):
            self._peer.learn_load(drafted.load)
        # Set for a draft that is dropped below, too: an acknowledgement says what has arrived, not what was used.
        self._last_node_id = last_node_id(drafted.draft)
        if self._limit.admits(drafted.draft):
            self._listener.on_draft(draft_from_proto(drafted.draft, drafted.forward_us, drafted.retrieval_us))

    def _lose(self, loss: Loss) -> float:
        self._peer.load.end(self)
        pause_s = self._judge(loss)
        self._state.absence = loss.absence(was_there=False)
        self._detach(loss.absence(was_there=self._is_open))
        # The first attempt after a loss is made at once: it may go to another replica at the address.
        return max(pause_s, backoff_s(self._num_failures - 1) if self._num_failures > 1 else 0.0)

    def _judge(self, loss: Loss) -> float:
        """Records what a loss says about the peer. Returns how long this session in particular should leave it alone,
        in seconds."""
        breaker = self._peer.breaker
        if loss.cause is Cause.SILENCE:
            self._num_silent += 1
            # Another connection may lead to another replica, which may be well.
            self._state.dial_anew()
            breaker.trip(f"the speculator said nothing for {self._answer_deadline.limit_s:.2g} s")
        elif loss.cause is Cause.GARBAGE:
            breaker.trip(loss.reason, GARBAGE_RETRY_S)
        elif loss.code is grpc.StatusCode.FAILED_PRECONDITION:
            # Tokenizers or protocols differ, so every session would be refused.
            breaker.trip(loss.reason, REFUSED_RETRY_S)
        elif loss.code is grpc.StatusCode.UNIMPLEMENTED:
            # Either it is no speculator, or the two ends of a damaged connection no longer read the same method.
            self._state.dial_anew()
            breaker.trip(loss.reason, GARBAGE_RETRY_S)
        elif loss.code in REFUSALS:
            log.error("speculator.refused", session_id=self._spec.session_id, reason=loss.reason)
            self._state.down(loss.reason)
            return doubled(GARBAGE_RETRY_S, REFUSED_RETRY_S, self._num_failures - 1)
        elif loss.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self._state.down(loss.reason)
            self._peer.refuse()
        elif self._num_failures == 1 and loss.code is not grpc.StatusCode.OK and not self._peer.has_stand_ins:
            # It drafted until now. The address may have other replicas, and the next attempt goes to one of them: the
            # peer is down only if that one fails too.
            self._state.down(loss.reason)
        else:
            breaker.trip(loss.reason)
        return 0.0

    def add_requests(self, number: int, message: speculator_pb2.SpeculateRequest) -> int:
        """See `Member`."""
        if not self._num_sent:
            # A speculator that comes back has forgotten everything.
            self._num_sent, self._unsent = len(self._committed), self._steering
            message.sessions.add(number=number, open=self._opening())
            self._say_steering(number, message)
            return self._num_sent
        fresh = self._committed[self._num_sent :]
        if fresh and (not self._is_paused or len(fresh) >= MAX_PAUSED_TOKENS):
            commit = types_pb2.Commit(base_len=self._num_sent, token_ids=fresh, acknowledged_node_id=self._last_node_id)
            self._num_sent += len(fresh)
            message.sessions.add(number=number, commit=commit)
            self._expect_answer()
        self._say_steering(number, message)
        return len(fresh)

    def _say_steering(self, number: int, message: speculator_pb2.SpeculateRequest) -> None:
        if self._unsent != Steering():
            steering, self._unsent = steering_to_proto(self._unsent), Steering()
            message.sessions.add(number=number, steering=steering)

    def _opening(self) -> speculator_pb2.SpeculateOpen:
        spec = self._spec
        return speculator_pb2.SpeculateOpen(
            handshake=handshake(self._peer.model),
            session_id=spec.session_id,
            committed_token_ids=self._committed,
            num_prompt_tokens=spec.num_prompt_tokens,
            sampling=sampling_to_proto(spec.sampling),
            speculation=speculation_to_proto(spec.speculation),
            max_forward_us=spec.max_forward_us,
            prefix_salt=spec.prefix_salt,
            structured_outputs=None if spec.structure is None else structure_to_proto(spec.structure),
            traceparent=dict(self._call_span.metadata).get("traceparent"),
        )

    def _expect_answer(self) -> None:
        """Sets the deadline for the answer to a commit. A speculator that was told to pause owes none."""
        if not self._is_open:
            return  # the deadline for opening the stream stands
        if self._is_paused:
            self._answer_deadline.forgive()
        else:
            self._answer_deadline.sent(self._clock())
        self._expect_answer_by(self._answer_deadline.deadline)
