"""The rings that this replica holds. Each follows its stream in Redis, and is indexed again as it grows."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import structlog

from outrider.core.params import RetrievalScope
from outrider.core.retrieval.ring import TokenRing
from outrider.core.retrieval.suffix_index import ContextIndex, Sort, Tokens
from outrider.datastore.background import Background
from outrider.datastore.redis.store import RedisStore
from outrider.datastore.types import ALL_TENANTS, CorpusId, Scope, StoreUnavailable
from outrider.telemetry.tasks import end, keep_running

log = structlog.get_logger(__name__)

RETRY_S = 0.2
"""Time between two attempts to follow a stream."""
IN_USE_S = 60.0
"""Time after a lookup in which a ring is not dropped to make room for another. Two rings that displaced each other in
turn would be read and indexed from their beginnings every time."""
IDLE_S = 1800.0
"""Time without a lookup after which a ring is dropped."""


@dataclass(slots=True, eq=False)
class HeldRing:
    """A ring, and the task that keeps it up to date."""

    id: CorpusId
    ring: TokenRing
    last_used: float = 0.0
    """Time of the last use, by `time.monotonic`."""
    last_entry_id: str = ""
    """Place in the stream of the last document in the ring."""
    build_ms: float = 0.0
    """Duration of the last build of its index."""
    has_grown: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class Rings:
    """Holds rings, each from its first lookup on.

    Owned by the event loop. Indexes are built in the background.
    """

    def __init__(
        self, store: RedisStore, background: Background, capacity: int, max_match_len: int, max_num_rings: int
    ) -> None:
        """Begins without a ring.

        Args:
            store: Has the streams that rings follow.
            background: Builds indexes.
            capacity: Most tokens in one ring.
            max_match_len: Longest context, in tokens, that a ring can match.
            max_num_rings: Most rings held.
        """
        self._store = store
        self._capacity = capacity
        self._max_match_len = max_match_len
        self._max_num_rings = max_num_rings
        self._rings: dict[CorpusId, HeldRing] = {}  # the one that was looked up last is the last
        self._background = background
        self._sort = _fast_sort()

    @property
    def held(self) -> list[HeldRing]:
        """All rings that are held now."""
        return list(self._rings.values())

    def ring_for(self, scope: Scope) -> TokenRing | None:
        """Returns the ring of a scope; a new one fills from now on.

        Returns None for the scope of one session, which has no ring, and if all rings held are in use.
        """
        if scope.retrieval_scope is RetrievalScope.SESSION:
            return None
        ring_id = scope.corpus_id(ALL_TENANTS if scope.retrieval_scope is RetrievalScope.GLOBAL else scope.tenant)
        held = self._rings.pop(ring_id, None) or self._open(ring_id, scope)
        if held is None:
            return None
        self._rings[ring_id] = held
        held.last_used = time.monotonic()
        return held.ring

    def drop_idle(self) -> None:
        """Drops the rings that were not looked up for IDLE_S."""
        while self._rings and self._oldest_idle_s() > IDLE_S:
            self._drop_oldest()

    async def close(self) -> None:
        """Drops all rings."""
        tasks = [task for held in self._rings.values() for task in held.tasks]
        while self._rings:
            self._drop_oldest()
        await asyncio.gather(*map(end, tasks))

    def _open(self, ring_id: CorpusId, scope: Scope) -> HeldRing | None:
        if len(self._rings) >= self._max_num_rings:
            if self._oldest_idle_s() < IN_USE_S:
                return None
            self._drop_oldest()
        held = HeldRing(ring_id, TokenRing(self._capacity, self._max_match_len))
        held.tasks = [
            keep_running("ring", partial(self._follow, held, replace(scope, session_id="", contribute=False))),
            keep_running("ring index", partial(self._index, held)),
        ]
        return held

    def _oldest_idle_s(self) -> float:
        return time.monotonic() - next(iter(self._rings.values())).last_used

    def _drop_oldest(self) -> None:
        held = self._rings.pop(next(iter(self._rings)))
        for task in held.tasks:
            task.cancel()

    async def _follow(self, held: HeldRing, scope: Scope) -> None:
        """Appends the documents of the stream, and resumes after the last one when Redis is back."""
        while True:
            with suppress(StoreUnavailable):
                async for document in self._store.follow_ring(scope, held.last_entry_id):
                    held.last_entry_id = document.entry_id
                    held.ring.append(document.token_ids)
                    if held.ring.wants_build:
                        held.has_grown.set()
                    # One read brings many documents: lookups are served between two of them.
                    await asyncio.sleep(0)
            await asyncio.sleep(RETRY_S)

    async def _index(self, held: HeldRing) -> None:
        """Builds an index whenever the ring wants one, and swaps it in."""
        while True:
            await held.has_grown.wait()
            # Before the build: growth during it sets the event again.
            held.has_grown.clear()
            while held.ring.wants_build:
                snapshot = held.ring.snapshot()
                index, held.build_ms = await self._background.run(self._build, snapshot.tokens)
                held.ring.swap(snapshot, index)
                log.info(
                    "ring.indexed",
                    tokenizer_hash=held.id.tokenizer_hash,
                    corpus=held.id.corpus,
                    tenant=held.id.tenant,
                    num_tokens=len(snapshot.tokens),
                    build_ms=round(held.build_ms, 1),
                )

    def _build(self, tokens: Tokens) -> tuple[ContextIndex, float]:
        # Runs in the background's thread, so it gets a copy of the tokens: rings belong to the event loop.
        began = time.perf_counter()
        index = ContextIndex.build(tokens, self._sort)
        return index, 1000 * (time.perf_counter() - began)


def _fast_sort() -> Sort | None:
    """Returns a full suffix array builder, or None for numpy's sort if no such package is installed."""
    try:
        from pydivsufsort import divsufsort
    except ImportError:
        return None
    return cast(Sort, divsufsort)
