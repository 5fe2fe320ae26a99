"""Rings: the tokens of ended sessions, copied by every replica."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
from redis.asyncio import Redis

from outrider.core.params import RetrievalScope
from outrider.datastore import rings as rings_module
from outrider.datastore.background import Background
from outrider.datastore.rings import Rings
from outrider.datastore.types import Scope
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import types_pb2
from tests.support.datastores import full_keys, load_prior, look_up, query, record, sequence
from tests.support.waiting import until


@pytest.fixture
def scope(scope) -> Scope:
    return replace(scope, retrieval_scope=RetrievalScope.TENANT, contribute=True)


@pytest.fixture
def background() -> Iterator[Background]:
    background = Background()
    yield background
    background.close()


async def say(store, scope: Scope, session_id: str, *token_ids: int) -> None:
    """A session that records tokens and ends."""
    scope = replace(scope, session_id=session_id)
    assert await store.record(scope, 0, token_ids, []) == len(token_ids)
    assert await store.end_session(scope, len(token_ids)) == len(token_ids)


async def entries_of(redis_url: str, scope: Scope) -> list[tuple[int, int, int]]:
    """End, open, and number of tokens of each entry of a tokenizer's only ring."""
    async with Redis.from_url(redis_url) as redis:
        keys = await redis.keys(full_keys(scope.tokenizer_hash) + ":ring")
        found = await redis.xrange(keys[0]) if keys else []
    return [(int(e[b"end"]), int(e[b"open"]), len(e[b"tokens"]) // 4) for _, e in found]


async def test_an_ended_session_is_found_by_the_next_with_a_longer_match(served, redis_url, scope):
    stub = served.stub
    named = pb.Scope(
        tokenizer_hash=scope.tokenizer_hash,
        session_id="next",
        retrieval_scope=types_pb2.RETRIEVAL_SCOPE_TENANT,
        contribute=True,
    )
    text = [1, 2, 3, 4, 5, 6, 7]
    ended = pb.Scope.FromString(named.SerializeToString())
    ended.session_id = "ended"
    await record(stub, pb.RecordRequest(scope=ended, accepted_token_ids=text, end_session=True))
    request = pb.LookupRequest(scope=named, queries=[pb.Query(context_token_ids=text[:5])])

    async def answer() -> pb.LookupResult | None:
        [response] = await look_up(stub, request)
        [result] = response.results
        return result if result.tier == types_pb2.SOURCE_RING else None

    result = await until(answer)
    assert (result.match_len, list(result.token_ids), list(result.counts)) == (5, [6, 7], [1, 1])
    # Three tokens: the n-gram tiers know them as well, and come first.
    short = pb.LookupRequest(scope=named, queries=[query(9, 1, 2, 3)])
    [response] = await look_up(stub, short)
    assert (response.results[0].match_len, response.results[0].tier) == (3, types_pb2.SOURCE_SHARED)
    [info] = (await stub.GetInfo(pb.DatastoreServiceGetInfoRequest())).rings
    assert (info.tokenizer_hash, info.corpus, info.tenant) == (scope.tokenizer_hash, "default", "default")
    assert (info.num_tokens, info.num_indexed_tokens) == (8, 0)


async def test_a_ring_begins_with_what_is_there_and_follows_what_comes(store, scope, background):
    await say(store, scope, "one", 1, 2, 3)
    rings = Rings(store, background, 1024, 10, 8)
    ring = rings.ring_for(scope)
    await until(lambda: ring.num_tokens >= 4)
    await say(store, scope, "two", 4, 5, 6)
    await until(lambda: ring.num_tokens >= 8)
    assert [ring.lookup([token], 10, 4).token_ids for token in (1, 4)] == [(2, 3), (5, 6)]
    assert rings.ring_for(replace(scope, session_id="other")) is ring
    await rings.close()


async def test_what_two_replicas_hold_is_the_same(serve, redis_url, scope):
    one, two = await serve(redis_url), await serve(redis_url)
    named = pb.Scope(
        tokenizer_hash=scope.tokenizer_hash,
        session_id="s",
        retrieval_scope=types_pb2.RETRIEVAL_SCOPE_GLOBAL,
        contribute=True,
    )
    prior = pb.LoadPriorRequest(scope=pb.Scope(tokenizer_hash=scope.tokenizer_hash), documents=[sequence(70, 71)])
    await load_prior(two.stub, prior)
    await record(one.stub, pb.RecordRequest(scope=named, accepted_token_ids=[1, 2, 3, 4, 5]))
    # The session continues, and ends, at the other replica.
    assert await record(two.stub, pb.RecordRequest(scope=named, base_len=5, accepted_token_ids=[6])) == [6]
    assert await tiers_after(two, named, [5]) == [types_pb2.SOURCE_DYNAMIC]
    assert await record(two.stub, pb.RecordRequest(scope=named, base_len=6, end_session=True)) == [6]
    for served in (one, two):

        async def is_ring(served=served) -> bool:
            return await tiers_after(served, named, [1, 2, 3, 4]) == [types_pb2.SOURCE_RING]

        await until(is_ring)
        assert await tiers_after(served, named, [70], [5]) == [types_pb2.SOURCE_PRIOR, types_pb2.SOURCE_SHARED]


async def tiers_after(served, scope: pb.Scope, *contexts: list[int]) -> list[int]:
    """The tiers that answer."""
    queries = [pb.Query(context_token_ids=context) for context in contexts]
    [response] = await look_up(served.stub, pb.LookupRequest(scope=scope, queries=queries))
    return [result.tier for result in response.results]


async def test_a_ring_is_indexed_in_the_background_with_equal_answers(store, scope, background):
    text = np.random.default_rng(7).integers(0, 50, 6000).tolist()
    rings = Rings(store, background, 1 << 14, 10, 8)
    ring = rings.ring_for(scope)
    await say(store, scope, "long", *text)
    await until(lambda: ring.num_tokens >= 6001)
    contexts = [text[i : i + 10] for i in range(0, 5900, 100)]
    await until(lambda: ring.num_indexed_tokens == 6001)
    [held] = rings.held
    assert held.build_ms > 0
    for start, context in zip(range(0, 5900, 100), contexts, strict=True):
        found = ring.lookup(context, 10, 5)
        assert (found.match_len, found.token_ids[:5]) == (10, tuple(text[start + 10 : start + 15]))
    await rings.close()


async def test_a_document_longer_than_an_entry_is_one_document(store, scope, redis_url, monkeypatch):
    monkeypatch.setattr("outrider.datastore.redis.layout.RING_ENTRY_TOKENS", 4)
    await say(store, scope, "long", *range(1, 11))
    assert await entries_of(redis_url, scope) == [(4, 1, 4), (8, 1, 4), (10, 0, 2)]
    async with aclosing(store.follow_ring(scope)) as ring:
        document = await anext(ring)
    assert list(document.token_ids) == list(range(1, 11))


async def test_the_oldest_entries_make_room(open_store, redis_url, scope):
    store = open_store(redis_url, ring_capacity=1024)
    for number in range(5):
        await say(store, scope, f"{number}", *range(300))
    assert await entries_of(redis_url, scope) == [(900, 0, 300), (1200, 0, 300), (1500, 0, 300)]
    await say(store, scope, "longer than the ring", *range(1100))
    assert await entries_of(redis_url, scope) == [(2524, 0, 1024)]


async def test_a_ring_whose_stream_was_evicted_begins_again(store, scope, redis_url):
    await say(store, scope, "one", 1, 2, 3)
    async with Redis.from_url(redis_url) as redis:
        [key] = await redis.keys(full_keys(scope.tokenizer_hash) + ":ring")
        await redis.delete(key)
    await say(store, scope, "two", 4, 5)
    assert await entries_of(redis_url, scope) == [(2, 0, 2)]


async def test_rings_are_limited_and_do_not_push_each_other_out(store, scope, background, monkeypatch):
    rings = Rings(store, background, 1024, 10, 2)
    one, two, three = (replace(scope, tenant=name) for name in ("one", "two", "three"))
    first = rings.ring_for(one)
    assert rings.ring_for(two) is not None
    assert rings.ring_for(three) is None
    monkeypatch.setattr(rings_module, "IN_USE_S", 0.0)
    assert rings.ring_for(two) is not None
    assert rings.ring_for(three) is not None
    assert {held.id.tenant for held in rings.held} == {"two", "three"}
    assert rings.ring_for(one) is not first
    monkeypatch.setattr(rings_module, "IDLE_S", -1.0)
    rings.drop_idle()
    assert rings.held == []
    await rings.close()
