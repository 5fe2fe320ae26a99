"""Copies of the wider tiers of many tenants: made at the first request, dropped after a long time without one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import structlog

from outrider.core.params import RetrievalScope
from outrider.core.retrieval.ngrams import NgramTier
from outrider.core.retrieval.plan import NGRAM_ORDER
from outrider.core.retrieval.prior import PriorTable
from outrider.core.tree import TokenId
from outrider.peers.channel import PeerState
from outrider.peers.reconnecting import Cause, Loss, ReconnectingStream, backoff_s
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc, types_pb2

MAX_NUM_COPIES = 16
"""Most copies at a time. Each may take 60 MB, besides a prior."""
IDLE_S = 600.0
"""Seconds after which a copy is dropped if no session has begun with it."""

Key = tuple[RetrievalScope, str]
"""A scope, and the tenant that asks."""


class TierCopies:
    """Holds the copies that sessions begin with, at most `max_num_copies`. Lives on the event loop.

    A session keeps the copy that it was given when it is dropped here, but the copy no longer grows.
    """

    def __init__(
        self,
        watch: Callable[[RetrievalScope, str], TierWatch],
        max_num_copies: int = MAX_NUM_COPIES,
        idle_s: float = IDLE_S,
    ) -> None:
        """
        Args:
            watch: Begins the copy of a scope for a tenant.
            max_num_copies: Beyond it, the copy whose last request is oldest is dropped.
            idle_s: Seconds after which an unused copy is dropped.
        """
        self._watch, self._max_num_copies, self._idle_s = watch, max_num_copies, idle_s
        # In the order of the last request for each, the oldest first.
        self._copies: dict[Key, TierWatch] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def get(self, scope: RetrievalScope, tenant: str) -> TierWatch:
        """Returns the copy, and begins it if it does not exist."""
        key = (scope, tenant)
        copy = self._copies.pop(key, None)
        if copy is None:
            while len(self._copies) >= self._max_num_copies:
                self._drop(next(iter(self._copies)))
            copy = self._watch(scope, tenant)
        else:
            self._timers.pop(key).cancel()
        self._copies[key] = copy
        self._timers[key] = asyncio.get_running_loop().call_later(self._idle_s, self._drop, key)
        return copy

    def __len__(self) -> int:
        return len(self._copies)

    def stop(self) -> None:
        """Drops all copies."""
        for key in list(self._copies):
            self._drop(key)

    def _drop(self, key: Key) -> None:
        self._timers.pop(key).cancel()
        self._copies.pop(key).stop()


log = structlog.get_logger(__name__)

MAX_SHARED_NGRAMS = 400_000
"""N-grams of a copy of a shared tier, about 60 MB; the oldest make room."""
MAX_RUN_TOKENS = MAX_SHARED_NGRAMS // NGRAM_ORDER
"""Number of last tokens of a run that are learnt: earlier ones would be dropped at once."""
SLICE_TOKENS = 256
"""Tokens that are learnt in one go, in one to three milliseconds."""
MAX_PRIOR_TOKENS = 16 << 20
"""A prior beyond this is not copied: it is looked up in the datastore."""


class TierWatch(ReconnectingStream[pb.WatchRequest, pb.WatchResponse]):
    """Holds a scope's prior and shared tier, as far as they have come. Read by any thread, written on the event loop.

    What has come stays when the stream is lost or stopped.
    """

    def __init__(self, state: PeerState, scope: pb.Scope) -> None:
        super().__init__(state)
        self.prior: PriorTable | None = None
        """The prior; None means that it does not exist or has not come yet."""
        is_shared = scope.retrieval_scope not in (
            types_pb2.RETRIEVAL_SCOPE_UNSPECIFIED,
            types_pb2.RETRIEVAL_SCOPE_SESSION,
        )
        self.shared: NgramTier | None = _new_tier() if is_shared else None
        """The shared tier; None means that the scope does not include it."""
        self._scope = scope
        self._incoming: NgramTier | None = None
        self._documents: list[list[TokenId]] = []
        self._is_open = False
        self._num_tokens = 0

    def _open(self) -> grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.WatchResponse]:
        # The history comes again on every stream, into a new tier that replaces the old one with the first message.
        self._incoming = _new_tier() if self.shared is not None else None
        return self._state.stub(datastore_pb2_grpc.DatastoreServiceStub).Watch(pb.WatchRequest(scope=self._scope))

    async def _receive(self, response: pb.WatchResponse) -> None:
        self._answered()
        self._state.up()
        if response.WhichOneof("change") == "prior":
            await self._take_prior(response.prior)
        elif self._incoming is not None:
            self.shared = self._incoming
            await _learn_run(self.shared, response.shared)

    def _lose(self, loss: Loss) -> float:
        if loss.cause is Cause.GARBAGE or loss.code is not grpc.StatusCode.OK:
            self._state.down(loss.reason)
        return backoff_s(self._num_failures)

    async def _take_prior(self, piece: pb.PriorPiece) -> None:
        if piece.is_first:
            self._documents, self._is_open, self._num_tokens = [], False, 0
        for document in piece.documents:
            token_ids = list(document.token_ids)
            self._num_tokens += len(token_ids)
            # From here on tokens are only counted, for the log: no documents means no prior at the end.
            if self._num_tokens > MAX_PRIOR_TOKENS:
                self._documents = []
            elif self._is_open and self._documents:
                self._documents[-1] += token_ids
            else:
                self._documents.append(token_ids)
            # Only the first document of a piece continues the last one of the piece before.
            self._is_open = False
        self._is_open = piece.is_open
        if not piece.is_last:
            return
        documents, self._documents = self._documents, []
        if self._num_tokens > MAX_PRIOR_TOKENS:
            log.warning("datastore.prior_too_large", num_tokens=self._num_tokens, limit=MAX_PRIOR_TOKENS)
        # In a thread, since it takes seconds for a large prior, and every session of the process lives on this loop.
        self.prior = await asyncio.to_thread(PriorTable.build, documents, NGRAM_ORDER) if documents else None
        log.info("datastore.prior_copied", num_tokens=self.prior.num_tokens if self.prior is not None else 0)


async def _learn_run(tier: NgramTier, run: pb.SharedRun) -> None:
    """Learns a run in slices, with time for the sessions of this loop between them, as much as a slice has taken."""
    context, token_ids = run.context_token_ids[-NGRAM_ORDER:], run.token_ids[-MAX_RUN_TOKENS:]
    stream = [*context, *token_ids] if len(token_ids) == len(run.token_ids) else list(token_ids)
    loop = asyncio.get_running_loop()
    for begin in range(len(stream) - len(token_ids), len(stream), SLICE_TOKENS):
        began, first = loop.time(), max(0, begin - NGRAM_ORDER)
        tier.learn(stream[first : begin + SLICE_TOKENS], begin - first)
        await asyncio.sleep(loop.time() - began)


def _new_tier() -> NgramTier:
    return NgramTier(NGRAM_ORDER, MAX_SHARED_NGRAMS)
