"""Records for the datastore: one stream for all sessions, joined, acknowledged, off the hot path.

A recording remembers what is acknowledged. After a lost stream, and when the datastore says that it has less than was
sent (its Redis came back older), it goes on from there. Tokens are given up only if sessions end faster than the
datastore takes their tokens in, for too long: the oldest sessions are given up first, and counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import grpc
import structlog

from outrider.core.params import Source
from outrider.core.tree import TokenId
from outrider.peers.channel import PeerState
from outrider.peers.reconnecting import REFUSALS, Cause, Loss, ReconnectingStream, backoff_s
from outrider.telemetry.tracing import current_span
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc, types_pb2
from outrider.wire.convert import source_to_proto

log = structlog.get_logger(__name__)

BATCH_TOKENS = 32
"""Tokens that make a record worth a message at once."""
FLUSH_S = 0.25
"""Longest wait of fewer tokens for more. Even a short message takes time here, in the datastore and in Redis: with one
for every second round, all services on one core made 2 to 3 % fewer tokens a second."""
MAX_FLUSHES_PER_S = 16
"""Most messages a second of that kind, of all sessions together: the more of them share a process, the longer each
waits for more. 16 sessions with four messages a second each took .7 % of a verifier's core."""
MAX_TOKENS = 4096
"""Most tokens of one message."""
MAX_REJECTIONS = 128
"""Rejections that a recording holds; the oldest give way, and are counted."""
MAX_IN_FLIGHT = 8
"""Most messages that are not acknowledged yet. Tokens that come meanwhile are joined."""
MAX_BACKLOG_TOKENS = 1 << 20
"""Tokens of ended sessions that may wait for the datastore."""
MAX_RESENDS = 3
"""Times in a row that a full window is sent again before a session is given up: a datastore that still asks for the
same tokens does not keep them."""


class Recording:
    """Holds one session's tokens, and how far they have come on their way to the datastore."""

    def __init__(self, recorder: Recorder, scope: pb.Scope, committed: Sequence[TokenId]) -> None:
        self.scope = scope
        self.committed = committed
        """Token ids of the session so far. The generation appends to it."""
        self.num_sent = 0
        self.num_acknowledged = 0
        self.num_resends = 0
        self.is_ended = False
        self.is_given_up = False
        self.rejections: list[pb.Rejection] = []
        self.accepted_by_tier: Counter[Source] = Counter()
        self.trace_budget = current_span().trace_budget()
        """Names the session's trace in its first records."""
        self._recorder = recorder

    def add_verdict(self, num_tokens: int, rejection: pb.Rejection | None, accepted: Counter[Source]) -> None:
        """Records the tokens that a round has added to the committed ones.

        Args:
            num_tokens: Number of these tokens.
            rejection: The draft token that the target rejected, with its context; None means that there was none.
            accepted: Number of accepted retrieved tokens, by tier.
        """
        if self.is_given_up:
            self._recorder.shed(num_tokens)
            return
        self.accepted_by_tier += accepted
        if rejection is not None:
            self.rejections.append(rejection)
            if len(self.rejections) > MAX_REJECTIONS:
                del self.rejections[0]
                self._recorder.shed(1)
        self._recorder.touch(self)

    def end(self) -> None:
        """Ends the session; its last tokens are sent in the background."""
        self.is_ended = True
        self._recorder.end(self)

    @property
    def num_waiting(self) -> int:
        """Number of tokens that are not acknowledged."""
        return len(self.committed) - self.num_acknowledged


@dataclass(frozen=True, slots=True)
class _Sent:
    recording: Recording
    request: pb.RecordRequest
    length: int
    """Number of tokens of the session that are stored once this message is acknowledged."""


class Recorder(ReconnectingStream[pb.RecordRequest, pb.RecordResponse]):
    """Sends the records of all sessions of a process. Lives on the event loop."""

    def __init__(self, state: PeerState) -> None:
        super().__init__(state)
        self._due: dict[Recording, None] = {}
        self._waiting: dict[Recording, asyncio.TimerHandle] = {}
        self._ended: dict[Recording, None] = {}
        self._sent: deque[_Sent] = deque()
        self._wake = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def open(self, scope: pb.Scope, committed: Sequence[TokenId]) -> Recording:
        """Begins a session with what is committed already."""
        recording = Recording(self, scope, committed)
        self.touch(recording)
        return recording

    def touch(self, recording: Recording) -> None:
        """Makes a recording due after something was added to it: at once, or with what comes within `FLUSH_S`, or later
        if many wait."""
        if recording in self._due:
            return
        if recording.is_ended or len(recording.committed) - recording.num_sent >= BATCH_TOKENS:
            self._make_due(recording)
        elif recording not in self._waiting:
            wait_s = max(FLUSH_S, (1 + len(self._waiting)) / MAX_FLUSHES_PER_S)
            self._waiting[recording] = asyncio.get_running_loop().call_later(wait_s, self._make_due, recording)

    def end(self, recording: Recording) -> None:
        """Keeps the tokens of an ended session until they are acknowledged, within `MAX_BACKLOG_TOKENS`."""
        if recording.is_given_up:
            return
        self._ended[recording] = None
        self._is_empty.clear()
        self.touch(recording)
        backlog = sum(ended.num_waiting for ended in self._ended)
        # The session that has just ended is kept even if it alone exceeds the limit.
        while backlog > MAX_BACKLOG_TOKENS and len(self._ended) > 1:
            oldest = next(iter(self._ended))
            backlog -= oldest.num_waiting
            self._give_up(oldest, "too much is waiting")

    def shed(self, num_tokens: int) -> None:
        """Counts tokens or rejections that are given up."""
        self._state.num_shed_tokens += num_tokens

    async def close(self, timeout_s: float) -> None:
        """Sends the remaining tokens of ended sessions, for at most timeout_s; then gives up the rest."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            for recording in list(self._ended):
                self._give_up(recording, "the process ends")
        self.stop()
        for timer in self._waiting.values():
            timer.cancel()

    def _make_due(self, recording: Recording) -> None:
        timer = self._waiting.pop(recording, None)
        if timer is not None:
            timer.cancel()
        self._due[recording] = None
        self._wake.set()

    def _forget(self, recording: Recording) -> None:
        self._ended.pop(recording, None)
        self._due.pop(recording, None)
        timer = self._waiting.pop(recording, None)
        if timer is not None:
            timer.cancel()
        if not self._ended:
            self._is_empty.set()

    def _give_up(self, recording: Recording, why: str) -> None:
        self.shed(recording.num_waiting)
        log.warning("datastore.tokens_shed", num_tokens=recording.num_waiting, reason=why)
        recording.is_given_up = True
        self._forget(recording)

    async def _wait_until_wanted(self) -> None:
        await self._wake.wait()

    def _open(self) -> grpc.aio.StreamStreamCall[pb.RecordRequest, pb.RecordResponse]:
        return self._state.stub(datastore_pb2_grpc.DatastoreServiceStub).Record()

    async def _requests(self) -> AsyncGenerator[pb.RecordRequest, None]:
        """Yields due messages, as long as not too many are in flight."""
        scope: pb.Scope | None = None
        while True:
            while not self._due or len(self._sent) >= MAX_IN_FLIGHT:
                self._wake.clear()
                await self._wake.wait()
            recording = next(iter(self._due))
            request, length = self._request(recording)
            # The scope of a message holds for those after it, so it is sent only when it changes.
            if recording.scope is not scope:
                scope = recording.scope
                request.scope.CopyFrom(scope)
            self._sent.append(_Sent(recording, request, length))
            yield request

    async def _receive(self, response: pb.RecordResponse) -> None:
        self._answered()
        self._state.troubled("")
        self._acknowledge(max(0, response.num_tokens))

    def _lose(self, loss: Loss) -> float:
        # Only lookups and watches decide if the peer is up: a store that is full refuses records and still answers.
        log.debug("datastore.record_lost", reason=loss.reason)
        if loss.cause is not Cause.STATUS or not (loss.code is grpc.StatusCode.OK or loss.is_overwritten):
            self._state.troubled(f"records are not taken: {loss.reason}")
        if loss.code in REFUSALS and self._sent:
            # Answers come in order, so the oldest message is the refused one. Sent again it would be refused again; the
            # other sessions go on.
            self._give_up(self._sent.popleft().recording, loss.reason)
        self._take_back()
        return backoff_s(self._num_failures)

    def _request(self, recording: Recording) -> tuple[pb.RecordRequest, int]:
        """Takes the next message from a recording that is due. Returns it, and the session's length after it."""
        start, end = recording.num_sent, min(len(recording.committed), recording.num_sent + MAX_TOKENS)
        is_last = end == len(recording.committed)
        if is_last:
            del self._due[recording]
        else:
            # To the end of the queue: a long prompt must not hold up the records of the other sessions.
            self._due[recording] = self._due.pop(recording)
        request = pb.RecordRequest(
            accepted_token_ids=recording.committed[start:end],
            rejections=recording.rejections,
            end_session=recording.is_ended and is_last,
            base_len=start,
            traceparent=recording.trace_budget.next(),
            accepted_by_tier=[
                types_pb2.SourceCount(source=source_to_proto(source), num_tokens=count)
                for source, count in recording.accepted_by_tier.items()
            ],
        )
        recording.rejections, recording.accepted_by_tier, recording.num_sent = [], Counter(), end
        return request, end

    def _acknowledge(self, num_tokens: int) -> None:
        """Takes in the answer to the oldest message in flight."""
        if not self._sent:
            return
        sent = self._sent.popleft()
        recording = sent.recording
        # 0 tokens after the end: the session is gone already, as when the end was stored and its answer was lost.
        if num_tokens >= sent.length or (sent.request.end_session and num_tokens == 0):
            recording.num_acknowledged = max(recording.num_acknowledged, sent.length)
            recording.num_resends = 0
            if sent.request.end_session:
                self._forget(recording)
        # Equal once it has been set back: the answers to what was sent after a gap name the same position.
        elif num_tokens < recording.num_sent:
            self._resend(recording, num_tokens)
        self._wake.set()

    def _resend(self, recording: Recording, num_tokens: int) -> None:
        """Goes back to the tokens that the datastore has, if it has fewer than were sent."""
        if recording.is_given_up:
            return
        recording.num_resends += 1
        # Each message of a window may be answered with a gap of its own, if more was sent in between.
        if recording.num_resends > MAX_RESENDS * MAX_IN_FLIGHT:
            self._give_up(recording, "the datastore does not keep them")
            return
        recording.num_acknowledged = recording.num_sent = num_tokens
        self._make_due(recording)

    def _take_back(self) -> None:
        """Makes everything due again that the lost stream carried without an acknowledgement."""
        # Newest first, so that rejections are put back in their order.
        while self._sent:
            sent = self._sent.pop()
            recording = sent.recording
            recording.num_sent = min(recording.num_sent, recording.num_acknowledged)
            for count in sent.request.accepted_by_tier:
                recording.accepted_by_tier[Source(count.source)] += count.num_tokens
            recording.rejections = [*sent.request.rejections, *recording.rejections][-MAX_REJECTIONS:]
            if not recording.is_given_up:
                self._make_due(recording)
