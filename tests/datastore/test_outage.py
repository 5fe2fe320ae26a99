"""Redis is away, hangs, is empty, or comes back: lookups are still answered, and everything recovers by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import grpc
import pytest

from outrider.core.retrieval.ngrams import NOTHING
from outrider.datastore.messages import scope_from
from outrider.datastore.settings import DatastoreSettings
from outrider.datastore.types import Limits
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import types_pb2
from outrider_cli.local.redis import LocalRedis
from tests.support.datastores import Served, hung, load_prior, record, refusal, restart, sequence
from tests.support.waiting import until

RECOVERY_S = 2.0
LIMITS = Limits(3, 4)


class Caller:
    """Looks up on one open stream."""

    def __init__(self, served: Served, scope: pb.Scope) -> None:
        self._call = served.stub.Lookup()
        self._scope = scope

    async def ask(self, *context: int) -> tuple[bool, int, list[int]]:
        """Returns True if the answer was local, its tier, and its tokens."""
        query = pb.Query(context_token_ids=context)
        await self._call.write(pb.LookupRequest(scope=self._scope, queries=[query]))
        response = await self._call.read()
        assert response is not grpc.aio.EOF, await self._call.details()
        [result] = response.results
        return response.is_local, result.tier, list(result.token_ids)

    async def times_s(self, number: int, *context: int) -> list[float]:
        """Measures answers, all of them local."""
        times = []
        for _ in range(number):
            began = time.perf_counter()
            is_local, _, _ = await self.ask(*context)
            times.append(time.perf_counter() - began)
            assert is_local
        return times


@pytest.fixture
async def caller(serve, own_redis, contributing) -> tuple[Served, Caller]:
    """A server that holds a prior, 1 2 3, and a ring, 7 8 9."""
    served = await serve(own_redis.url, lookup_timeout_ms=4.0, redis_timeout_s=0.5)
    prior_scope = pb.Scope(tokenizer_hash=contributing.tokenizer_hash)
    await load_prior(served.stub, pb.LoadPriorRequest(scope=prior_scope, documents=[sequence(1, 2, 3)]))
    await record(served.stub, pb.RecordRequest(scope=contributing, accepted_token_ids=[7, 8, 9], end_session=True))
    caller = Caller(served, contributing)
    await until(lambda: answers(caller, types_pb2.SOURCE_SHARED, 7))
    await until(lambda: holds(served, 3))
    await served.replica.refresh()
    return served, caller


async def answers(caller: Caller, tier: int, *context: int) -> bool:
    """Returns True if Redis answers, from this tier."""
    is_local, found, _ = await caller.ask(*context)
    return not is_local and found == tier


def holds(served: Served, num_tokens: int) -> bool:
    """Returns True if a ring has that many tokens."""
    return any(held.ring.num_tokens >= num_tokens for held in served.replica.rings.held)


def kill(redis: LocalRedis) -> Callable[[], None]:
    redis.kill()
    return redis.start


def stop(redis: LocalRedis) -> Callable[[], None]:
    context = hung(redis)
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("fail", [kill, stop])
async def test_without_redis_the_prior_and_the_ring_answer_at_once(caller, own_redis, contributing, fail):
    served, calls = caller
    assert await calls.ask(1, 2) == (False, types_pb2.SOURCE_PRIOR, [3])
    restore = fail(own_redis)
    try:
        first = await calls.times_s(1, 1)
        times = await calls.times_s(20, 1)
        assert await calls.ask(1) == (True, types_pb2.SOURCE_PRIOR, [2, 3])
        assert await calls.ask(7) == (True, types_pb2.SOURCE_RING, [8, 9])
        assert await calls.ask(66) == (True, 0, [])
    finally:
        restore()
    restored = time.monotonic()
    await until(lambda: is_back(calls))
    assert time.monotonic() - restored < RECOVERY_S
    assert first[0] < 0.05
    assert statistics.median(times) < 0.005
    info = await served.stub.GetInfo(pb.DatastoreServiceGetInfoRequest())
    assert info.num_local_lookups >= 24
    await until(lambda: is_recorded(served, contributing))
    assert await calls.ask(50) == (False, types_pb2.SOURCE_DYNAMIC, [51])


async def is_back(caller: Caller) -> bool:
    is_local, _, _ = await caller.ask(1)
    return not is_local


async def is_recorded(served: Served, contributing: pb.Scope) -> bool:
    try:
        return await record(served.stub, pb.RecordRequest(scope=contributing, accepted_token_ids=[50, 51])) == [2]
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            raise
        return False


@pytest.mark.slow
async def test_what_redis_lost_is_forgotten_and_what_comes_is_found(caller, own_redis, contributing):
    served, calls = caller
    own_redis.kill()
    own_redis.start()  # empty: neither tokens nor Functions
    await until(lambda: is_back(calls))
    assert await calls.ask(1) == (False, 0, [])
    # The prior in the replica is outdated.
    await until(lambda: has_no_prior(served, contributing))
    # The ring continues from its old position.
    again = pb.Scope.FromString(contributing.SerializeToString())
    again.session_id = "after"
    await until(lambda: is_recorded(served, contributing))
    ended = pb.RecordRequest(scope=again, accepted_token_ids=[30, 31, 32], end_session=True)
    assert await record(served.stub, ended) == [3]
    await until(lambda: holds(served, 8))
    await load_again(served, contributing)
    await until(lambda: answers(calls, types_pb2.SOURCE_PRIOR, 40))


async def has_no_prior(served: Served, contributing: pb.Scope) -> bool:
    scope = scope_from(contributing, DatastoreSettings())
    return served.replica._priors.lookup(scope, [[1]], LIMITS) == [NOTHING]


async def load_again(served: Served, contributing: pb.Scope) -> None:
    scope = pb.Scope(tokenizer_hash=contributing.tokenizer_hash)
    await load_prior(served.stub, pb.LoadPriorRequest(scope=scope, documents=[sequence(40, 41)]))


@pytest.mark.slow
async def test_a_server_may_start_before_its_redis(serve, own_redis, contributing):
    own_redis.kill()
    served = await serve(own_redis.url, lookup_timeout_ms=4.0, redis_timeout_s=0.5)
    calls = Caller(served, contributing)
    assert await calls.ask(1) == (True, 0, [])
    assert (await served.stub.GetInfo(pb.DatastoreServiceGetInfoRequest())).store == ""
    request = pb.RecordRequest(scope=contributing, accepted_token_ids=[50, 51])
    code, details = await refusal(served.stub.Record(iter([request])))
    assert (code, details.split(" cannot")[0]) == (
        grpc.StatusCode.UNAVAILABLE,
        f"Redis at 127.0.0.1:{own_redis.port}",
    )
    own_redis.start()
    await until(lambda: is_back(calls))
    assert await is_recorded(served, contributing)


@pytest.mark.slow
async def test_what_was_answered_survives_a_redis_with_a_log(own_redis, serve, contributing):
    restart(own_redis, "--appendonly", "yes", "--appendfsync", "always")
    served = await serve(own_redis.url, redis_timeout_s=0.5)
    calls = Caller(served, contributing)
    await load_again(served, contributing)
    for base_len in range(0, 20, 2):
        tokens = [100 + base_len, 101 + base_len]
        request = pb.RecordRequest(scope=contributing, base_len=base_len, accepted_token_ids=tokens)
        assert await record(served.stub, request) == [base_len + 2]
    own_redis.kill()
    own_redis.start()
    await until(lambda: answers(calls, types_pb2.SOURCE_PRIOR, 40))
    assert (await calls.ask(100))[2] == [101 + i for i in range(16)]
    again = pb.RecordRequest(scope=contributing, base_len=20, accepted_token_ids=[120], end_session=True)
    assert await record(served.stub, again) == [21]
