"""The datastore as the verifier sees it: one stream of lookups and one of records for each session.

Both are off the hot path. A lookup is answered while a forward runs, or waited for only as long as that pays; records
are joined until there are enough of them to be worth a message.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import grpc
import structlog

from outrider.core.params import Source
from outrider.core.tree import Draft, TokenId
from outrider.rpc.peers import SENSELESS, PeerState, reason_of, wait_before_retry
from outrider.v1 import datastore_pb2, datastore_pb2_grpc

log = structlog.get_logger(__name__)

CONTEXT_LEN = 8
"""Last tokens sent with a lookup; a datastore matches no more of them than it has been set to."""
RECORD_BATCH = 32
"""Accepted tokens that make a record worth a message; the rest goes with the end of the session."""
RECORD_TIMEOUT_S = 5.0
"""At the end of a session, for the datastore to take its last records."""


class RetrievalListener(Protocol):
    """Who wants a session's continuations. Called on the event loop."""

    def on_continuation(self, draft: Draft) -> None:
        """What was found, possibly nothing."""

    def on_datastore_lost(self) -> None:
        """The datastore does not answer."""


class DatastorePeer:
    """The datastore that this verifier dials."""

    def __init__(self, address: str, tokenizer_hash: str, corpus: str) -> None:
        self.state = PeerState("datastore", address)
        self._stub = datastore_pb2_grpc.DatastoreServiceStub(self.state.channel)
        self._tokenizer_hash, self._corpus = tokenizer_hash, corpus
        self._farewells: set[asyncio.Task[None]] = set()

    def retrieve(self, session_id: str, committed: Sequence[TokenId], listener: RetrievalListener) -> RetrievalStream:
        """Starts a session's streams; they live until closed."""
        scope = datastore_pb2.Scope(tokenizer_hash=self._tokenizer_hash, session_id=session_id, corpus=self._corpus)
        return RetrievalStream(self._stub, self.state, scope, committed, listener, self._farewells)


class RetrievalStream:
    """One session's lookups and records. Lives on the event loop."""

    def __init__(
        self,
        stub: datastore_pb2_grpc.DatastoreServiceAsyncStub,
        state: PeerState,
        scope: datastore_pb2.Scope,
        committed: Sequence[TokenId],
        listener: RetrievalListener,
        farewells: set[asyncio.Task[None]],
    ) -> None:
        self._stub, self._state, self._scope, self._listener = stub, state, scope, listener
        self._farewells = farewells
        self._committed = list(committed)
        self._num_recorded = 0
        self._rejections: list[datastore_pb2.Rejection] = []
        self._is_ended = False
        self._fresh = asyncio.Event()
        self._records = asyncio.Event()
        self._lookup_task = asyncio.create_task(self._look_up())
        self._record_task = asyncio.create_task(self._record())

    def commit(self, token_ids: Sequence[TokenId], rejected: TokenId | None) -> None:
        """What the target said. `rejected` is the chain token that it refused, in whose place the last of token_ids
        stands."""
        if rejected is not None:
            context = [*self._committed, *token_ids[:-1]][-CONTEXT_LEN:]
            self._rejections.append(
                datastore_pb2.Rejection(
                    context_token_ids=context, rejected_token_ids=[rejected], continuation_token_ids=token_ids[-1:]
                )
            )
        self._committed.extend(token_ids)
        self._fresh.set()
        if len(self._committed) - self._num_recorded >= RECORD_BATCH:
            self._records.set()

    def close(self) -> None:
        """Ends the session: its last records are sent in the background."""
        self._lookup_task.cancel()
        self._is_ended = True
        self._records.set()
        self._farewells.add(self._record_task)
        self._record_task.add_done_callback(self._farewells.discard)

    async def _look_up(self) -> None:
        attempt = 0
        while True:
            try:
                async for response in self._stub.Lookup(self._lookups()):
                    attempt = 0
                    self._state.up()
                    for result in response.results:
                        self._listener.on_continuation(continuation_from_proto(result))
                self._state.down("the datastore ended the stream")
            except grpc.aio.AioRpcError as error:
                self._state.down(reason_of(error))
                if error.code() in SENSELESS:
                    self._listener.on_datastore_lost()
                    return
            if attempt == 0:
                self._listener.on_datastore_lost()
            attempt += 1
            await wait_before_retry(attempt)

    async def _lookups(self) -> AsyncIterator[datastore_pb2.LookupRequest]:
        scope: datastore_pb2.Scope | None = self._scope
        while True:
            base_len = len(self._committed)
            query = datastore_pb2.Query(base_len=base_len, context_token_ids=self._committed[-CONTEXT_LEN:])
            yield datastore_pb2.LookupRequest(scope=scope, queries=[query])
            scope = None
            while len(self._committed) == base_len:
                self._fresh.clear()
                await self._fresh.wait()

    async def _record(self) -> None:
        """Sends records until the session ends. A lost stream loses what it carried: the tiers are guesses, not
        truth."""
        while not self._is_ended:
            try:
                timeout_s = None if not self._is_ended else RECORD_TIMEOUT_S
                await self._stub.Record(self._record_requests(), timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                if not self._is_ended:
                    log.debug("datastore.record_failed", reason=reason_of(error))
                    await wait_before_retry(4)

    async def _record_requests(self) -> AsyncIterator[datastore_pb2.RecordRequest]:
        scope: datastore_pb2.Scope | None = self._scope
        while True:
            accepted = self._committed[self._num_recorded :]
            rejections, self._rejections = self._rejections, []
            self._num_recorded += len(accepted)
            yield datastore_pb2.RecordRequest(
                scope=scope, accepted_token_ids=accepted, rejections=rejections, end_session=self._is_ended
            )
            scope = None
            if self._is_ended:
                return
            self._records.clear()
            await self._records.wait()


def continuation_from_proto(result: datastore_pb2.LookupResult) -> Draft:
    """A lookup's answer as a draft: a node's probability is its share among its siblings."""
    totals: dict[int, int] = {}
    parents = [
        index + 1 - offset if offset else 0 for index, offset in enumerate(result.parent_offsets)
    ]  # counted from 1; 0 = the context
    for parent, count in zip(parents, result.counts, strict=False):
        totals[parent] = totals.get(parent, 0) + count
    logprobs = [
        math.log(count / totals[parent]) if count else -math.inf
        for parent, count in zip(parents, result.counts, strict=False)
    ]
    tier = result.tier if result.tier in Source._value2member_map_ else Source.DYNAMIC.value
    return Draft(result.base_len, 1, result.parent_offsets, result.token_ids, logprobs, Source(tier))
