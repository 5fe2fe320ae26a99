"""What one replica answers lookups with: the storage, and what it holds itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from outrider.core.params import Source
from outrider.core.retrieval.ngrams import NOTHING, Continuation, TokenId
from outrider.core.retrieval.tiers import LocalTiers
from outrider.datastore.background import Background, CountingFailed, count
from outrider.datastore.rings import Rings
from outrider.datastore.settings import DatastoreSettings
from outrider.datastore.statistics import Statistics
from outrider.datastore.types import (
    ALL_TENANTS,
    DEFAULT_CORPUS,
    CorpusNotFound,
    Limits,
    Prior,
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


MAX_NUM_CORPORA = 1024
"""Priors that are asked about; most of them may not exist."""
IN_USE_S = 60.0
"""A prior that was used this recently is not dropped for another's sake."""

_Key = tuple[str, str, str]


@dataclass(slots=True, eq=False)
class _HeldPrior:
    scope: Scope
    tenant: str
    last_used: float
    version: str | None = None
    tiers: LocalTiers | None = None
    """With the prior alone."""


class HeldPriors:
    """Holds the priors that are looked up, each from its first lookup on. `refresh` brings them up to date."""

    def __init__(self, store: Store, max_match_len: int, max_num_priors: int) -> None:
        self._store = store
        self._max_match_len = max_match_len
        self._max_num_priors = max_num_priors
        self._priors: dict[_Key, _HeldPrior] = {}  # the one that was used last is the last

    def hold(self, scope: Scope, tenant: str) -> None:
        """This prior is used; it need not exist."""
        key = (scope.tokenizer_hash, scope.corpus, tenant)
        held = self._priors.pop(key, None)
        if held is None:
            while len(self._priors) >= MAX_NUM_CORPORA:
                del self._priors[next(iter(self._priors))]
            held = _HeldPrior(replace(scope, session_id="", contribute=False), tenant, 0.0)
        self._priors[key] = held
        held.last_used = time.monotonic()

    def lookup(self, scope: Scope, contexts: Sequence[Sequence[TokenId]], limits: Limits) -> list[Continuation]:
        """What the prior of the scope knows: the tenant's own if there is one, else that of all."""
        tiers = self._tiers(scope, scope.tenant) or self._tiers(scope, ALL_TENANTS)
        if tiers is None or Source.PRIOR not in limits.tiers:
            return [NOTHING] * len(contexts)
        lengths = limits.max_match_len, limits.max_continuation_len
        return [tiers.lookup(context, *lengths) for context in contexts]

    async def refresh(self) -> None:
        """Reads what has been loaded or deleted since the last time. Raises StoreUnavailable."""
        names = list(self._priors.values())
        if not names:
            return
        versions = await self._store.prior_versions([(held.scope, held.tenant) for held in names])
        for held, version in zip(names, versions, strict=True):
            if version is None:
                held.version = held.tiers = None
            elif version != held.version and self._has_room_for(held):
                prior = await self._store.read_prior(held.scope, held.tenant)
                held.tiers = await self._built(prior) if prior else None
                held.version = prior.version if prior else None

    def _tiers(self, scope: Scope, tenant: str) -> LocalTiers | None:
        held = self._priors.get((scope.tokenizer_hash, scope.corpus, tenant))
        return held.tiers if held else None

    def _has_room_for(self, wanted: _HeldPrior) -> bool:
        loaded = [held for held in self._priors.values() if held.tiers is not None and held is not wanted]
        if len(loaded) < self._max_num_priors:
            return True
        oldest = loaded[0]
        if time.monotonic() - oldest.last_used < IN_USE_S:
            return False
        oldest.version = oldest.tiers = None
        return True

    async def _built(self, prior: Prior) -> LocalTiers | None:
        try:
            return LocalTiers(self._max_match_len, await count(prior.documents, self._max_match_len, gives_way=True))
        except CountingFailed as error:
            log.error("prior.not_held", error=str(error))
            return None
