"""A prior is loaded completely or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import numpy as np
import pytest
from redis.asyncio import Redis

from outrider.core.retrieval.prior import PriorTable
from outrider.datastore.redis.layout import LOADING_TTL_S
from outrider.datastore.types import ALL_TENANTS, CorpusNotFound, Limits, StoreFull, StoreUnavailable
from outrider.v1 import datastore_pb2 as pb
from tests.support.datastores import full_keys, keys_of, load, load_prior, refusal, to_the_end
from tests.support.waiting import until

LIMITS = Limits(3, 1)
FORMER = ["prior:", "prior::changes", "prior::documents", "prior::info"]
LONG = np.random.default_rng(3).integers(100, 1000, 6000).tolist()
"""More n-grams than are stored in one round trip."""


def loading(store, scope):
    """A long prior that is being loaded."""
    return store.load_prior(scope.corpus_id(ALL_TENANTS), [LONG], PriorTable.build([LONG], 3))


async def is_as_before(store, scope, redis_url) -> bool:
    """Returns True if the prior 1 2 is the only one, and nothing else is left."""
    found = await store.lookup(scope, [[1], [LONG[7]]], LIMITS)
    tokens = [continuation.token_ids for continuation in found.continuations]
    prior = await store.read_prior(scope.corpus_id(ALL_TENANTS))
    return (
        tokens == [(2,), ()]
        and [list(document) for document in prior.documents] == [[1, 2]]
        and await keys_of(redis_url, scope.tokenizer_hash) == FORMER
    )


async def test_loading_a_prior_replaces_the_one_of_that_name(store, scope, redis_url):
    await load(store, scope, [1, 2])
    first = await store.read_prior(scope.corpus_id(ALL_TENANTS))
    await load(store, scope, [1, 3], [4, 5])
    second = await store.read_prior(scope.corpus_id(ALL_TENANTS))
    found = await store.lookup(scope, [[1]], LIMITS)
    assert found.continuations[0].token_ids == (3,)
    assert [list(document) for document in second.documents] == [[1, 3], [4, 5]]
    assert first.version != second.version
    assert await keys_of(redis_url, scope.tokenizer_hash) == FORMER
    corpora = [info for info in await store.list_corpora() if info.id.tokenizer_hash == scope.tokenizer_hash]
    assert [(info.id.corpus, info.num_tokens, info.num_ngrams) for info in corpora] == [("default", 4, 2)]


async def test_a_caller_who_stops_halfway_leaves_the_former_prior(store, scope, redis_url):
    await load(store, scope, [1, 2])
    progress = loading(store, scope)
    assert await anext(progress) > 0
    assert len(await keys_of(redis_url, scope.tokenizer_hash)) == len(FORMER) + 2
    await progress.aclose()
    assert await is_as_before(store, scope, redis_url)


async def test_a_cancelled_load_leaves_the_former_prior(store, scope, redis_url):
    await load(store, scope, [1, 2])
    began = asyncio.Event()

    async def load_long() -> None:
        async for _ in loading(store, scope):
            began.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(load_long())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: is_as_before(store, scope, redis_url))


@pytest.mark.parametrize("part", ["", ":documents"])
async def test_an_eviction_halfway_is_noticed_and_the_former_prior_stays(store, scope, redis_url, part):
    async def evict() -> None:
        async with Redis.from_url(redis_url) as redis:
            for key in await redis.keys(full_keys(scope.tokenizer_hash) + "loading:*"):
                if key.endswith(b":documents") == bool(part):
                    await redis.delete(key)

    await load(store, scope, [1, 2])
    with pytest.raises(StoreUnavailable, match="has lost a part of the corpus"):
        await to_the_end(loading(store, scope), evict)
    assert await is_as_before(store, scope, redis_url)


@pytest.mark.slow
async def test_a_redis_that_is_full_halfway_keeps_the_former_prior(own_redis, open_store, scope):
    store = open_store(own_redis.url)
    await load(store, scope, [1, 2])
    async with Redis.from_url(own_redis.url) as redis:
        with pytest.raises(StoreFull):
            await to_the_end(loading(store, scope), lambda: redis.config_set("maxmemory", "1"))
        await redis.config_set("maxmemory", "0")
    assert await is_as_before(store, scope, own_redis.url)


@pytest.mark.slow
async def test_a_redis_that_dies_halfway_has_no_half_prior(own_redis, open_store, scope):
    store = open_store(own_redis.url)
    with pytest.raises(StoreUnavailable):
        await to_the_end(loading(store, scope), own_redis.kill)
    own_redis.start()
    assert await store.list_corpora() == []


async def test_a_prior_that_is_being_loaded_expires_if_it_is_abandoned(store, scope, redis_url):
    progress = loading(store, scope)
    await anext(progress)
    async with Redis.from_url(redis_url) as redis:
        keys = await redis.keys(full_keys(scope.tokenizer_hash))
        assert len(keys) == 2
        for key in keys:
            assert 0 < await redis.ttl(key) <= LOADING_TTL_S
    await progress.aclose()


async def test_a_load_that_takes_long_does_not_expire_while_it_goes_on(store, scope, redis_url):
    progress = loading(store, scope)
    await anext(progress)
    async with Redis.from_url(redis_url) as redis:
        keys = await redis.keys(full_keys(scope.tokenizer_hash))
        assert len(keys) == 2
        for key in keys:
            await redis.expire(key, LOADING_TTL_S // 2)
        await anext(progress)
        for key in keys:
            assert await redis.ttl(key) > LOADING_TTL_S // 2
    await progress.aclose()


def interrupted(store, monkeypatch, hurt) -> None:
    """Runs a callback before each command of the store, and before each transaction as a whole."""
    execute = store._client._execute

    async def execute_later(commands, send):
        replies = []
        for part in [commands] if send.keywords["is_transaction"] else [[command] for command in commands]:
            await hurt()
            replies += await execute(part, send)
        return replies

    monkeypatch.setattr(store._client, "_execute", execute_later)


async def is_listed(store, scope) -> bool:
    """Returns True if the prior for all tenants is listed."""
    return scope.corpus_id(ALL_TENANTS) in [info.id for info in await store.list_corpora()]


async def test_a_load_is_listed_whenever_the_former_prior_is_deleted(store, open_store, scope, redis_url, monkeypatch):
    other = open_store(redis_url)

    async def delete() -> None:
        with suppress(CorpusNotFound):
            await other.delete_prior(scope.corpus_id(ALL_TENANTS))

    interrupted(store, monkeypatch, delete)
    await load(store, scope, [1, 2])
    assert await is_listed(other, scope)


async def test_a_deletion_leaves_what_is_loaded_meanwhile_listed(store, open_store, scope, redis_url, monkeypatch):
    other = open_store(redis_url)
    interrupted(store, monkeypatch, lambda: load(other, scope, [1, 2]))
    await store.delete_prior(scope.corpus_id(ALL_TENANTS))
    assert await is_listed(other, scope) == (await other.read_prior(scope.corpus_id(ALL_TENANTS)) is not None)


async def test_a_deleted_corpus_is_gone_and_cannot_be_deleted_again(store, scope):
    await load(store, scope, [1, 2])
    await store.delete_prior(scope.corpus_id(ALL_TENANTS))
    assert (await store.lookup(scope, [[1]], LIMITS)).prior is None
    assert await store.read_prior(scope.corpus_id(ALL_TENANTS)) is None
    assert scope.tokenizer_hash not in [info.id.tokenizer_hash for info in await store.list_corpora()]
    with pytest.raises(CorpusNotFound, match="no corpus 'default'"):
        await store.delete_prior(scope.corpus_id(ALL_TENANTS))


@pytest.fixture
def named(scope) -> pb.Scope:
    return pb.Scope(tokenizer_hash=scope.tokenizer_hash)


SELF = pb.Scope()
"""Stands for the test's own scope."""


def piece(*documents: list[int], **fields) -> pb.LoadPriorRequest:
    return pb.LoadPriorRequest(documents=[pb.TokenSequence(token_ids=each) for each in documents], **fields)


async def test_says_how_far_it_is(serve, redis_url, named, monkeypatch):
    monkeypatch.setattr("outrider.datastore.loading.RESPONSE_EVERY_NGRAMS", 4000)
    stub = (await serve(redis_url)).stub
    responses = await load_prior(stub, piece(LONG[:3000], scope=named, num_tokens=6000), piece(LONG[3000:]))
    num_ngrams = PriorTable.build([LONG[:3000], LONG[3000:]], 3).num_ngrams
    assert {response.num_tokens for response in responses} == {6000}
    stored = [response.num_stored_ngrams for response in responses]
    assert stored == sorted(stored)
    assert len(set(stored)) > 2
    assert (stored[-1], responses[-1].num_ngrams) == (num_ngrams, num_ngrams)
    assert [response.is_done for response in responses] == [False] * (len(responses) - 1) + [True]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "documents must be runs of two tokens or more, got no message"),
        ([piece()], "scope must be set in the first message of a stream, got none"),
        ([piece([1], [2], scope=SELF)], "documents must be runs of two tokens or more, got 2 tokens in all"),
        (
            [piece([1, 2], scope=SELF, num_tokens=3)],
            "num_tokens must be the number of tokens that came, 2, got 3",
        ),
        ([piece([1, 2], scope=SELF), piece()], "documents must be set in every message but the first, got none"),
        ([piece([1, 2], scope=SELF, num_tokens=-1)], "num_tokens must be in [1, 20], or 0 = not said, got -1"),
        ([piece([1, 2], scope=SELF, num_tokens=21)], "num_tokens must be in [1, 20], or 0 = not said, got 21"),
        (
            [piece([1] * 8, [1] * 8, scope=SELF), piece([1] * 5)],
            "documents must be at most 20 tokens in all, got 21",
        ),
        ([piece([1] * 11, scope=SELF)], "documents[0].token_ids must be 1 to 10 tokens long, got 11 tokens"),
        ([piece([1, 2], [], scope=SELF)], "documents[1].token_ids must be 1 to 10 tokens long, got 0 tokens"),
        ([piece([1, -2], scope=SELF)], "documents[0].token_ids must be without negative token ids, got -2"),
        (
            [piece([1, 2], scope=SELF), piece([3, 4], scope=pb.Scope(tokenizer_hash="x"))],
            "scope must be that of the",
        ),
    ],
)
async def test_a_bad_corpus_is_refused_and_the_former_stays(serve, redis_url, named, scope, pieces, message):
    served = await serve(redis_url, max_prior_tokens=20, max_document_len=10)
    await load_prior(served.stub, piece([1, 2], scope=named))
    requests = []
    for each in pieces:
        request = pb.LoadPriorRequest.FromString(each.SerializeToString())
        if request.HasField("scope") and not request.scope.tokenizer_hash:
            request.scope.CopyFrom(named)
        requests.append(request)
    code, details = await refusal(served.stub.LoadPrior(iter(requests)))
    assert (code, message in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details
    assert await is_as_before(served.replica.store, scope, redis_url)


async def test_a_stream_loads_the_prior_of_one_tenant(stub, named):
    other = pb.Scope(tokenizer_hash=named.tokenizer_hash, tenant="default")
    code, details = await refusal(stub.LoadPrior(iter([piece([1, 2], scope=named), piece([1, 2], scope=other)])))
    assert (code, "scope must be that of the first message" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_caller_who_hangs_up_while_sending_leaves_nothing(served, named, scope, redis_url):
    call = served.stub.LoadPrior()
    await call.write(piece([1, 2], scope=named))
    call.cancel()
    await until(lambda: served.servicer._loads._num_loads == 0)
    assert await keys_of(redis_url, scope.tokenizer_hash) == []


async def test_only_a_few_priors_are_loaded_at_a_time(serve, redis_url, named):
    stub = (await serve(redis_url, max_num_loads=1)).stub
    call = stub.LoadPrior()
    await call.write(piece([1, 2], scope=named))

    async def is_refused() -> bool:
        try:
            await load_prior(stub, piece([1, 2], scope=named))
        except grpc.aio.AioRpcError as error:
            return error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        return False

    await until(is_refused)
    await call.done_writing()
    while (response := await call.read()) is not grpc.aio.EOF:
        last = response
    assert last.is_done


async def test_a_caller_who_sends_nothing_gives_its_place_up(serve, redis_url, named):
    served = await serve(redis_url, max_num_loads=1, stall_timeout_s=0.1)

    async def sent(*messages: pb.LoadPriorRequest) -> AsyncIterator[pb.LoadPriorRequest]:
        for message in messages:
            yield message
        await asyncio.Event().wait()

    for messages in ([], [piece([1, 2], scope=named)]):
        code, details = await refusal(served.stub.LoadPrior(sent(*messages)))
        assert (code, details) == (grpc.StatusCode.DEADLINE_EXCEEDED, "the caller has sent nothing for 0.1 s")
    assert (await load_prior(served.stub, piece([1, 2], scope=named)))[-1].is_done


async def test_a_message_with_too_many_documents_is_refused_at_the_limit(serve, redis_url, named):
    served = await serve(redis_url, max_prior_tokens=20_000)
    code, details = await refusal(served.stub.LoadPrior(iter([piece(*[[3, 4]] * 15_000, scope=named)])))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "documents must be at most 20000 tokens in all" in details
