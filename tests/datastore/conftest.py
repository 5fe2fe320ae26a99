"""A real Redis, stores and servers on it, and a scope that no other test shares."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

import pytest

from outrider.datastore.redis.store import RedisStore
from outrider.datastore.types import Scope
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc as pb_grpc
from outrider.v1 import types_pb2
from outrider_cli.local.redis import LocalRedis, running_redis, started_redis
from tests.support.datastores import Served, serving, settings_for


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


@pytest.fixture
async def served(serve, redis_url) -> Served:
    return await serve(redis_url)


@pytest.fixture
def stub(served: Served) -> pb_grpc.DatastoreServiceAsyncStub:
    return served.stub


@pytest.fixture
def scope() -> Scope:
    """A session of a tokenizer of its own, so that data of earlier runs in a shared Redis are not seen."""
    return Scope(f"test {uuid.uuid4().hex}", "a session")


@pytest.fixture
def contributing(scope) -> pb.Scope:
    """A message's scope for that session, which shares its records with its tenant."""
    return pb.Scope(
        tokenizer_hash=scope.tokenizer_hash,
        session_id=scope.session_id,
        retrieval_scope=types_pb2.RETRIEVAL_SCOPE_TENANT,
        contribute=True,
    )
