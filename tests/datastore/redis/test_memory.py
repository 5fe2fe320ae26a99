"""The memory that Redis may use, and what it evicts first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from outrider.core.params import RetrievalScope
from outrider.datastore.types import Limits
from tests.support.datastores import full_keys, load, restart
from tests.support.waiting import until

LIMITS = Limits(3, 1)


async def test_a_memory_budget_is_set_whenever_redis_is_reached(own_redis, open_store):
    store = open_store(own_redis.url, memory_budget_mb=64)
    for _ in range(2):

        async def is_reached() -> bool:
            return bool((await store.health()).product)

        await until(is_reached)
        async with Redis.from_url(own_redis.url) as redis:
            assert await redis.config_get("maxmemory*") == {
                **await redis.config_get("maxmemory-*"),
                "maxmemory": str(64 << 20),
                "maxmemory-policy": "volatile-lfu",
            }
        assert (await store.health()).max_memory_bytes == 64 << 20
        own_redis.kill()
        own_redis.start()


async def test_without_a_budget_redis_is_left_as_it_is(own_redis, open_store, scope):
    async with Redis.from_url(own_redis.url) as redis:
        await redis.config_set("maxmemory", "123456789")
        await open_store(own_redis.url).corpus_exists(scope)
        assert await redis.config_get("maxmemory", "maxmemory-policy") == {
            "maxmemory": "123456789",
            "maxmemory-policy": "noeviction",
        }


async def test_a_redis_that_refuses_its_budget_is_used_with_a_warning(own_redis, open_store, scope, capsys):
    restart(own_redis, "--rename-command", "CONFIG", "")  # as in a managed Redis
    store = open_store(own_redis.url, memory_budget_mb=64)
    assert await store.record(scope, 0, [1, 2], []) == 2
    warning = capsys.readouterr().out
    assert "redis.budget_refused" in warning
    assert "maxmemory 67108864 and maxmemory-policy volatile-lfu" in warning


@pytest.mark.slow
async def test_what_is_evicted_is_never_a_prior(own_redis, open_store, scope):
    store = open_store(own_redis.url, memory_budget_mb=16, redis_timeout_s=5.0)
    shared = replace(scope, retrieval_scope=RetrievalScope.TENANT, contribute=True)
    prior = [[5000 + i, 5001 + i] for i in range(0, 4000, 2)]
    await load(store, scope, *prior)
    # Sessions of 2000 tokens take about half a megabyte each.
    for number in range(80):
        session = replace(shared, session_id=f"session {number}", tenant=f"tenant {number}")
        await store.record(session, 0, [number * 2000 + i for i in range(2000)], [])
    health = await store.health()
    assert health.num_evicted_keys > 20
    assert health.used_memory_bytes < 18 << 20
    found = await store.lookup(scope, [[first] for first, _ in prior], LIMITS)
    assert [continuation.token_ids for continuation in found.continuations] == [(second,) for _, second in prior]
    assert len((await store.read_prior(scope.corpus_id(""))).documents) == 2000
    # A session whose tokens are gone starts over.
    first = replace(shared, session_id="session 0", tenant="tenant 0")
    position = await store.record(first, 2000, [1], [])
    assert position in (0, 2001)
    assert await store.record(first, 0, [7, 8, 9], []) >= 3


async def test_a_session_whose_tokens_were_evicted_counts_them_once(store, scope, redis_url):
    await store.record(scope, 0, [1, 2, 1, 2], [])
    async with Redis.from_url(redis_url) as redis:
        await redis.delete(*await redis.keys(full_keys(scope.tokenizer_hash) + ":tokens"))
    assert await store.record(scope, 4, [1], []) == 0
    assert await store.record(scope, 0, [1, 2, 1, 2], []) == 4
    [found] = (await store.lookup(scope, [[1]], LIMITS)).continuations
    assert (found.token_ids, found.counts) == ((2,), (2,))
