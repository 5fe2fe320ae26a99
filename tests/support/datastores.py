"""Datastores inside the test process, on a real Redis, and helpers that talk to both."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

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
from outrider_cli.local.redis import LocalRedis


def settings_for(redis_url: str, **fields: Any) -> DatastoreSettings:
    """Small sizes, and generous times: test machines are busy, and only tests about time measure it."""
    given: dict[str, Any] = {"max_match_len": 3, "redis_timeout_s": 5.0, "lookup_timeout_ms": 5000.0, **fields}
    return DatastoreSettings(redis_url=redis_url, **given)


@dataclass
class Served:
    """A server in this process."""

    address: str
    channel: grpc.aio.Channel
    stub: pb_grpc.DatastoreServiceAsyncStub
    replica: Replica
    servicer: DatastoreServicer


@asynccontextmanager
async def serving(settings: DatastoreSettings, *interceptors: grpc.aio.ServerInterceptor) -> AsyncIterator[Served]:
    """A server, and a stub for it."""
    store = RedisStore(settings)
    replica = Replica(store, settings)
    servicer = DatastoreServicer(replica, settings)
    server = grpc.aio.server(interceptors=[*interceptors, MalformedRequests()])
    pb_grpc.add_DatastoreServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await store.start()
    replica.start()
    await server.start()
    try:
        address = f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(address) as channel:
            yield Served(address, channel, pb_grpc.DatastoreServiceStub(channel), replica, servicer)
    finally:
        await server.stop(None)
        await replica.close()
        await store.close()


def restart(redis: LocalRedis, *options: str) -> None:
    """Restarts the server, now and later with these additional options."""
    redis.stop()
    script = redis._directory / "redis-with-options"
    script.write_text(f'#!/bin/sh\nexec "{redis._program}" "$@" {shlex.join(options)}\n')
    script.chmod(0o755)
    redis._program = str(script)
    redis.start()


@contextmanager
def hung(redis: LocalRedis) -> Iterator[None]:
    """Stalls its process while the block runs."""
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(redis.pid, signal.SIGCONT)


def full_keys(tokenizer_hash: str) -> str:
    """Returns the pattern of all keys of a test's own tokenizer."""
    return f"*{tokenizer_hash.removeprefix('test ')}*"


async def keys_of(redis_url: str, tokenizer_hash: str) -> list[str]:
    """Lists all keys of a tokenizer, without their common prefix."""
    async with Redis.from_url(redis_url) as redis:
        keys = [key async for key in redis.scan_iter(full_keys(tokenizer_hash))]
        return sorted(key.decode().partition("}:")[2] for key in keys)


async def load(store: RedisStore, scope: Scope, *documents: list[int], tenant: str = ALL_TENANTS) -> None:
    """Loads a prior."""
    await to_the_end(store.load_prior(scope.corpus_id(tenant), documents, PriorTable.build(documents, 3)))


def query(*context: int, **fields: Any) -> pb.Query:
    """Looks up one context."""
    return pb.Query(context_token_ids=context, **fields)


def sequence(*token_ids: int) -> pb.TokenSequence:
    """One document."""
    return pb.TokenSequence(token_ids=token_ids)


async def look_up(stub: Any, *requests: pb.LookupRequest) -> list[pb.LookupResponse]:
    """Returns all answers on one stream."""
    return [response async for response in stub.Lookup(iter(requests))]


async def record(stub: Any, *requests: pb.RecordRequest) -> list[int]:
    """Returns the session's position after each request on one stream."""
    return [response.num_tokens async for response in stub.Record(iter(requests))]


async def load_prior(stub: Any, *requests: pb.LoadPriorRequest) -> list[pb.LoadPriorResponse]:
    """Returns all answers on one stream."""
    return [response async for response in stub.LoadPrior(iter(requests))]


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Returns the error of an RPC. Reads streams to their end."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (to_the_end(call) if hasattr(call, "__aiter__") else call)
    return caught.value.code(), caught.value.details() or ""


async def to_the_end(stream: Any, at_each: Callable[[], object] | None = None) -> None:
    """Reads a stream, and does something at each of its items."""
    async for _ in stream:
        done = at_each() if at_each else None
        if asyncio.iscoroutine(done):
            await done
