"""A replica answers by itself while Redis does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from outrider.core.params import RetrievalScope, Source
from outrider.core.retrieval.ngrams import NOTHING
from outrider.datastore import replica as held_priors
from outrider.datastore.replica import HeldPriors, Replica
from outrider.datastore.types import ALL_TENANTS, CorpusNotFound, Limits, LookupCommand, StoreUnavailable
from tests.support.datastores import load, settings_for
from tests.support.waiting import until

LIMITS = Limits(3, 4)


class Silent:
    """A store that answers everything except lookups, like Redis while lookups are late."""

    def __init__(self, store) -> None:
        self._store = store

    async def lookup(self, *_):
        raise StoreUnavailable("it is late")

    def __getattr__(self, name):
        return getattr(self._store, name)


@pytest.fixture
async def replica(store, redis_url):
    replica = Replica(store, settings_for(redis_url))
    yield replica
    await replica.close()


async def locally(replica: Replica, scope, *contexts: list[int], limits=LIMITS):
    """Looks up contexts in what the replica holds."""
    store, replica.store = replica.store, Silent(replica.store)
    try:
        answers = await replica.look_up(LookupCommand(scope, contexts, limits))
    finally:
        replica.store = store
    assert answers.is_local
    return answers.continuations


async def test_a_prior_is_held_from_its_first_lookup_on(replica, store, scope):
    await load(store, scope, [1, 2, 3], [7, 8])
    assert await locally(replica, scope, [1]) == [NOTHING]
    from_redis = (await replica.look_up(LookupCommand(scope, [[1, 2], [7], [9]], LIMITS))).continuations
    await replica.refresh()
    assert await locally(replica, scope, [1, 2], [7], [9]) == from_redis
    assert from_redis[0].tier is Source.PRIOR
    assert await locally(replica, scope, [7], limits=replace(LIMITS, tiers=frozenset({Source.DYNAMIC}))) == [NOTHING]


async def test_a_prior_is_held_if_redis_was_away_at_its_first_lookup(replica, store, scope):
    await load(store, scope, [1, 2])
    assert await locally(replica, scope, [1]) == [NOTHING]
    await replica.refresh()
    assert (await locally(replica, scope, [1]))[0].token_ids == (2,)


async def test_what_is_held_follows_what_is_loaded_and_deleted(replica, store, scope):
    await load(store, scope, [1, 2])
    await replica.look_up(LookupCommand(scope, [[1]], LIMITS))
    for document in ([1, 3], [1, 4]):
        await load(store, scope, document)
        await replica.refresh()
        assert (await locally(replica, scope, [1]))[0].token_ids == (document[1],)
    await store.delete_prior(scope.corpus_id(ALL_TENANTS))
    await replica.refresh()
    assert await locally(replica, scope, [1]) == [NOTHING]


async def test_a_tenants_own_prior_is_held_for_that_tenant_alone(replica, store, scope):
    mine, other = replace(scope, tenant="mine"), replace(scope, tenant="other")
    await load(store, scope, [1, 2])
    await load(store, scope, [1, 3], tenant="mine")
    for each in (mine, other):
        await replica.look_up(LookupCommand(each, [[1]], LIMITS))
    await replica.refresh()
    assert (await locally(replica, mine, [1]))[0].token_ids == (3,)
    assert (await locally(replica, other, [1]))[0].token_ids == (2,)


async def test_held_priors_are_limited_and_do_not_push_each_other_out(store, scope, monkeypatch):
    held = HeldPriors(store, 3, 1)
    one, two = (replace(scope, corpus=name) for name in ("one", "two"))
    for each in (one, two):
        await load(store, each, [1, 2])
        held.hold(each.corpus_id(ALL_TENANTS))
    await held.refresh()
    assert [held.lookup(each, [[1]], LIMITS)[0].match_len for each in (one, two)] == [1, 0]
    monkeypatch.setattr(held_priors, "IN_USE_S", 0.0)
    held.hold(two.corpus_id(ALL_TENANTS))
    await held.refresh()
    assert [held.lookup(each, [[1]], LIMITS)[0].match_len for each in (one, two)] == [0, 1]


async def test_priors_that_nobody_looks_up_do_not_push_each_other_out_in_turn(store, scope, monkeypatch):
    monkeypatch.setattr(held_priors, "IN_USE_S", 0.0)
    read_prior, read = store.read_prior, []

    async def counted(corpus):
        read.append(corpus.corpus)
        return await read_prior(corpus)

    monkeypatch.setattr(store, "read_prior", counted)
    held = HeldPriors(store, 3, 1)
    one, two = (replace(scope, corpus=name) for name in ("one", "two"))
    for each in (one, two):
        await load(store, each, [1, 2])
        held.hold(each.corpus_id(ALL_TENANTS))
    for _ in range(3):
        await held.refresh()
        assert [held.lookup(each, [[1]], LIMITS)[0].match_len for each in (one, two)] == [0, 1]
    assert read == ["one", "two"]


async def test_the_names_of_priors_that_do_not_exist_are_limited(store, scope, monkeypatch):
    monkeypatch.setattr(held_priors, "MAX_NUM_PRIOR_IDS", 3)
    held = HeldPriors(store, 3, 1)
    for number in range(10):
        held.hold(replace(scope, corpus=f"{number}").corpus_id(ALL_TENANTS))
    assert len(held._priors) == 3


async def test_the_existence_of_a_corpus_is_believed_for_a_while(replica, store, scope, redis_url):
    named = replace(scope, corpus="code")
    with pytest.raises(CorpusNotFound):
        await replica.check_exists(named)
    await load(store, named, [1, 2])
    await replica.check_exists(named)
    async with Redis.from_url(redis_url) as redis:
        before = (await redis.info("commandstats")).get("cmdstat_exists", {"calls": 0})["calls"]
        await replica.check_exists(named)
        await replica.check_exists(scope)  # the default need not exist
        assert (await redis.info("commandstats"))["cmdstat_exists"]["calls"] == before


async def test_an_upkeep_that_fails_is_tried_again(replica, store, monkeypatch, capsys):
    rounds = []

    async def fail_once() -> None:
        rounds.append(1)
        if len(rounds) == 1:
            raise KeyError("a bug")

    monkeypatch.setattr(replica, "refresh", fail_once)
    monkeypatch.setattr("outrider.datastore.replica.UPKEEP_S", 0.001)
    replica.start()
    await until(lambda: len(rounds) > 2)
    assert "task=upkeep" in capsys.readouterr().out


async def test_a_longer_match_in_the_ring_comes_before_the_other_tiers(replica, store, scope):
    scope = replace(scope, retrieval_scope=RetrievalScope.GLOBAL, contribute=True)
    ring = replica.rings.ring_for(scope)
    ring.append([1, 2, 3, 4, 5, 6])
    await store.record(replace(scope, contribute=False), 0, [2, 3, 4, 50], [])
    contexts = [[1, 2, 3, 4], [2, 3, 4], [9, 9]]
    longer, equal, nothing = (await replica.look_up(LookupCommand(scope, contexts, LIMITS))).continuations
    assert (longer.tier, longer.match_len, longer.token_ids) == (Source.RING, 4, (5, 6))
    assert (equal.tier, equal.match_len, equal.token_ids) == (Source.DYNAMIC, 3, (50,))
    assert nothing == NOTHING
    without = replace(LIMITS, tiers=frozenset({Source.DYNAMIC}))
    [found] = (await replica.look_up(LookupCommand(scope, contexts[:1], without))).continuations
    assert found.tier is Source.DYNAMIC
    alone = replace(LIMITS, tiers=frozenset({Source.RING}))
    [found] = (await replica.look_up(LookupCommand(scope, contexts[1:2], alone))).continuations
    assert (found.tier, found.match_len) == (Source.RING, 3)
