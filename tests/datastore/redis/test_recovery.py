"""A store whose Redis goes away, hangs, is full, or has lost its data."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from redis.asyncio import Redis

from outrider.core.params import RetrievalScope
from outrider.datastore.redis import layout
from outrider.datastore.types import Limits, Rejection, StoreFull, StoreUnavailable
from outrider.v1 import datastore_pb2 as pb
from outrider_cli.local.redis import free_port
from tests.support.datastores import hung, load, look_up, query, refusal, restart

RECOVERY_S = 2.0
LIMITS = Limits(3, 4)


async def test_a_dead_redis_is_noticed_at_once_and_found_when_it_is_back(own_redis, open_store, scope):
    store = open_store(own_redis.url)
    await store.record(scope, 0, [1, 2], [])
    own_redis.kill()
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=f"Redis at 127.0.0.1:{own_redis.port} cannot be used"):
        await store.record(scope, 2, [3], [])
    assert time.monotonic() - began < 0.5
    assert (await store.health()).product == ""
    own_redis.start()  # empty: neither tokens nor Functions
    assert (await store.lookup(scope, [[1]], LIMITS)).continuations[0].match_len == 0
    await store.record(scope, 0, [1, 2], [])
    assert (await store.lookup(scope, [[1]], LIMITS)).continuations[0].token_ids == (2,)


async def test_functions_that_were_deleted_are_loaded_again(own_redis, open_store, scope):
    store = open_store(own_redis.url)
    await store.record(scope, 0, [1, 2], [])
    async with Redis.from_url(own_redis.url) as redis:
        await redis.function_flush()
        assert (await store.lookup(scope, [[1]], LIMITS)).continuations[0].token_ids == (2,)
        await redis.function_flush()
        assert await store.record(scope, 2, [3], []) == 3
        await redis.function_flush()
        await load(store, scope, [5, 6])
        assert [info.id for info in await store.list_corpora()] == [scope.corpus_id("")]
        await redis.function_flush()
        await store.delete_prior(scope.corpus_id(""))
        assert await store.list_corpora() == []
        assert await store.read_prior(scope.corpus_id("")) is None


async def test_functions_of_another_release_are_replaced(own_redis, open_store, scope):
    async with Redis.from_url(own_redis.url) as redis:
        await redis.function_load(
            "#!lua name=outrider_ngrams_4\nredis.register_function('outrider_record_4', function() return {7, 0} end)"
        )
    assert await open_store(own_redis.url).record(scope, 0, [1, 2], []) == 2


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
async def test_a_record_of_which_a_crash_left_a_part_in_the_file_is_stored_once(own_redis, open_store, scope, part):
    scope = replace(scope, retrieval_scope=RetrievalScope.TENANT, contribute=True)
    restart(own_redis, "--appendonly", "yes", "--appendfsync", "always")
    tokens = list(range(100, 160))
    store = open_store(own_redis.url)
    await store.record(scope, 0, tokens[:20], [])
    log = await log_of(own_redis.url)
    whole = log.stat().st_size
    await store.record(scope, 20, tokens[20:40], [])
    own_redis.kill()
    os.truncate(log, whole + int(part * (log.stat().st_size - whole)))
    own_redis.start()
    store = open_store(own_redis.url)
    for end in (40, 60):  # the first time, what the killed Redis had not kept
        assert await store.record(scope, 20, tokens[20:end], []) == end
    own_redis.kill()
    own_redis.start()
    async with Redis.from_url(own_redis.url) as redis:
        assert layout.unpack(await redis.get(layout.session_keys(scope).tokens)).tolist() == tokens
        runs = [entry[b"tokens"] for _, entry in await redis.xrange(layout.shared_keys(scope).changes)]
    assert layout.unpack(b"".join(runs)).tolist() == tokens
    found = (await open_store(own_redis.url).lookup(scope, [tokens[18:21]], LIMITS)).continuations[0]
    assert found.token_ids == tuple(tokens[21:25])
    assert found.counts == (1, 1, 1, 1)


async def log_of(url: str) -> Path:
    """Returns the append-only file that is being written."""
    async with Redis.from_url(url) as redis:
        config = await redis.config_get("dir", "appenddirname")
    [log] = (Path(config["dir"]) / config["appenddirname"]).glob("*.incr.aof")
    return log


@pytest.mark.slow
async def test_a_redis_that_hangs_is_given_up_after_the_timeout(own_redis, open_store, scope):
    store = open_store(own_redis.url, redis_timeout_s=0.1, lookup_timeout_ms=20)
    await store.start()
    await store.record(scope, 0, [1, 2], [])
    await store.lookup(scope, [[1]], LIMITS)
    with hung(own_redis):
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="in time"):
            await store.record(scope, 2, [3], [])
        with pytest.raises(StoreUnavailable, match="in time"):
            await store.lookup(scope, [[1]], LIMITS)
        with pytest.raises(StoreUnavailable, match="does not answer"):
            await store.lookup(scope, [[1]], LIMITS)
        assert time.monotonic() - began < 1
    async with asyncio.timeout(RECOVERY_S):
        while not await finds(store, scope):  # noqa: ASYNC110 - another process is awaited
            await asyncio.sleep(0.005)


async def finds(store, scope) -> bool:
    try:
        return (await store.lookup(scope, [[1]], LIMITS)).continuations[0].token_ids[0] == 2
    except StoreUnavailable:
        return False


async def test_a_store_can_be_made_before_its_redis_is_there(open_store, scope):
    store = open_store(f"redis://:secret@127.0.0.1:{free_port()}/0")
    with pytest.raises(StoreUnavailable) as caught:
        await store.lookup(scope, [[1]], LIMITS)
    assert "secret" not in str(caught.value)


async def test_a_full_redis_refuses_records_but_answers_and_ends_sessions(own_redis, open_store, scope):
    store = open_store(own_redis.url)
    scope = replace(scope, retrieval_scope=RetrievalScope.TENANT, contribute=True)
    await store.record(scope, 0, [1, 2], [])
    await load(store, scope, [5, 6])
    async with Redis.from_url(own_redis.url) as redis:
        await redis.config_set("maxmemory", "1")
        with pytest.raises(StoreFull, match="maxmemory"):
            await store.record(scope, 2, [3, 4], [Rejection([1], [2, 3])])
        with pytest.raises(StoreFull, match="maxmemory"):
            await load(store, scope, [8, 9])
        found = await store.lookup(scope, [[1], [5]], LIMITS)
        assert [continuation.token_ids for continuation in found.continuations] == [(2,), (6,)]
        assert await store.end_session(scope, 2) == 2
        await store.delete_prior(scope.corpus_id(""))


async def test_a_full_redis_is_a_status_of_its_own(own_redis, serve, scope):
    named = pb.Scope(tokenizer_hash=scope.tokenizer_hash, session_id="s")
    served = await serve(own_redis.url)
    async with Redis.from_url(own_redis.url) as redis:
        await redis.config_set("maxmemory", "1")
        code, details = await refusal(
            served.stub.Record(iter([pb.RecordRequest(scope=named, accepted_token_ids=[1, 2])]))
        )
    assert (code, "is full" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    [response] = await look_up(served.stub, pb.LookupRequest(scope=named, queries=[query(1)]))
    assert not response.is_local
