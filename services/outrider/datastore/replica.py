"""What one replica answers lookups with: the storage, and what it holds itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from outrider.core.ngrams import Continuation, TokenId
from outrider.core.params import Source
from outrider.datastore.background import Background
from outrider.datastore.held_priors import HeldPriors
from outrider.datastore.rings import Rings
from outrider.datastore.settings import DatastoreSettings
from outrider.datastore.statistics import Statistics
from outrider.datastore.store import (
    ALL_TENANTS,
    DEFAULT_CORPUS,
    CorpusNotFound,
    Limits,
    Scope,
    Store,
    StoreFull,
    StoreUnavailable,
)

log = structlog.get_logger(__name__)

UPKEEP_S = 1.0
"""Between two looks at what has changed in the storage."""
EXISTENCE_S = 5.0
"""For so long a corpus that exists is believed to exist."""
MAX_NUM_NAMES = 4096


@dataclass(frozen=True, slots=True)
class Answers:
    """To the contexts of one lookup."""

    continuations: list[Continuation]
    is_local: bool
    """Without the storage: from the priors and rings held here."""


class Replica:
    """See the module."""

    def __init__(self, store: Store, settings: DatastoreSettings) -> None:
        self.store = store
        self.statistics = Statistics()
        self._background = Background()
        self.rings = Rings(
            store,
            self._background,
            capacity=settings.ring_capacity,
            max_match_len=settings.max_ring_match_len,
            max_num_rings=settings.max_num_rings,
        )
        self._priors = HeldPriors(store, settings.max_match_len, settings.max_num_priors)
        self._max_ring_match_len = settings.max_ring_match_len
        self._existing: dict[tuple[str, str, str], float] = {}  # until when it is believed
        self._upkeep: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Keeps itself up to date from now on."""
        self._upkeep = asyncio.create_task(self._keep_up())

    async def close(self) -> None:
        """Drops everything it holds. The store stays open."""
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.wait((self._upkeep,))
        await self.rings.close()
        self._background.close()

    async def look_up(self, scope: Scope, contexts: Sequence[Sequence[TokenId]], limits: Limits) -> Answers:
        """Looks contexts up in all tiers. Never fails for want of the storage. Raises CorpusNotFound."""
        began = time.perf_counter()
        is_local = False
        try:
            found = await self.store.lookup(scope, contexts, limits)
        except StoreUnavailable:
            is_local = True
            self._priors.hold(scope, ALL_TENANTS)
            continuations = self._priors.lookup(scope, contexts, limits)
        else:
            if found.prior_tenant is not None:
                self._priors.hold(scope, found.prior_tenant)
            elif scope.corpus != DEFAULT_CORPUS:
                raise CorpusNotFound(scope)
            continuations = found.continuations
        if Source.RING in limits.tiers and (ring := self.rings.ring_for(scope)) is not None:
            for index, context in enumerate(contexts):
                # Only a longer match than the n-gram tiers' stands in front of them.
                if len(context) > continuations[index].match_len:
                    other = ring.lookup(context, self._max_ring_match_len, limits.max_continuation_len)
                    if other.match_len > continuations[index].match_len:
                        continuations[index] = other
        self.statistics.add_lookup(continuations, is_local, time.perf_counter() - began)
        return Answers(continuations, is_local)

    async def check_exists(self, scope: Scope) -> None:
        """Raises CorpusNotFound for a corpus that was named and is not there, StoreUnavailable."""
        if scope.corpus == DEFAULT_CORPUS:
            return
        key, now = (scope.tokenizer_hash, scope.corpus, scope.tenant), time.monotonic()
        if self._existing.get(key, 0) > now:
            return
        if not await self.store.corpus_exists(scope):
            raise CorpusNotFound(scope)
        while len(self._existing) >= MAX_NUM_NAMES:
            del self._existing[next(iter(self._existing))]
        self._existing[key] = now + EXISTENCE_S

    async def refresh(self) -> None:
        """Looks at the storage: its health, and what has become of the priors held here."""
        self.statistics.health = await self.store.health()
        with suppress(StoreUnavailable, StoreFull):
            await self._priors.refresh()
        self.rings.drop_idle()

    async def _keep_up(self) -> None:
        while True:
            try:
                await self.refresh()
            except Exception:
                log.exception("upkeep.failed")  # a bug; the next round may do better
            await asyncio.sleep(UPKEEP_S)
