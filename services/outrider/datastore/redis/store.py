"""The tiers in Redis or Valkey, 7.0 or later. Layout: redis_layout.py; what Redis computes itself: ngrams.lua.

One lookup of up to CONTEXTS_PER_CALL contexts is one call of a Function, and several are one round trip. A record is
one call for every TOKENS_PER_CALL tokens, one after the other: Redis answers nobody else during a call.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import lru_cache

from outrider.core.params import Source
from outrider.core.retrieval.ngrams import FANOUT, MAX_FOLLOWERS, TokenId
from outrider.core.retrieval.prior import PriorTable
from outrider.datastore.redis import layout
from outrider.datastore.redis import prior as redis_prior
from outrider.datastore.redis import streams as redis_streams
from outrider.datastore.redis.client import RedisClient
from outrider.datastore.settings import DatastoreSettings
from outrider.datastore.types import (
    ALL_TENANTS,
    Corpus,
    Found,
    Health,
    Limits,
    Prior,
    PriorChange,
    Rejection,
    RingDocument,
    Scope,
    SharedRun,
    StoreFull,
    StoreUnavailable,
)

FANOUT_DIGITS = "".join(map(str, FANOUT))


class RedisStore:
    """Implements `Store`."""

    def __init__(self, settings: DatastoreSettings) -> None:
        """Connects with `start`, or when used."""
        self._settings = settings
        self._client = RedisClient(
            settings.redis_url,
            lookup_timeout_s=settings.lookup_timeout_ms / 1000,
            timeout_s=settings.redis_timeout_s,
            memory_budget_bytes=settings.memory_budget_mb << 20,
        )

    async def start(self) -> None:
        """Connects, if Redis is there, and again whenever it is back."""
        await self._client.start()

    async def close(self) -> None:
        await self._client.close()

    @property
    def num_errors(self) -> int:
        """Calls that Redis has not answered, or refused."""
        return self._client.num_errors

    async def lookup(self, scope: Scope, contexts: Sequence[Sequence[TokenId]], limits: Limits) -> Found:
        longest, step = self._settings.max_match_len, layout.CONTEXTS_PER_CALL
        head = _lookup_head(scope, limits, longest)
        tails = [layout.pack(context[-longest:]) for context in contexts]
        replies = await self._client.look_up([(*head, *tails[i : i + step]) for i in range(0, len(tails) or 1, step)])
        found = [layout.continuation_from(answer) for reply in replies for answer in reply[1:]]
        prior = replies[0][0]
        return Found(found, scope.tenant if prior == b"1" else ALL_TENANTS if prior == b"2" else None)

    async def corpus_exists(self, scope: Scope) -> bool:
        keys = [layout.prior_key(scope, tenant) for tenant in (scope.tenant, ALL_TENANTS)]
        return bool(await self._client.call("EXISTS", *keys))

    async def record(
        self, scope: Scope, base_len: int, accepted: Sequence[TokenId], rejections: Sequence[Rejection]
    ) -> int:
        head, limits = self._record_head(scope), self._record_limits
        starts = range(0, len(accepted), layout.TOKENS_PER_CALL) or range(1)
        firsts = range(0, len(rejections), layout.REJECTIONS_PER_CALL) or range(1)
        # One call after the other, not a pipeline: Redis would work that off in one go, and lookups would wait for it.
        for number, start in enumerate((*starts, *([len(accepted)] * (len(firsts) - 1)))):
            tokens = layout.pack(accepted[start : start + layout.TOKENS_PER_CALL])
            # Refused drafts come with the last tokens, and after them: a request that was cut off is sent again whole.
            first = (number + 1 - len(starts)) * layout.REJECTIONS_PER_CALL
            refused = rejections[first : first + layout.REJECTIONS_PER_CALL] if first >= 0 else ()
            lists = [layout.pack(part) for r in refused for part in (r.context, r.rejected, r.continuation)]
            position, is_repeated = await self._client.call(*head, base_len + start, tokens, *limits, *lists)
            is_last_token = number + 1 >= len(starts)
            if position < base_len + start or (is_repeated and is_last_token):
                break
        return int(position)

    async def end_session(self, scope: Scope, base_len: int) -> int:
        settings = self._settings
        keys = [*layout.session_keys(scope)]
        if scope.contribute and (wider := layout.wider_keys(scope)):
            keys.append(wider[2])
        piece = min(layout.PIECE_LEN, settings.ring_capacity)
        ring = (settings.ring_capacity, piece, settings.shared_ttl_s)
        return int(await self._client.call("FCALL", "outrider_end_session_2", len(keys), *keys, base_len, *ring))

    def load_prior(
        self, scope: Scope, tenant: str, documents: Sequence[Sequence[TokenId]], table: PriorTable
    ) -> AsyncGenerator[int, None]:
        return redis_prior.load(self._client, scope, tenant, documents, table)

    async def delete_prior(self, scope: Scope, tenant: str) -> None:
        await redis_prior.delete(self._client, scope, tenant, self._settings.shared_ttl_s)

    async def list_corpora(self) -> list[Corpus]:
        return await redis_prior.list_corpora(self._client)

    async def prior_versions(self, priors: Sequence[tuple[Scope, str]]) -> list[str | None]:
        return await redis_prior.versions(self._client, priors)

    async def read_prior(self, scope: Scope, tenant: str) -> Prior | None:
        return await redis_prior.read(self._client, scope, tenant)

    def follow(self, scope: Scope) -> AsyncGenerator[PriorChange | SharedRun, None]:
        return redis_streams.follow(self._client, scope)

    def follow_ring(self, scope: Scope, after: str = "") -> AsyncGenerator[RingDocument, None]:
        return redis_streams.follow_ring(self._client, scope, after)

    async def health(self) -> Health:
        try:
            info = await self._client.call("INFO")
        except (StoreUnavailable, StoreFull):
            return Health("")
        product = info.get("server_name", "redis")
        return Health(
            f"{product} {info.get(f'{product}_version', info['redis_version'])}",
            int(info["used_memory"]),
            int(info["maxmemory"]),
            int(info["evicted_keys"]),
        )

    def _record_head(self, scope: Scope) -> tuple[str | int, ...]:
        keys = layout.session_keys(scope)
        if scope.contribute and (wider := layout.wider_keys(scope)):
            keys = (*keys, *wider[:2])  # type: ignore[assignment]
        return ("FCALL", "outrider_record_2", len(keys), *keys)

    @property
    def _record_limits(self) -> tuple[int, ...]:
        of = self._settings
        shared = (of.shared_ttl_s, of.max_num_shared_ngrams, of.max_num_shared_changes)
        return (of.max_match_len, MAX_FOLLOWERS, of.session_ttl_s, of.max_session_tokens, *shared)


@lru_cache(4096)
def _lookup_head(scope: Scope, limits: Limits, longest: int) -> tuple[str | int, ...]:
    """The lookup Function, its keys, and everything but the contexts."""
    keys = [layout.prior_key(scope, scope.tenant), layout.prior_key(scope, ALL_TENANTS)]
    tiers = [Source.PRIOR, Source.PRIOR]
    rejected_at = 0
    if scope.session_id:
        keys.append(layout.session_keys(scope)[1])
        tiers.append(Source.DYNAMIC)
    if wider := layout.wider_keys(scope):
        keys.append(wider[0])
        tiers.append(Source.SHARED)
    if scope.session_id:
        keys.append(layout.session_keys(scope)[2])
        tiers.append(Source.REJECTED)
        rejected_at = len(keys)
    digits = "".join(str(tier.value if tier in limits.tiers else 0) for tier in tiers)
    lengths = (limits.max_match_len, longest, limits.max_continuation_len)
    return ("FCALL_RO", "outrider_lookup_2", len(keys), *keys, digits, rejected_at, *lengths, FANOUT_DIGITS)
