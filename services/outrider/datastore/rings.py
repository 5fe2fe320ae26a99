"""The rings that this replica holds: each follows its stream in the storage, and is indexed anew now and then."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import cast

import structlog

from outrider.core.params import RetrievalScope
from outrider.core.retrieval.ring import TokenRing
from outrider.core.retrieval.suffix_index import ContextIndex, Sort, Tokens
from outrider.datastore.background import Background
from outrider.datastore.types import ALL_TENANTS, Scope, Store, StoreUnavailable

log = structlog.get_logger(__name__)

RETRY_S = 0.2
"""Between two attempts to follow a stream."""
IN_USE_S = 60.0
"""A ring that was asked this recently is not dropped for another's sake: two must not push each other out in turn."""
IDLE_S = 1800.0
"""A ring that nobody has asked for so long is dropped."""

_Key = tuple[str, str, str]


@dataclass(slots=True, eq=False)
class HeldRing:
    """A ring and what keeps it up to date."""

    tokenizer_hash: str
    corpus: str
    tenant: str
    """ALL_TENANTS = that of all tenants."""
    ring: TokenRing
    last_used: float = 0.0
    build_ms: float = 0.0
    """How long the last build took."""
    has_grown: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class Rings:
    """See the module. Owned by the event loop; builds run in the background."""

    def __init__(
        self, store: Store, background: Background, capacity: int, max_match_len: int, max_num_rings: int
    ) -> None:
        self._store = store
        self._capacity = capacity
        self._max_match_len = max_match_len
        self._max_num_rings = max_num_rings
        self._rings: dict[_Key, HeldRing] = {}  # the one that was asked last is the last
        self._background = background
        self._sort = _fast_sort()

    @property
    def held(self) -> list[HeldRing]:
        """All of them."""
        return list(self._rings.values())

    def ring_for(self, scope: Scope) -> TokenRing | None:
        """The ring of a scope; it fills from now on if it is new. None: the scope has none, or there is no room."""
        if scope.retrieval_scope is RetrievalScope.SESSION:
            return None
        tenant = ALL_TENANTS if scope.retrieval_scope is RetrievalScope.GLOBAL else scope.tenant
        key = (scope.tokenizer_hash, scope.corpus, tenant)
        held = self._rings.pop(key, None) or self._opened(key, scope)
        if held is None:
            return None
        self._rings[key] = held
        held.last_used = time.monotonic()
        return held.ring

    def drop_idle(self) -> None:
        """Drops those that nobody asks for."""
        while self._rings and self._oldest_idle_s() > IDLE_S:
            self._drop_oldest()

    async def close(self) -> None:
        """Drops all."""
        tasks = [task for held in self._rings.values() for task in held.tasks]
        while self._rings:
            self._drop_oldest()
        if tasks:
            await asyncio.wait(tasks)

    def _opened(self, key: _Key, scope: Scope) -> HeldRing | None:
        if len(self._rings) >= self._max_num_rings:
            if self._oldest_idle_s() < IN_USE_S:
                return None
            self._drop_oldest()
        held = HeldRing(*key, TokenRing(self._capacity, self._max_match_len))
        held.tasks = [
            asyncio.create_task(self._follow(held, replace(scope, session_id="", contribute=False))),
            asyncio.create_task(self._index(held)),
        ]
        for task in held.tasks:
            task.add_done_callback(_report)
        return held

    def _oldest_idle_s(self) -> float:
        return time.monotonic() - next(iter(self._rings.values())).last_used

    def _drop_oldest(self) -> None:
        held = self._rings.pop(next(iter(self._rings)))
        for task in held.tasks:
            task.cancel()

    async def _follow(self, held: HeldRing, scope: Scope) -> None:
        """Appends what comes; goes on where it was when the storage is back."""
        after = ""
        while True:
            with suppress(StoreUnavailable):
                async for document in self._store.follow_ring(scope, after):
                    after = document.entry_id
                    held.ring.append(document.token_ids)
                    if held.ring.wants_build:
                        held.has_grown.set()
                    await asyncio.sleep(0)  # a long history is no reason for others to wait
            await asyncio.sleep(RETRY_S)

    async def _index(self, held: HeldRing) -> None:
        """Builds whenever the ring wants it, and swaps the index in."""
        while True:
            await held.has_grown.wait()
            held.has_grown.clear()
            while held.ring.wants_build:
                snapshot = held.ring.snapshot()
                index, held.build_ms = await self._background.run(self._build, snapshot.tokens)
                held.ring.swap(snapshot, index)
                log.info(
                    "ring.indexed",
                    tokenizer_hash=held.tokenizer_hash,
                    corpus=held.corpus,
                    tenant=held.tenant,
                    num_tokens=len(snapshot.tokens),
                    build_ms=round(held.build_ms, 1),
                )

    def _build(self, tokens: Tokens) -> tuple[ContextIndex, float]:
        began = time.perf_counter()
        index = ContextIndex.build(tokens, self._sort)
        return index, 1000 * (time.perf_counter() - began)


def _report(task: asyncio.Task[None]) -> None:
    """Neither task ends by itself."""
    if not task.cancelled() and (error := task.exception()):
        log.error("ring.failed", exc_info=error)


def _fast_sort() -> Sort | None:
    """A full suffix array builder, if one is installed; None = numpy's sort."""
    try:
        from pydivsufsort import divsufsort
    except ImportError:
        return None
    return cast(Sort, divsufsort)
