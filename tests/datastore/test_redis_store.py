"""The store on a real Redis, against the reference of the tiers."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from outrider.core.ngrams import MAX_FOLLOWERS, NOTHING, NgramTier, NgramTiers
from outrider.core.params import InvalidParameter, Source
from outrider.datastore.redis_store import LOADING_TTL_S, TOKENS_PER_CALL
from outrider.datastore.store import Corpus, CorpusNotFound, Rejection, StoreUnavailable
from outrider_client.local_redis import free_port

MAX_MATCH_LEN = 3

numbers = itertools.count()

token = st.integers(0, 2) | st.integers(0, MAX_FOLLOWERS + 2) | st.sampled_from([255, 256, 2**31 - 1])
run = st.lists(token, min_size=1, max_size=6)
documents = st.lists(st.lists(token, max_size=20), max_size=3)
step = (
    st.tuples(st.just("accept"), st.lists(token, max_size=20))
    | st.tuples(st.just("reject"), run, run, run)
    | st.tuples(st.just("lookup"), st.lists(run, max_size=3), st.integers(1, MAX_MATCH_LEN), st.integers(1, 8))
)


async def each(*documents: list[int]) -> AsyncIterator[list[int]]:
    for document in documents:
        yield document


async def keys_of(redis_url: str, scope) -> list[bytes]:
    """All keys of the scope's tokenizer."""
    async with Redis.from_url(redis_url) as redis:
        return [key async for key in redis.scan_iter(f"*{scope.tokenizer_hash.removeprefix('test ')}*")]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prior=documents, steps=st.lists(step, max_size=8))
async def test_answers_as_the_reference_does_whatever_was_recorded(store, scope, prior, steps):
    tiers = NgramTiers(MAX_MATCH_LEN, prior=NgramTier(MAX_MATCH_LEN))
    scope = replace(scope, session_id=f"session {next(numbers)}", corpus=f"corpus {next(numbers)}")
    if any(len(document) > 1 for document in prior):
        await store.load_prior(scope, each(*prior))
        for document in prior:
            tiers.prior.learn(document)
    for kind, *values in steps:
        if kind == "accept":
            await store.record(scope, values[0], [])
            tiers.record(values[0])
        elif kind == "reject":
            await store.record(scope, [], [Rejection(*values)])
            tiers.reject(*values)
        else:
            found = await store.lookup(scope, *values)
            assert found == [tiers.lookup(context, *values[1:]) for context in values[0]]


async def test_a_record_longer_than_one_call_is_one_stream(store, scope):
    stream = [i * i % 97 for i in range(3 * TOKENS_PER_CALL + 5)]
    tiers = NgramTiers(MAX_MATCH_LEN)
    await store.record(scope, stream, [])
    tiers.record(stream)
    contexts = [stream[end - 3 : end] for end in range(3, len(stream))]
    assert await store.lookup(scope, contexts, 3, 4) == [tiers.lookup(context, 3, 4) for context in contexts]


async def test_a_document_longer_than_one_call_is_one_run(store, scope):
    document = [i * i % 97 for i in range(3 * TOKENS_PER_CALL + 5)]
    tiers = NgramTiers(MAX_MATCH_LEN)
    assert await store.load_prior(scope, each(document)) == len(document)
    tiers.prior.learn(document)
    contexts = [document[end - 3 : end] for end in range(3, len(document))]
    assert await store.lookup(scope, contexts, 3, 4) == [tiers.lookup(context, 3, 4) for context in contexts]


async def test_more_followers_than_are_kept_push_out_the_least_counted(store, scope, redis_url):
    tiers = NgramTiers(MAX_MATCH_LEN)
    for follower in [*range(1, MAX_FOLLOWERS + 1), 1, 2, *range(90, 96), 3, 1]:
        await store.record(scope, [0, follower], [])
        tiers.record([0, follower])
    for ends in ([0], *([0, follower] for follower in range(100))):
        assert await store.lookup(scope, [ends], 3, 8) == [tiers.lookup(ends, 3, 8)]
    async with Redis.from_url(redis_url) as redis:
        lengths = [len(await redis.hget(key, bytes(4))) for key in await keys_of(redis_url, scope)]
    assert lengths == [8 * MAX_FOLLOWERS]


async def test_what_the_target_refused_is_not_taken_from_the_prior_again(store, scope):
    await store.load_prior(scope, each([3, 1, 2, 50], [3, 1, 2, 50], [3, 1, 2, 60]))
    assert (await store.lookup(scope, [[1, 2]], 3, 1))[0].token_ids == (50, 60)
    await store.record(scope, [], [Rejection([4, 4, 3, 1, 2], [50, 51], [70])])
    refused, elsewhere = await store.lookup(scope, [[9, 3, 1, 2], [9, 1, 2]], 3, 1)
    assert (refused.tier, refused.token_ids) == (Source.PRIOR, (60,))
    assert elsewhere.token_ids == (50, 60)
    await store.record(scope, [], [Rejection([3, 1, 2], [60], [71])])
    [refused] = await store.lookup(scope, [[3, 1, 2]], 2, 1)
    assert refused.tier is Source.PRIOR  # marked after three tokens, and asked about two
    [refused] = await store.lookup(scope, [[3, 1, 2]], 3, 1)
    assert (refused.tier, refused.token_ids) == (Source.REJECTED, (71, 70))


async def test_sessions_do_not_see_one_anothers_tokens(store, scope):
    await store.record(scope, [1, 2, 3], [Rejection([5], [6], [7])])
    for other in (
        replace(scope, session_id="another"),
        replace(scope, session_id=""),
        replace(scope, corpus="another"),
        replace(scope, tokenizer_hash=scope.tokenizer_hash + "x"),
    ):
        assert await store.lookup(other, [[1, 2], [5]], 3, 4) == [NOTHING, NOTHING]


async def test_names_cannot_reach_into_another_scope(store, scope):
    """Each pair would share keys if the names were put together as they are."""
    plain = replace(scope, session_id="a", corpus="b")
    await store.record(plain, [1, 2], [])
    await store.load_prior(plain, each([1, 2]))
    for session_id, corpus in (("a", "b}:s:a"), ("a:dynamic", "b"), ("", "b:s"), ("é{}", "%62"), ("a", "B")):
        other = replace(scope, session_id=session_id, corpus=corpus)
        tiers = [found.tier for found in await store.lookup(other, [[1]], 3, 4)]
        assert tiers == [Source.PRIOR if corpus == "b" else None]


async def test_sessions_share_the_prior_of_their_corpus(store, scope):
    await store.load_prior(scope, each([1, 2, 3]))
    for session_id in ("one", "two", ""):
        [found] = await store.lookup(replace(scope, session_id=session_id), [[1]], 3, 4)
        assert (found.tier, found.token_ids) == (Source.PRIOR, (2, 3))


async def test_ending_a_session_leaves_none_of_its_keys(store, scope, redis_url):
    await store.record(scope, [1, 2, 3], [Rejection([5], [6], [7])])
    await store.record(replace(scope, session_id="another"), [1, 2, 3], [])
    assert len(await keys_of(redis_url, scope)) == 3
    await store.end_session(scope)
    assert len(await keys_of(redis_url, scope)) == 1
    assert await store.lookup(scope, [[1]], 3, 4) == [NOTHING]


async def test_a_session_expires_and_the_prior_does_not(store, scope, redis_url):
    await store.record(scope, [1, 2, 3], [Rejection([5], [6], [7])])
    await store.load_prior(scope, each([1, 2]))
    async with Redis.from_url(redis_url) as redis:
        ttl_by_tier = {key.decode().rpartition(":")[2]: await redis.ttl(key) for key in await keys_of(redis_url, scope)}
    assert ttl_by_tier == {"dynamic": 60, "rejected": 60, "prior": -1}


async def test_loading_a_prior_replaces_the_one_of_that_name(store, scope, redis_url):
    await store.load_prior(scope, each([1, 2]))
    await store.load_prior(scope, each([1, 3], [4, 5]))
    [found] = await store.lookup(scope, [[1]], 3, 4)
    assert found.token_ids == (3,)
    assert Corpus(scope.tokenizer_hash, "default", 4) in await store.list_corpora()
    assert len(await keys_of(redis_url, scope)) == 1


async def test_a_prior_whose_loading_fails_leaves_the_former_one(store, scope, redis_url):
    async def broken() -> AsyncIterator[list[int]]:
        yield [1, 3]
        assert len(await keys_of(redis_url, scope)) == 2
        raise ValueError("the caller hung up")

    await store.load_prior(scope, each([1, 2]))
    with pytest.raises(ValueError, match="hung up"):
        await store.load_prior(scope, broken())
    [found] = await store.lookup(scope, [[1]], 3, 4)
    assert found.token_ids == (2,)
    assert len(await keys_of(redis_url, scope)) == 1


async def test_a_prior_that_is_being_loaded_expires_if_nobody_goes_on(store, scope, redis_url):
    async def watched() -> AsyncIterator[list[int]]:
        yield [1, 2]
        [key] = await keys_of(redis_url, scope)
        async with Redis.from_url(redis_url) as redis:
            assert 0 < await redis.ttl(key) <= LOADING_TTL_S

    await store.load_prior(scope, watched())


async def test_a_corpus_without_any_ngram_is_refused(store, scope):
    with pytest.raises(InvalidParameter, match="documents must be runs of two tokens or more, got 2 tokens"):
        await store.load_prior(scope, each([1], [2]))


async def test_a_deleted_corpus_is_gone_and_cannot_be_deleted_again(store, scope):
    await store.load_prior(scope, each([1, 2]))
    await store.delete_corpus(scope)
    assert await store.lookup(scope, [[1]], 3, 4) == [NOTHING]
    assert scope.tokenizer_hash not in [corpus.tokenizer_hash for corpus in await store.list_corpora()]
    with pytest.raises(CorpusNotFound, match="no corpus 'default'"):
        await store.delete_corpus(scope)


async def test_says_what_it_stores_in(store):
    product, version = (await store.describe()).split()
    assert product in ("redis", "valkey")
    assert version[0].isdigit()


async def test_a_dead_redis_is_noticed_at_once_and_found_again_when_it_is_back(own_redis, open_store, scope):
    store = open_store(own_redis.url)
    await store.record(scope, [1, 2], [])
    own_redis.kill()
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=f"Redis at 127.0.0.1:{own_redis.port} cannot be used"):
        await store.lookup(scope, [[1]], 3, 4)
    assert time.monotonic() - began < 0.5
    with pytest.raises(StoreUnavailable):
        await store.describe()
    own_redis.start()  # empty: neither tokens nor Functions
    assert await store.lookup(scope, [[1]], 3, 4) == [NOTHING]
    await store.record(scope, [1, 2], [])
    assert [found.token_ids for found in await store.lookup(scope, [[1]], 3, 4)] == [(2,)]


async def test_a_redis_that_hangs_is_given_up_after_the_timeout(own_redis, open_store, scope):
    store = open_store(own_redis.url, timeout_s=0.05)
    await store.record(scope, [1, 2], [])
    async with Redis.from_url(own_redis.url) as redis:
        await redis.client_pause(10_000)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="Timeout"):
        await store.lookup(scope, [[1]], 3, 4)
    assert time.monotonic() - began < 1


async def test_a_store_can_be_made_before_its_redis_is_there(open_store, scope):
    store = open_store(f"redis://:secret@127.0.0.1:{free_port()}/0")
    with pytest.raises(StoreUnavailable) as caught:
        await store.lookup(scope, [[1]], 3, 4)
    assert "secret" not in str(caught.value)


async def test_a_full_redis_is_unavailable_for_records_and_still_answers(own_redis, open_store, scope):
    store = open_store(own_redis.url)
    await store.record(scope, [1, 2], [])
    async with Redis.from_url(own_redis.url) as redis:
        await redis.config_set("maxmemory", "1")
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            await store.record(scope, [3, 4], [])
        assert [found.token_ids for found in await store.lookup(scope, [[1]], 3, 4)] == [(2,)]
