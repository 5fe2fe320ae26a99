"""A real Redis, a store on it, and a scope that no other test shares."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack

import pytest

from outrider.datastore.redis_store import RedisStore
from outrider.datastore.store import Scope
from outrider_client.local_redis import LocalRedis, running_redis, started_redis


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

        def open_store(url: str, timeout_s: float = 5.0) -> RedisStore:
            store = RedisStore(url, max_match_len=3, session_ttl_s=60, timeout_s=timeout_s)
            stack.push_async_callback(store.close)
            return store

        yield open_store


@pytest.fixture
def store(open_store: Callable[..., RedisStore], redis_url: str) -> RedisStore:
    return open_store(redis_url)


@pytest.fixture
def scope() -> Scope:
    """A session of its own, of a tokenizer of its own: what an earlier run left in a shared Redis is not seen."""
    return Scope(f"test {uuid.uuid4().hex}", "a session")
