"""No session gets data that were not shared with it: every tier, every pair of scopes."""

from __future__ import annotations

import itertools
from contextlib import aclosing
from dataclasses import dataclass, replace

import pytest
from redis.asyncio import Redis

from outrider.core.params import RetrievalScope, Source
from outrider.datastore.background import Background
from outrider.datastore.rings import Rings
from outrider.datastore.types import TIERS, Limits, PriorChange, Rejection, Scope
from tests.support.datastores import full_keys, keys_of, load
from tests.support.waiting import until

LIMITS = Limits(3, 4)
SESSION, TENANT, GLOBAL = RetrievalScope


@dataclass(frozen=True)
class Someone:
    """A session that records, or one that asks."""

    tenant: str
    session_id: str
    retrieval_scope: RetrievalScope
    contribute: bool

    def scope(self, scope: Scope) -> Scope:
        return replace(
            scope,
            tenant=self.tenant,
            session_id=self.session_id,
            retrieval_scope=self.retrieval_scope,
            contribute=self.contribute,
        )


WRITERS = [
    Someone("acme", session_id, scope, contribute)
    for session_id, scope, contribute in itertools.product("ab", RetrievalScope, (False, True))
    if not (contribute and scope is SESSION)
]
READERS = [
    Someone(tenant, session_id, scope, False)
    for tenant, session_id, scope in itertools.product(("acme", "evil"), ("a", "b", ""), RetrievalScope)
]


def may_read(reader: Someone, writer: Someone, tier: Source) -> bool:
    """The rule."""
    is_same_session = (reader.tenant, reader.session_id) == (writer.tenant, writer.session_id)
    if tier in (Source.DYNAMIC, Source.REJECTED):
        return is_same_session
    shares = writer.contribute and reader.retrieval_scope is writer.retrieval_scope is not SESSION
    return shares and (reader.retrieval_scope is GLOBAL or reader.tenant == writer.tenant)


def test_the_rule_lets_two_tenants_meet_only_if_both_ask_for_it():
    for reader, writer, tier in itertools.product(READERS, WRITERS, TIERS[1:]):
        if reader.tenant != writer.tenant and may_read(reader, writer, tier):
            assert reader.retrieval_scope is writer.retrieval_scope is GLOBAL
            assert writer.contribute


async def readable(store, scope: Scope) -> set[Source]:
    """The tiers in which a scope finds what was recorded after token 1, or refused after token 5."""
    found = set()
    for tier in TIERS[:-1]:
        answer = await store.lookup(scope, [[1], [5]], replace(LIMITS, tiers=frozenset({tier})))
        if any(continuation.match_len for continuation in answer.continuations):
            found.add(tier)
    return found


async def test_the_ngram_tiers_answer_only_those_who_may_ask(store, scope):
    for number, writer in enumerate(WRITERS):
        corner = replace(scope, corpus=f"corner {number}")
        await store.record(writer.scope(corner), 0, [1, 2, 3], [Rejection([5], [6, 7])])
        for reader in READERS:
            expected = {tier for tier in TIERS[1:-1] if may_read(reader, writer, tier)}
            assert await readable(store, reader.scope(corner)) == expected, (reader, writer)


async def test_rings_answer_only_those_who_may_ask(store, scope):
    background = Background()
    for number, writer in enumerate(WRITERS):
        corner = replace(scope, corpus=f"corner {number}")
        await store.record(writer.scope(corner), 0, [1, 2, 3], [])
        await store.end_session(writer.scope(corner), 3)
        # The last entry of each ring: once it is there, so is everything before it.
        for tenant, retrieval_scope in itertools.product(("acme", "evil"), (TENANT, GLOBAL)):
            last = Scope(scope.tokenizer_hash, "last", corner.corpus, tenant, retrieval_scope, contribute=True)
            await store.record(last, 0, [8, 9], [])
            await store.end_session(last, 2)
        rings = Rings(store, background, 1024, 10, 8)
        for reader in READERS:
            ring = rings.ring_for(reader.scope(corner))
            if reader.retrieval_scope is SESSION:
                assert ring is None
                continue
            await until(lambda ring=ring: ring.lookup([8], 10, 1).match_len == 1)
            found = ring.lookup([1], 10, 4).match_len == 1
            assert found == may_read(reader, writer, Source.RING), (reader, writer)
        await rings.close()
    background.close()


async def test_watchers_see_nothing_but_what_they_may_ask_for(store, scope):
    for number, writer in enumerate(WRITERS):
        corner = replace(scope, corpus=f"corner {number}")
        await store.record(writer.scope(corner), 0, [1, 2, 3], [])
        for tenant, retrieval_scope in itertools.product(("acme", "evil"), (TENANT, GLOBAL)):
            reader = Someone(tenant, "", retrieval_scope, False)
            last = replace(reader, session_id=f"last {retrieval_scope.name}", contribute=True)
            await store.record(last.scope(corner), 0, [8, 9], [])
            runs = []
            async with aclosing(store.follow(reader.scope(corner))) as changes:
                while [8, 9] not in runs:
                    if not isinstance(change := await anext(changes), PriorChange):
                        runs.append(list(change.token_ids))
            assert ([1, 2, 3] in runs) == may_read(reader, writer, Source.SHARED), (reader, writer)


async def test_what_is_not_contributed_is_neither_shared_nor_in_a_ring(store, scope, redis_url):
    for retrieval_scope in RetrievalScope:
        quiet = replace(scope, retrieval_scope=retrieval_scope, contribute=False)
        await store.record(quiet, 0, [1, 2, 3], [Rejection([1], [2, 3])])
        kinds = {key.rpartition(":")[2] for key in await keys_of(redis_url, scope.tokenizer_hash)}
        assert kinds == {"dynamic", "rejected", "tokens"}
        await store.end_session(quiet, 3)
        assert await keys_of(redis_url, scope.tokenizer_hash) == []


async def test_a_tenants_prior_is_found_by_that_tenant_alone(store, scope):
    await load(store, scope, [1, 2], tenant="acme")
    for tenant in ("acme", "evil", "default", "acm", "acme:documents"):
        for retrieval_scope in RetrievalScope:
            reader = replace(scope, tenant=tenant, retrieval_scope=retrieval_scope)
            found = await store.lookup(reader, [[1]], LIMITS)
            expected = (scope.corpus_id("acme"), 1) if tenant == "acme" else (None, 0)
            assert (found.prior, found.continuations[0].match_len) == expected
    assert await store.read_prior(scope.corpus_id("evil")) is None
    assert await store.prior_versions([scope.corpus_id("evil"), scope.corpus_id("")]) == [None, None]


NAMES = ["a", "a:b", "{a}", "a}", "}:s:a", "%61", "a/b", "a%3Ab", "é", "a:dynamic", "s:a", "*", " ", "g", "documents"]


async def test_names_cannot_reach_into_another_scope(store, scope, redis_url):
    """No two scopes share a key, however their names are combined."""
    scopes = [
        Scope(scope.tokenizer_hash + tokenizer, session_id, corpus, tenant, TENANT, contribute=True)
        for tokenizer, session_id, corpus, tenant in [
            *(("", name, "c", "t") for name in NAMES),
            *(("", "s", name, "t") for name in NAMES),
            *(("", "s", "c", name) for name in NAMES),
            *((name, "s", "c", "t") for name in NAMES),
        ]
    ]
    first_of = {each.corpus_id(each.tenant): each for each in reversed(scopes)}
    async with Redis.from_url(redis_url) as redis:
        seen: set[bytes] = set()
        for number, each in enumerate(scopes):
            is_first = first_of[each.corpus_id(each.tenant)] is each
            await store.record(each, 0, [1, 100 + number], [Rejection([5], [100 + number])])
            if is_first:
                await load(store, each, [1, 100 + number], tenant=each.tenant)
            found = await redis.keys(full_keys(scope.tokenizer_hash))
            wrote = {key for key in found if key not in seen}
            # tokens, dynamic, rejected; shared, its changes; prior, documents, info, its changes
            assert len(wrote) == (9 if is_first else 3), each
            seen |= wrote
    for number, each in enumerate(scopes):
        is_first = first_of[each.corpus_id(each.tenant)] is each
        for tier in (Source.DYNAMIC, Source.PRIOR) if is_first else (Source.DYNAMIC,):
            [found] = (await store.lookup(each, [[1]], replace(LIMITS, tiers=frozenset({tier})))).continuations
            assert found.token_ids == (100 + number,), each
    listed = {info.id for info in await store.list_corpora()}
    assert {each.corpus_id(each.tenant) for each in scopes} <= listed


async def test_the_scope_of_one_session_leaves_no_key_at_all(store, scope, redis_url):
    await store.record(scope, 0, [1, 2, 3], [Rejection([5], [6, 7])])
    assert len(await keys_of(redis_url, scope.tokenizer_hash)) == 3
    await store.end_session(scope, 3)
    assert await keys_of(redis_url, scope.tokenizer_hash) == []


async def test_everything_but_priors_expires(store, scope, redis_url):
    shared = replace(scope, retrieval_scope=TENANT, contribute=True)
    await store.record(shared, 0, [1, 2, 3], [Rejection([5], [6, 7])])
    await store.record(replace(shared, session_id="ended"), 0, [1, 2], [])
    await store.end_session(replace(shared, session_id="ended"), 2)
    await load(store, scope, [1, 2])
    async with Redis.from_url(redis_url) as redis:
        keys = [key async for key in redis.scan_iter(full_keys(scope.tokenizer_hash))]
        left_s = {key.decode().partition("}:")[2]: await redis.ttl(key) for key in keys}
    # Rounded to a hundred seconds, because a busy machine takes some; -1 means no expiry.
    ttls = {key: seconds if seconds < 0 else round(seconds, -2) for key, seconds in left_s.items()}
    assert ttls == {
        "prior:": -1,
        "prior::documents": -1,
        "prior::info": -1,
        "prior::changes": -1,
        "s:default:a%20session:tokens": 3600,
        "s:default:a%20session:dynamic": 3600,
        "s:default:a%20session:rejected": 3600,
        "t:default:shared": 7 * 86400,
        "t:default:changes": 7 * 86400,
        "t:default:ring": 7 * 86400,
    }


async def test_a_prior_loaded_again_after_it_was_deleted_keeps_its_changes(store, scope, redis_url):
    await load(store, scope, [1, 2])
    await store.delete_prior(scope.corpus_id(""))
    async with Redis.from_url(redis_url) as redis:
        [key] = await redis.keys(full_keys(scope.tokenizer_hash))
        assert key.endswith(b":prior::changes")
        assert await redis.ttl(key) > 0
        await load(store, scope, [1, 2])
        assert await redis.ttl(key) == -1


@pytest.mark.parametrize("name", ["", "another"])
async def test_sessions_share_the_prior_of_their_corpus(store, scope, name):
    await load(store, scope, [1, 2, 3])
    [found] = (await store.lookup(replace(scope, session_id=name), [[1]], LIMITS)).continuations
    assert (found.tier, found.token_ids) == (Source.PRIOR, (2, 3))
