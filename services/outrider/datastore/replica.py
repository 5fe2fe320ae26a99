"""One replica of the datastore: answers from Redis, or, while Redis is away, from the priors and rings that it
holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from outrider.core.params import Source
from outrider.core.retrieval.ngrams import NOTHING, Continuation, TokenId
from outrider.core.retrieval.tiers import LocalTiers
from outrider.datastore.background import Background, CountingFailed, count
from outrider.datastore.metrics import ReplicaStatistics
from outrider.datastore.redis.store import RedisStore
from outrider.datastore.rings import Rings
from outrider.datastore.settings import DatastoreSettings
from outrider.datastore.types import (
    ALL_TENANTS,
    DEFAULT_CORPUS,
    CorpusId,
    CorpusNotFound,
    Limits,
    LookupCommand,
    Prior,
    RecordCommand,
    Scope,
    StoreFull,
    StoreUnavailable,
)
from outrider.telemetry.tasks import end, keep_running

log = structlog.get_logger(__name__)

UPKEEP_S = 1.0
"""Time between two refreshes of the priors and rings held here."""
EXISTENCE_S = 5.0
"""Time for which the existence of a corpus is cached: a record need not ask Redis every time."""
MAX_NUM_EXISTING_CORPORA = 4096
"""Most corpora whose existence is cached."""
MAX_NUM_PRIOR_IDS = 1024
"""Most priors that Redis is asked about in a refresh. Most of them may not exist: each new tenant adds one."""
IN_USE_S = 60.0
"""Time after a lookup in which a prior is not dropped to make room for another."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers the contexts of one lookup from all tiers, in order."""

    continuations: list[Continuation]
    is_local: bool
    """True if they come from the priors and rings held here, as Redis did not answer."""


class Replica:
    """Answers lookups and records what verifiers report. Owned by the event loop."""

    def __init__(self, store: RedisStore, settings: DatastoreSettings) -> None:
        self.store = store
        self.statistics = ReplicaStatistics()
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
        self._existing: dict[CorpusId, float] = {}
        """Times, by `time.monotonic`, until which the existence of corpora is cached, by corpus and tenant."""
        self._upkeep: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Refreshes itself from now on."""
        self._upkeep = keep_running("upkeep", self._refresh_for_ever)

    async def close(self) -> None:
        """Drops everything that is held here. The store stays open."""
        if self._upkeep is not None:
            await end(self._upkeep)
        await self.rings.close()
        self._background.close()

    async def look_up(self, command: LookupCommand) -> Answers:
        """Looks contexts up in all tiers. Answers without Redis, too. Raises CorpusNotFound."""
        began = time.perf_counter()
        scope, contexts, limits = command.scope, command.contexts, command.limits
        is_local = False
        try:
            answer = await self.store.lookup(scope, contexts, limits)
        except StoreUnavailable:
            is_local = True
            self._priors.hold(scope.corpus_id(ALL_TENANTS))
            continuations = self._priors.lookup(scope, contexts, limits)
        else:
            if answer.prior is not None:
                self._priors.hold(answer.prior)
            elif scope.corpus != DEFAULT_CORPUS:
                raise CorpusNotFound(scope.tokenizer_hash, scope.corpus)
            continuations = answer.continuations
        if Source.RING in limits.tiers and (ring := self.rings.ring_for(scope)) is not None:
            for index, context in enumerate(contexts):
                # At equal match length the n-gram tiers win: the ring is asked only if the context is longer than their
                # match.
                if len(context) > continuations[index].match_len:
                    lengths = self._max_ring_match_len, limits.max_continuation_len
                    other = ring.lookup(context, *lengths, whole_runs=limits.whole_runs)
                    if other.match_len > continuations[index].match_len:
                        continuations[index] = other
        self.statistics.add_lookup(continuations, is_local, time.perf_counter() - began)
        return Answers(continuations, is_local)

    async def record(self, command: RecordCommand) -> int:
        """Stores what a verifier reports of a session.

        Returns:
            The session's position afterwards. If it is less than the command's base_len, nothing is stored.

        Raises:
            CorpusNotFound: The scope names a corpus that is not there.
            StoreUnavailable: Redis cannot be reached.
            StoreFull: Redis has no memory left.
        """
        scope, base_len = command.scope, command.base_len
        await self.check_exists(scope)
        position = end = base_len + len(command.accepted)
        # A request that only ends a session needs no record: `end_session` compares the position itself.
        if command.accepted or command.rejections or not command.ends_session:
            position = await self.store.record(scope, base_len, command.accepted, command.rejections)
        if position >= base_len:  # else the whole request is sent again, and counts then
            self.statistics.add_accepted(command.accepted_by_tier)
        # With a gap the session goes on: its caller sends the missing tokens, and the end again.
        if command.ends_session and position == end:
            position = await self.store.end_session(scope, end)
        return position

    async def check_exists(self, scope: Scope) -> None:
        """Raises CorpusNotFound if the corpus that the scope names does not exist, or StoreUnavailable."""
        if scope.corpus == DEFAULT_CORPUS:
            return
        corpus, now = scope.corpus_id(scope.tenant), time.monotonic()
        if self._existing.get(corpus, 0) > now:
            return
        # Only existence is cached: a corpus that is loaded now is found by the next request.
        if not await self.store.corpus_exists(scope):
            raise CorpusNotFound(scope.tokenizer_hash, scope.corpus)
        while len(self._existing) >= MAX_NUM_EXISTING_CORPORA:
            del self._existing[next(iter(self._existing))]
        self._existing[corpus] = now + EXISTENCE_S

    async def refresh(self) -> None:
        """Reads the health of Redis, updates the priors held here, and drops idle rings."""
        self.statistics.health = await self.store.health()
        with suppress(StoreUnavailable, StoreFull):
            await self._priors.refresh()
        self.rings.drop_idle()

    async def _refresh_for_ever(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(UPKEEP_S)


@dataclass(slots=True, eq=False)
class _HeldPrior:
    id: CorpusId
    last_used: float = 0.0
    """Time of the last use, by `time.monotonic`."""
    version: str | None = None
    tiers: LocalTiers | None = None
    """Tiers with the prior alone. None means that the prior does not exist, was not read yet, or was dropped to make
    room."""


class HeldPriors:
    """Holds priors, each from its first lookup on. `refresh` updates them."""

    def __init__(self, store: RedisStore, max_match_len: int, max_num_priors: int) -> None:
        self._store = store
        self._max_match_len = max_match_len
        self._max_num_priors = max_num_priors
        self._priors: dict[CorpusId, _HeldPrior] = {}  # the one that was looked up last is the last

    def hold(self, corpus: CorpusId) -> None:
        """Notes that a prior was looked up. It need not exist."""
        held = self._priors.pop(corpus, None)
        if held is None:
            while len(self._priors) >= MAX_NUM_PRIOR_IDS:
                del self._priors[next(iter(self._priors))]
            held = _HeldPrior(corpus)
        self._priors[corpus] = held
        held.last_used = time.monotonic()

    def lookup(self, scope: Scope, contexts: Sequence[Sequence[TokenId]], limits: Limits) -> list[Continuation]:
        """Looks contexts up in the prior of the scope: the tenant's own if it is held, else that of all tenants."""
        held = [self._priors[corpus].tiers for corpus in scope.corpus_ids if corpus in self._priors]
        tiers = next(filter(None, held), None)
        if tiers is None or Source.PRIOR not in limits.tiers:
            return [NOTHING] * len(contexts)
        lengths = limits.max_match_len, limits.max_continuation_len
        return [tiers.lookup(context, *lengths) for context in contexts]

    async def refresh(self) -> None:
        """Updates the priors that were loaded or deleted since the last call. Raises StoreUnavailable."""
        priors = list(self._priors.values())  # a copy: lookups change the dict while this waits for Redis
        if not priors:
            return
        versions = await self._store.prior_versions([held.id for held in priors])
        for held, version in zip(priors, versions, strict=True):
            if version is None:
                held.version = held.tiers = None
            elif version != held.version and self._has_room_for(held):
                prior = await self._store.read_prior(held.id)
                held.tiers = await self._build(prior) if prior else None
                held.version = prior.version if prior else None

    def _has_room_for(self, wanted: _HeldPrior) -> bool:
        """Returns True if one more prior may be held, after dropping the least recently used one if necessary."""
        loaded = [held for held in self._priors.values() if held.tiers is not None and held is not wanted]
        if len(loaded) < self._max_num_priors:
            return True
        # There is one, as max_num_priors is at least 1, and `_priors` is in the order of the last lookup.
        oldest = loaded[0]
        # The oldest is not dropped for one that was used still earlier: the two would be read and counted in turn, at
        # every refresh.
        if oldest.last_used >= wanted.last_used or time.monotonic() - oldest.last_used < IN_USE_S:
            return False
        oldest.version = oldest.tiers = None
        return True

    async def _build(self, prior: Prior) -> LocalTiers | None:
        try:
            return LocalTiers(self._max_match_len, await count(prior.documents, self._max_match_len, gives_way=True))
        except CountingFailed as error:
            # Lookups in Redis go on. The version is kept nevertheless, so that it is not tried again every second.
            log.error("prior.not_held", error=str(error))
            return None
