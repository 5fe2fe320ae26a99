"""The tiers in a real Redis, against their reference."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from outrider.core.params import RetrievalScope, Source
from outrider.core.retrieval.ngrams import MAX_FOLLOWERS, NOTHING, NgramTier
from outrider.core.retrieval.prior import PriorTable
from outrider.core.retrieval.tiers import LocalTiers
from outrider.datastore.redis.layout import CONTEXTS_PER_CALL, REJECTIONS_PER_CALL, TOKENS_PER_CALL
from outrider.datastore.types import NGRAM_TIERS, Limits, Rejection
from tests.support.datastores import full_keys, keys_of, load

MAX_MATCH_LEN = 3
LIMITS = Limits(3, 4)

numbers = itertools.count()

token = st.integers(0, 2) | st.integers(0, MAX_FOLLOWERS + 2) | st.sampled_from([255, 256, 2**31 - 1])
run = st.lists(token, min_size=1, max_size=6)
documents = st.lists(st.lists(token, max_size=20), max_size=3)
tiers = st.just(frozenset(NGRAM_TIERS)) | st.frozensets(st.sampled_from(NGRAM_TIERS), min_size=1)
step = (
    # How far the tokens begin before the end of the stream (a request sent again) or after it (one was lost).
    st.tuples(st.just("accept"), st.integers(-6, 3), st.lists(token, max_size=20))
    | st.tuples(st.just("reject"), run, run)
    | st.tuples(st.just("other"), run)
    | st.tuples(st.just("lookup"), st.lists(run, max_size=3), st.integers(1, MAX_MATCH_LEN), st.integers(1, 8), tiers)
)


class Reference:
    """The right answers to a session: the reference of the tiers, and the stream as the session knows it."""

    def __init__(self, prior: list[list[int]]) -> None:
        self.stream: list[int] = []
        self.shared = NgramTier(MAX_MATCH_LEN)
        self.tiers = LocalTiers(MAX_MATCH_LEN, PriorTable.build(prior, MAX_MATCH_LEN), self.shared)

    def accept(self, base_len: int, token_ids: list[int]) -> None:
        added = token_ids[len(self.stream) - base_len :] if base_len <= len(self.stream) else []
        tail = self.stream[-MAX_MATCH_LEN:]
        self.tiers.record(added)
        self.shared.learn([*tail, *added], len(tail))
        self.stream += added

    def lookup(self, context, max_match_len, max_continuation_len, searched):
        """Looks up as if the tiers that are not searched were empty."""
        all_tiers = LocalTiers(MAX_MATCH_LEN, self.tiers.prior, self.shared)
        empty = NgramTier(MAX_MATCH_LEN)
        all_tiers.prior = self.tiers.prior if Source.PRIOR in searched else None
        all_tiers.shared = self.shared if Source.SHARED in searched else None
        all_tiers.dynamic = self.tiers.dynamic if Source.DYNAMIC in searched else empty
        all_tiers.rejected = self.tiers.rejected if Source.REJECTED in searched else empty
        return all_tiers.lookup(context, max_match_len, max_continuation_len)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prior=documents, steps=st.lists(step, max_size=10))
async def test_answers_as_the_reference_does_whatever_was_recorded(store, scope, prior, steps):
    name = next(numbers)
    scope = replace(
        scope,
        session_id="a session",
        corpus=f"corpus {name}",
        retrieval_scope=RetrievalScope.TENANT,
        contribute=True,
    )
    other = replace(scope, session_id="another session")
    reference, other_len = Reference(prior), 0
    if any(len(document) > 1 for document in prior):
        await load(store, scope, *prior)
    for kind, *values in steps:
        if kind == "accept":
            offset, token_ids = values
            base_len = max(0, len(reference.stream) + offset)
            # When a session sends tokens again, they are the same ones.
            repeated = reference.stream[base_len:]
            token_ids = [*repeated, *token_ids[len(repeated) :]][: len(token_ids)]
            reference.accept(base_len, token_ids)
            assert await store.record(scope, base_len, token_ids, []) == len(reference.stream)
        elif kind == "reject":
            await store.record(scope, len(reference.stream), [], [Rejection(*values)])
            reference.tiers.reject(*values)
        elif kind == "other":
            await store.record(other, other_len, values[0], [])
            other_len += len(values[0])
            stream = getattr(reference, "other", []) + values[0]
            reference.shared.learn(stream, len(stream) - len(values[0]))
            reference.other = stream
        else:
            contexts, *limits = values
            found = await store.lookup(scope, contexts, Limits(*limits))
            assert found.continuations == [reference.lookup(context, *limits) for context in contexts]


async def test_a_record_longer_than_one_call_is_one_stream(store, scope):
    stream = [i * i % 97 for i in range(3 * TOKENS_PER_CALL + 5)]
    rejections = [Rejection([i], [200 + i]) for i in range(2 * REJECTIONS_PER_CALL + 1)]
    tiers = LocalTiers(MAX_MATCH_LEN)
    assert await store.record(scope, 0, stream, rejections) == len(stream)
    tiers.record(stream)
    for rejection in rejections:
        tiers.reject(rejection.context, rejection.rejected)
    contexts = [stream[end - 3 : end] for end in range(3, len(stream))]
    assert len(contexts) > CONTEXTS_PER_CALL
    found = await store.lookup(scope, contexts, LIMITS)
    assert found.continuations == [tiers.lookup(context, 3, 4) for context in contexts]
    found = await store.lookup(scope, [[i] for i in range(33)], replace(LIMITS, tiers=frozenset({Source.REJECTED})))
    assert [continuation.token_ids[0] for continuation in found.continuations] == [200 + i for i in range(33)]


async def test_a_request_that_is_repeated_whole_changes_nothing(store, scope, redis_url):
    rejections = [Rejection([1, 2], [9, 3])] * (REJECTIONS_PER_CALL + 1)
    stream = list(range(TOKENS_PER_CALL + 1))
    await store.record(scope, 0, stream, rejections)
    before = await contents(redis_url, scope)
    assert await store.record(scope, 0, stream, rejections) == len(stream)
    assert await store.record(scope, 3, stream[3:], rejections) == len(stream)
    assert await contents(redis_url, scope) == before


async def test_a_request_with_a_gap_stores_nothing_and_returns_the_position(store, scope, redis_url):
    assert await store.record(scope, 0, [1, 2], []) == 2
    before = await contents(redis_url, scope)
    assert await store.record(scope, 3, [4] * 200, [Rejection([1], [2, 3])]) == 2
    assert await contents(redis_url, scope) == before
    assert await store.record(scope, 2, [3], []) == 3


async def contents(redis_url: str, scope) -> dict[str, object]:
    """Everything that is stored for a tokenizer."""
    async with Redis.from_url(redis_url) as redis:
        found = {}
        for key in await redis.keys(full_keys(scope.tokenizer_hash)):
            is_string = await redis.type(key) == b"string"
            found[key] = await redis.get(key) if is_string else await redis.hgetall(key)
        return found


async def test_more_followers_than_are_kept_push_out_the_least_counted(store, scope, redis_url):
    tiers = LocalTiers(MAX_MATCH_LEN)
    position = 0
    for follower in [*range(1, MAX_FOLLOWERS + 1), 1, 2, *range(90, 96), 3, 1]:
        position = await store.record(scope, position, [0, follower], [])
        tiers.record([0, follower])
    for ends in ([0], *([0, follower] for follower in range(100))):
        found = await store.lookup(scope, [ends], Limits(3, 8))
        assert found.continuations == [tiers.lookup(ends, 3, 8)]
    async with Redis.from_url(redis_url) as redis:
        [key] = [key async for key in redis.scan_iter(full_keys(scope.tokenizer_hash) + ":dynamic")]
        assert len(await redis.hget(key, bytes(4))) == 8 * MAX_FOLLOWERS


async def test_what_the_target_refused_is_offered_again_behind_all_that_was_said_there(store, scope):
    limits = Limits(3, 2)
    await load(store, scope, [1, 2, 50])
    await store.record(scope, 0, [4, 3, 1, 2, 60], [Rejection([4, 3, 1, 2], [70, 71])])
    said, refused = (await store.lookup(scope, [[3, 1, 2], [1, 2, 70]], limits)).continuations
    assert (said.tier, said.token_ids) == (Source.DYNAMIC, (60,))
    assert (refused.tier, refused.match_len, refused.token_ids) == (Source.REJECTED, 3, (71,))
    alone = replace(limits, tiers=frozenset({Source.REJECTED}))
    [refused] = (await store.lookup(scope, [[3, 1, 2]], alone)).continuations
    assert (refused.tier, refused.token_ids) == (Source.REJECTED, (70, 71))


async def test_a_long_corpus_is_counted_whole(store, scope):
    document = [i * i * i % 1009 for i in range(5000)]
    table = PriorTable.build([document], MAX_MATCH_LEN)
    await load(store, scope, document)
    tiers = LocalTiers(MAX_MATCH_LEN, table)
    contexts = [document[end - 3 : end] for end in range(3, 5000, 7)]
    found = await store.lookup(scope, contexts, LIMITS)
    assert found.continuations == [tiers.lookup(context, 3, 4) for context in contexts]
    [corpus] = [each for each in await store.list_corpora() if each.id.tokenizer_hash == scope.tokenizer_hash]
    assert (corpus.num_tokens, corpus.num_ngrams) == (5000, table.num_ngrams)


async def test_a_session_learns_up_to_its_cap_and_its_position_goes_on(open_store, redis_url, scope):
    store = open_store(redis_url, max_session_tokens=4)
    assert await store.record(scope, 0, [1, 2, 3], []) == 3
    assert await store.record(scope, 3, [4, 5, 6], [Rejection([1], [2, 3])]) == 6
    assert await store.record(scope, 6, [7], [Rejection([1], [2, 3])]) == 7
    found = await store.lookup(scope, [[1], [3], [4], [5], [6]], Limits(3, 1))
    assert [continuation.token_ids for continuation in found.continuations] == [(2,), (4,), (), (), ()]
    assert [key.rpartition(":")[2] for key in await keys_of(redis_url, scope.tokenizer_hash)] == ["dynamic", "tokens"]


async def test_refused_drafts_alone_cannot_fill_the_memory(open_store, redis_url, scope):
    store = open_store(redis_url, max_session_tokens=2)
    for number in range(10):
        await store.record(scope, 0, [], [Rejection([number], [1])])
    found = await store.lookup(scope, [[number] for number in range(10)], LIMITS)
    assert 1 < sum(continuation != NOTHING for continuation in found.continuations) < 10


async def test_the_shared_tier_drops_the_least_counted_beyond_its_cap(open_store, redis_url, scope):
    store = open_store(redis_url, max_num_shared_ngrams=1024)
    scope = replace(scope, retrieval_scope=RetrievalScope.TENANT, contribute=True)
    for number in range(3):
        await store.record(replace(scope, session_id=f"{number}"), 0, [1, 2, 3, 4], [])
    stream = [100 + i for i in range(2000)]
    await store.record(scope, 0, stream, [])
    async with Redis.from_url(redis_url) as redis:
        [key] = [key async for key in redis.scan_iter(full_keys(scope.tokenizer_hash) + ":shared")]
        assert await redis.hlen(key) == 1024
    [found] = (await store.lookup(replace(scope, session_id=""), [[1, 2, 3]], LIMITS)).continuations
    assert (found.tier, found.match_len, found.counts) == (Source.SHARED, 3, (3,))
