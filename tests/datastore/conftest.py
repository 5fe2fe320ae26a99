"""A real Redis, stores and servers on it, and a scope that no other test shares."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc
import pytest
from redis.asyncio import Redis

from outrider.core.retrieval.prior import PriorTable
from outrider.datastore.redis.store import RedisStore
from outrider.datastore.replica import Replica
from outrider.datastore.servicer import DatastoreServicer
from outrider.datastore.settings import DatastoreSettings
from outrider.datastore.types import ALL_TENANTS, Scope
from outrider.server.malformed import MalformedRequests
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc as pb_grpc
from outrider_cli.local.redis import LocalRedis, running_redis, started_redis

WAIT_S = 10.0
"""Longest that a test waits for what must happen soon."""


def settings_for(redis_url: str, **fields) -> DatastoreSettings:
    """Small sizes; and time: a test machine is busy, and only tests about time measure it."""
    given = {"max_match_len": 3, "redis_timeout_s": 5.0, "lookup_timeout_ms": 5000.0, **fields}
    return DatastoreSettings(redis_url=redis_url, **given)


@dataclass
class Served:
    """A server in this process."""

    stub: pb_grpc.DatastoreServiceAsyncStub
    replica: Replica
    servicer: DatastoreServicer


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def own_redis(tmp_path) -> Iterator[LocalRedis]:
    """A server that the test may kill."""
    with started_redis(tmp_path) as server:
        yield server


@pytest.fixture
async def open_store() -> AsyncIterator[Callable[..., RedisStore]]:
    """Makes stores that are closed when the test is over."""
    async with AsyncExitStack() as stack:

        def open_store(url: str, **fields) -> RedisStore:
            store = RedisStore(settings_for(url, **fields))
            stack.push_async_callback(store.close)
            return store

        yield open_store


@pytest.fixture
def store(open_store: Callable[..., RedisStore], redis_url: str) -> RedisStore:
    return open_store(redis_url)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[Served]]]:
    """Starts servers that are stopped when the test is over."""
    async with AsyncExitStack() as stack:

        async def serve(url: str, **fields) -> Served:
            return await stack.enter_async_context(serving(settings_for(url, **fields)))

        yield serve


@asynccontextmanager
async def serving(settings: DatastoreSettings) -> AsyncIterator[Served]:
    """A server, and a stub for it."""
    store = RedisStore(settings)
    replica = Replica(store, settings)
    servicer = DatastoreServicer(replica, settings)
    server = grpc.aio.server(interceptors=[MalformedRequests()])
    pb_grpc.add_DatastoreServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await store.start()
    replica.start()
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Served(pb_grpc.DatastoreServiceStub(channel), replica, servicer)
    finally:
        await server.stop(None)
        await replica.close()
        await store.close()


@pytest.fixture
async def served(serve, redis_url) -> Served:
    return await serve(redis_url)


@pytest.fixture
def stub(served: Served) -> pb_grpc.DatastoreServiceAsyncStub:
    return served.stub


@pytest.fixture
def scope() -> Scope:
    """A session of its own, of a tokenizer of its own: what an earlier run left in a shared Redis is not seen."""
    return Scope(f"test {uuid.uuid4().hex}", "a session")


def restart(redis: LocalRedis, *options: str) -> None:
    """Starts the server anew, now and later with these options in addition."""
    redis.stop()
    script = redis._directory / "redis-with-options"
    script.write_text(f'#!/bin/sh\nexec "{redis._program}" "$@" {shlex.join(options)}\n')
    script.chmod(0o755)
    redis._program = str(script)
    redis.start()


@contextmanager
def hung(redis: LocalRedis) -> Iterator[None]:
    """Its process stands still while the block runs."""
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(redis.pid, signal.SIGCONT)


async def until(condition: Callable[[], Awaitable[object]]) -> object:
    """Waits until a condition gives something true, and returns that."""
    async with asyncio.timeout(WAIT_S):
        while not (found := await condition()):  # noqa: ASYNC110 - what is waited for is in another process
            await asyncio.sleep(0.005)
        return found


async def load(store: RedisStore, scope: Scope, *documents: list[int], tenant: str = ALL_TENANTS) -> None:
    """Loads a prior."""
    await to_the_end(store.load_prior(scope.corpus_id(tenant), documents, PriorTable.build(documents, 3)))


async def keys_of(redis_url: str, tokenizer_hash: str) -> list[str]:
    """All keys of a tokenizer, without what they have in common."""
    async with Redis.from_url(redis_url) as redis:
        name = tokenizer_hash.removeprefix("test ")
        return sorted([key.decode().partition("}:")[2] async for key in redis.scan_iter(f"*{name}*")])


async def look_up(stub, *requests: pb.LookupRequest) -> list[pb.LookupResponse]:
    """All answers on one stream."""
    return [response async for response in stub.Lookup(iter(requests))]


async def record(stub, *requests: pb.RecordRequest) -> list[int]:
    """The session's position after each request on one stream."""
    return [response.num_tokens async for response in stub.Record(iter(requests))]


async def load_prior(stub, *requests: pb.LoadPriorRequest) -> list[pb.LoadPriorResponse]:
    """All answers on one stream."""
    return [response async for response in stub.LoadPrior(iter(requests))]


async def refusal(call) -> tuple[grpc.StatusCode, str]:
    """How an RPC failed. Streams are read to their end."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (to_the_end(call) if hasattr(call, "__aiter__") else call)
    return caught.value.code(), caught.value.details()


async def to_the_end(stream, at_each: Callable[[], object] | None = None) -> None:
    """Reads a stream, doing something at each of its items."""
    async for _ in stream:
        done = at_each() if at_each else None
        if asyncio.iscoroutine(done):
            await done
