"""The priors that this replica holds, for the time when the storage does not answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from outrider.core.local_tiers import LocalTiers
from outrider.core.ngrams import NOTHING, Continuation, TokenId
from outrider.core.params import Source
from outrider.datastore.counting import CountingFailed, count
from outrider.datastore.store import ALL_TENANTS, Limits, Prior, Scope, Store

log = structlog.get_logger(__name__)

MAX_NUM_NAMES = 1024
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
            while len(self._priors) >= MAX_NUM_NAMES:
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
