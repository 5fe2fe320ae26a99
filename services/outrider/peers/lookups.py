"""Lookups in the datastore: one stream for all sessions of a process, answers in order.

Each session has at most one lookup in flight; one that comes meanwhile waits, and gives way to a newer one. A datastore
that does not answer in time is asked again, over another connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import grpc

from outrider.core.params import TIERS, Source
from outrider.core.retrieval.ngrams import Continuation
from outrider.core.statistics import Absence
from outrider.peers.channel import PeerState
from outrider.peers.reconnecting import (
    BROKEN_CONNECTION,
    LAST_RETRY_S,
    REFUSALS,
    Cause,
    Loss,
    ReconnectingStream,
    backoff_s,
)
from outrider.telemetry.tracing import TraceBudget
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc, types_pb2
from outrider.wire.convert import MAX_DRAFT_LEN, source_to_proto

MAX_MATCH_LEN = 1 << 16
"""Longest context that a continuation is believed to follow, in tokens."""
ANSWER_TIMEOUT_S = 1.0
"""A lookup takes milliseconds: one that takes this long is on a connection that no longer works."""


# Compared by identity, as it is a key of `_due`: with eq a dataclass that is not frozen cannot be hashed.
@dataclass(eq=False, slots=True)
class Asker:
    """Holds a session's lookups. `on_answer(base_len, continuation)` and `on_lost(absence)` are called on the event
    loop."""

    scope: pb.Scope
    on_answer: Callable[[int, Continuation], None]
    on_lost: Callable[[Absence], None]
    tiers: Sequence[types_pb2.Source] = ()
    """Tiers that are asked; empty means all."""
    whole_run_len: int = 0
    """See `RetrievalPlan`."""
    trace_budget: TraceBudget = field(default_factory=TraceBudget)
    """Names the session's trace in its first lookups."""
    next_query: pb.Query | None = None
    """Query that is not sent yet; None means that no query waits."""
    is_asking: bool = False
    is_closed: bool = False


class Lookups(ReconnectingStream[pb.LookupRequest, pb.LookupResponse]):
    """Sends the lookups of all sessions of a process, and hands out the answers. Lives on the event loop."""

    def __init__(self, state: PeerState) -> None:
        super().__init__(state)
        self._due: dict[Asker, None] = {}
        self._in_flight: deque[tuple[Asker, pb.Query]] = deque()
        self._wake = asyncio.Event()
        self._is_down = False

    def ask(self, asker: Asker, query: pb.Query) -> None:
        """Sends a query, now or after the answer to the session's last one."""
        asker.next_query = query
        if self._is_down:
            # Sent nevertheless, since only an answer shows that the datastore is back; but the session must not wait.
            asker.on_lost(self._state.absence)
        if not asker.is_asking:
            self._due[asker] = None
            self._wake.set()

    def close_asker(self, asker: Asker) -> None:
        """Ends a session's lookups: a query that is not sent yet is dropped, one in flight is still answered."""
        asker.is_closed, asker.next_query = True, None
        self._due.pop(asker, None)

    async def _wait_until_wanted(self) -> None:
        while not self._due:
            self._wake.clear()
            await self._wake.wait()

    def _open(self) -> grpc.aio.StreamStreamCall[pb.LookupRequest, pb.LookupResponse]:
        return self._state.stub(datastore_pb2_grpc.DatastoreServiceStub).Lookup()

    async def _requests(self) -> AsyncGenerator[pb.LookupRequest, None]:
        scope: pb.Scope | None = None
        while True:
            await self._wait_until_wanted()
            asker = next(iter(self._due))
            del self._due[asker]
            query, asker.next_query = asker.next_query, None
            if query is None:
                continue
            request = pb.LookupRequest(
                queries=[query],
                tiers=asker.tiers,
                max_continuation_len=asker.whole_run_len,
                whole_runs=asker.whole_run_len > 0,
                traceparent=asker.trace_budget.next(),
            )
            # The scope of a message holds for those after it, so it is sent only when it changes.
            if asker.scope is not scope:
                scope = asker.scope
                request.scope.CopyFrom(scope)
            asker.is_asking = True
            # Only the oldest lookup is timed: answers come in order, and each begins the time of the next.
            if not self._in_flight:
                self._expect_answer()
            self._in_flight.append((asker, query))
            yield request

    async def _receive(self, response: pb.LookupResponse) -> None:
        self._answered()
        self._is_down = False
        self._state.up()
        self._deliver(response)
        if self._in_flight:
            self._expect_answer()

    def _expect_answer(self) -> None:
        self._expect_answer_by(asyncio.get_running_loop().time() + ANSWER_TIMEOUT_S)

    def _lose(self, loss: Loss) -> float | None:
        # Only after an answer: a datastore that ends every stream at once would be dialled without a pause.
        if self._has_answered and (loss.code is grpc.StatusCode.OK or loss.is_overwritten):
            # Ended in order, by a replica that drains or whose connection has reached its age: another answers at once.
            self._ask_again()
            return None
        is_silent = loss.cause is Cause.SILENCE
        self._state.down(f"no answer within {ANSWER_TIMEOUT_S:g} s" if is_silent else loss.reason)
        if is_silent or loss.cause is Cause.GARBAGE or loss.code in BROKEN_CONNECTION:
            self._state.dial_anew()
        self._is_down = True
        self._state.absence = loss.absence(was_there=False)
        self._drop_all(loss.absence(was_there=self._has_answered))
        is_refused = loss.code in REFUSALS or loss.code is grpc.StatusCode.NOT_FOUND
        # A refusal usually lasts long: it is not worth asking often.
        return LAST_RETRY_S if is_refused else backoff_s(self._num_failures)

    def _deliver(self, response: pb.LookupResponse) -> None:
        if not self._in_flight:
            return
        asker, query = self._in_flight.popleft()
        asker.is_asking = False
        if asker.next_query is not None:
            self._due[asker] = None
            self._wake.set()
        # One query has one result: a result for another place is not its answer.
        for result in response.results[:1]:
            if result.base_len == query.base_len:
                asker.on_answer(query.base_len, continuation_from_proto(result))

    def _ask_again(self) -> None:
        """Makes the lookups due again that the ended stream did not answer."""
        for asker, query in self._in_flight:
            asker.is_asking = False
            if not asker.is_closed:
                asker.next_query = asker.next_query or query
                self._due[asker] = None
        self._in_flight.clear()

    def _drop_all(self, absence: Absence) -> None:
        """Gives up every lookup, sent or not: late answers are worth nothing."""
        lost = dict.fromkeys([*(asker for asker, _ in self._in_flight), *self._due])
        self._in_flight.clear()
        self._due.clear()
        for asker in lost:
            asker.is_asking, asker.next_query = False, None
            asker.on_lost(absence)


def tiers_to_proto(tiers: Sequence[Source]) -> tuple[types_pb2.Source, ...]:
    """Returns tiers as a request names them: an empty list stands for all of them."""
    return () if set(tiers) == set(TIERS) else tuple(source_to_proto(tier) for tier in tiers)


def continuation_from_proto(result: pb.LookupResult) -> Continuation:
    """Converts a result of the datastore. The continuation ends before a node whose parent does not precede it, and
    with as many nodes as a tree holds. An impossible match length is cut to a possible one."""
    # The lists come from another process, and proto does not make them equally long.
    length = min(len(result.parent_offsets), len(result.token_ids), len(result.counts), MAX_DRAFT_LEN)
    for index, offset in enumerate(result.parent_offsets[:length]):
        # Nodes count from 1: the parent of this one is number index + 1 - offset, at least 1. Offset 0 has no parent.
        if offset > index:
            length = index
            break
    tier = Source(result.tier) if result.tier in Source._value2member_map_ else None
    return Continuation(
        min(max(0, result.match_len), MAX_MATCH_LEN),
        tier if length else None,
        tuple(result.parent_offsets[:length]),
        tuple(result.token_ids[:length]),
        tuple(result.counts[:length]),
    )
