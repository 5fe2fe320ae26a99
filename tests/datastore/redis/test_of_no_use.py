"""A Redis that answers and cannot be used is left for another; the problem is logged once, and reported to callers."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from outrider.datastore.redis.store import RedisStore
from outrider.datastore.types import Limits, Scope, StoreUnavailable
from outrider.v1 import datastore_pb2 as pb
from outrider_cli.local.redis import LocalRedis, find_program, free_port, started_redis
from tests.support.datastores import keys_of, look_up, query, record, refusal, restart
from tests.support.forgetful_proxy import forgetful
from tests.support.waiting import until

LIMITS = Limits(3, 4)
Commands = list[tuple[str, ...]]

NOWHERE = ("127.0.0.1", "1")
OF_NO_USE: dict[str, tuple[Commands, Commands]] = {
    "READONLY": ([("REPLICAOF", *NOWHERE)], [("REPLICAOF", "NO", "ONE")]),
    "MASTERDOWN": (
        [("CONFIG", "SET", "replica-serve-stale-data", "no"), ("REPLICAOF", *NOWHERE)],
        [("REPLICAOF", "NO", "ONE")],
    ),
    "NOREPLICAS": (
        [("CONFIG", "SET", "min-replicas-to-write", "1")],
        [("CONFIG", "SET", "min-replicas-to-write", "0")],
    ),
    "NOPERM": ([("ACL", "SETUSER", "default", "-fcall")], [("ACL", "SETUSER", "default", "+fcall")]),
}
"""By the name of Redis's error: the commands that cause it, and those that repair it."""


async def records(store: RedisStore, scope: Scope) -> bool:
    """Records a token again, and returns True if the record is accepted."""
    with suppress(StoreUnavailable):
        return await store.record(scope, 0, [1, 2], []) == 2
    return False


@pytest.mark.slow
async def test_what_redis_answers_instead_of_working_is_said_once_and_told(
    open_store, scope, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def try_one(name: str) -> str:
        (tmp_path / name).mkdir()
        with started_redis(tmp_path / name) as server:
            await is_of_no_use_for_a_while(name, server, open_store(server.url), scope)
            return f"127.0.0.1:{server.port}"

    addresses = await asyncio.gather(*map(try_one, OF_NO_USE))
    lines = capsys.readouterr().out.splitlines()
    for name, address in zip(OF_NO_USE, addresses, strict=True):
        said = [line.split("]")[1].split()[0] for line in lines if address in line]
        assert said == ["redis.connected", "redis.lost", "redis.connected"], name
        [lost] = [line for line in lines if address in line and "redis.lost" in line]
        assert name in lost


async def is_of_no_use_for_a_while(name: str, server: LocalRedis, store: RedisStore, scope: Scope) -> None:
    breaks, mends = OF_NO_USE[name]
    await store.start()
    assert await records(store, scope)
    async with Redis.from_url(server.url) as redis:
        for command in breaks:
            await redis.execute_command(*command)
        assert name in str(await until(lambda: problem_of(store)))
        with pytest.raises(StoreUnavailable, match=name):
            await store.record(scope, 2, [3], [])
        if name in ("READONLY", "NOREPLICAS"):  # lookups are answered as usual
            [found] = (await store.lookup(scope, [[1]], LIMITS)).continuations
            assert found.token_ids == (2,)
        for command in mends:
            await redis.execute_command(*command)
    await until(lambda: records(store, scope))
    assert await problem_of(store) == ""


async def problem_of(store: RedisStore) -> str:
    return (await store.health()).problem


async def test_a_disk_that_takes_no_data_is_no_use(own_redis, open_store, scope, tmp_path: Path) -> None:
    store = open_store(own_redis.url)
    (tmp_path / "data").mkdir()
    restart(own_redis, "--dir", str(tmp_path / "data"))
    async with Redis.from_url(own_redis.url) as redis:
        await redis.config_set("save", "3600 1")
        (tmp_path / "data").rmdir()
        await redis.bgsave()
        await until(lambda: has_failed_to_save(redis))
        await store.start()
        assert "MISCONF" in await problem_of(store)
        await redis.config_set("save", "")
        await until(lambda: records(store, scope))


async def has_failed_to_save(redis: Any) -> bool:
    return (await redis.info("persistence"))["rdb_last_bgsave_status"] == "err"


@pytest.mark.slow
async def test_a_server_that_still_reads_its_data_is_waited_for(own_redis, open_store, scope, tmp_path: Path) -> None:
    store = open_store(own_redis.url)
    (tmp_path / "data").mkdir()
    # A hundredth of a second for each key; now and then it answers in between.
    slow = ("--key-load-delay", "10000", "--loading-process-events-interval-bytes", "1024")
    restart(own_redis, "--dir", str(tmp_path / "data"), *slow)
    await store.start()
    assert await records(store, scope)
    async with Redis.from_url(own_redis.url) as redis:
        await redis.mset({f"key:{number}": "value" * 20 for number in range(100)})
        await redis.save()
    own_redis.stop()
    starting = asyncio.create_task(asyncio.to_thread(own_redis.start))
    await until(lambda: is_loading(store))
    await starting
    await until(lambda: records(store, scope))
    [found] = (await store.lookup(scope, [[1]], LIMITS)).continuations
    assert found.token_ids[0] == 2


async def is_loading(store: RedisStore) -> bool:
    return "LOADING" in await problem_of(store)


@pytest.fixture
def other_redis(tmp_path: Path):
    """Another server that the test may kill."""
    (tmp_path / "other").mkdir()
    with started_redis(tmp_path / "other") as server:
        yield server
        server.kill()  # it would wait for its replicas


@pytest.mark.slow
async def test_a_demoted_primary_is_left_by_all_connections(own_redis, other_redis, open_store, scope) -> None:
    # Like a managed Redis, whose name leads new connections elsewhere after a failover.
    async with forgetful(f"127.0.0.1:{own_redis.port}") as proxy:
        store = open_store(f"redis://{proxy.address}/0")
        await store.start()
        for _ in range(3):  # several at once, so that several connections are kept
            await asyncio.gather(
                *(store.record(Scope(scope.tokenizer_hash, f"{number}"), 0, [1, 2], []) for number in range(8)),
                *(store.lookup(scope, [[1]], LIMITS) for _ in range(8)),
            )
        async with Redis.from_url(own_redis.url) as old:
            await old.execute_command("REPLICAOF", "127.0.0.1", str(other_redis.port))
            proxy.lead_to(f"127.0.0.1:{other_redis.port}")
            await until(lambda: records(store, scope))
            assert await keys_of(other_redis.url, scope.tokenizer_hash) != []
            for _ in range(20):
                assert await records(store, scope)
                await store.lookup(scope, [[1]], LIMITS)
            assert not [each for each in await old.client_list() if each["cmd"].startswith("fcall")]


@pytest.mark.slow
async def test_a_primary_is_followed_as_sentinels_say(
    own_redis, other_redis, open_store, scope, tmp_path: Path
) -> None:
    async with Redis.from_url(other_redis.url) as replica:
        await replica.execute_command("REPLICAOF", "127.0.0.1", str(own_redis.port))
        await until(lambda: is_replicated(replica))
    async with sentinel_of(own_redis, tmp_path) as port, Redis(port=port) as sentinel:
        # The first Sentinel does not exist, so the next one is asked.
        store = open_store(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/first/0")
        await store.start()
        assert await records(store, scope)
        await until(lambda: knows_a_replica(sentinel))
        own_redis.kill()
        await until(lambda: records(store, scope))
        assert await keys_of(other_redis.url, scope.tokenizer_hash) != []


@asynccontextmanager
async def sentinel_of(redis: LocalRedis, folder: Path) -> AsyncIterator[int]:
    """Runs a Sentinel that calls this server "first". Yields its port."""
    port, configuration = free_port(), folder / "sentinel.conf"
    watched = f"sentinel monitor first 127.0.0.1 {redis.port} 1"
    configuration.write_text(f"{watched}\nsentinel down-after-milliseconds first 300\n")
    command = [find_program(), str(configuration), "--sentinel", "--port", str(port), "--bind", "127.0.0.1"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    try:
        async with Redis(port=port) as sentinel:
            await until(lambda: answers(sentinel))
        yield port
    finally:
        process.kill()
        await process.wait()


async def answers(redis: Any) -> bool:
    with suppress(RedisError):
        return bool(await redis.ping())
    return False


async def is_replicated(replica: Any) -> bool:
    return bool((await replica.info("replication"))["master_link_status"] == "up")


async def knows_a_replica(sentinel: Any) -> bool:
    return bool(await sentinel.sentinel_slaves("first"))


async def test_a_cluster_is_refused_in_one_sentence(own_redis, open_store, scope) -> None:
    restart(own_redis, "--cluster-enabled", "yes")
    store = open_store(own_redis.url)
    with pytest.raises(StoreUnavailable, match="node of a Redis Cluster"):
        await store.record(scope, 0, [1, 2], [])


LIES = [
    "return 'lies'",
    "return {7, 'x', {}}",
    "return {}",
    "return {'', 'x', string.rep('z', 40), '\\1\\99\\1\\0\\0aaaabbbb'}",
    "return redis.error_reply('ERR lies')",
    "return 4294967296",
]


@pytest.mark.parametrize("lie", LIES)
async def test_functions_that_answer_nonsense_are_replaced_and_no_call_is_to_blame(
    own_redis, serve: Callable[..., Awaitable[Any]], scope, lie: str
) -> None:
    served = await serve(own_redis.url)
    named = pb.Scope(tokenizer_hash=scope.tokenizer_hash, session_id="s")
    names = ("outrider_lookup_4", "outrider_record_4", "outrider_end_session_4", "outrider_switch_prior_4")
    lying = "#!lua name=outrider_ngrams_4\nlocal function lie() " + lie + " end\n"
    for name in names:
        flags = "flags = {'no-writes'}" if "lookup" in name else "flags = {}"
        lying += f"redis.register_function{{function_name = '{name}', callback = lie, {flags}}}\n"
    async with Redis.from_url(own_redis.url) as redis:
        await redis.function_load(lying, replace=True)
    [response] = await look_up(served.stub, pb.LookupRequest(scope=named, queries=[query(1)]))
    assert response.is_local
    request = pb.RecordRequest(scope=named, accepted_token_ids=[1, 2])
    await until(lambda: takes(served.stub, request))


async def takes(stub: Any, request: pb.RecordRequest) -> bool:
    try:
        return await record(stub, request) == [2]
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
    return False


async def test_whoever_asks_a_datastore_is_told_why_nothing_is_recorded(own_redis, serve, scope) -> None:
    served = await serve(own_redis.url)
    async with Redis.from_url(own_redis.url) as redis:
        await redis.config_set("min-replicas-to-write", "1")
        await until(lambda: told(served.stub))
    named = pb.Scope(tokenizer_hash=scope.tokenizer_hash, session_id="s")
    code, details = await refusal(served.stub.Record(iter([pb.RecordRequest(scope=named, accepted_token_ids=[1])])))
    assert (code, "NOREPLICAS" in details) == (grpc.StatusCode.UNAVAILABLE, True)


async def told(stub: Any) -> bool:
    info = await stub.GetInfo(pb.DatastoreServiceGetInfoRequest())
    return info.store == "" and "NOREPLICAS" in info.store_error
