"""Streams in Redis, followed: what is there already, then what comes. Each follower has a connection of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from outrider.datastore.redis import layout
from outrider.datastore.redis.client import RedisClient
from outrider.datastore.types import ALL_TENANTS, PriorChange, RingDocument, Scope, SharedRun

BLOCK_MS = 1000
"""Longest wait for an entry in one command. A Redis that has hung is noticed little later."""
READ_TIMEOUT_S = BLOCK_MS / 1000 + 1
CHANGES_PER_READ = 256
DOCUMENTS_PER_READ = 16

_Entries = list[tuple[bytes, dict[bytes, bytes]]]


async def follow(client: RedisClient, scope: Scope) -> AsyncGenerator[PriorChange | SharedRun, None]:
    """See `Store.follow`."""
    priors = [layout.prior_key(scope, tenant) + ":changes" for tenant in dict.fromkeys((scope.tenant, ALL_TENANTS))]
    wider = layout.wider_keys(scope)
    last_ids: dict[bytes, bytes] = {}
    for changes in priors:
        # Before the prior itself is read: no change between the two is missed.
        with client.reaching():
            async with asyncio.timeout(READ_TIMEOUT_S):
                latest: _Entries = await client.unhurried.xrevrange(changes, count=1)
        last_ids[changes.encode()] = latest[0][0] if latest else b"0"
    yield PriorChange()
    if wider:
        last_ids[wider[1].encode()] = b"0"
    while True:
        found = await _read(client, last_ids, CHANGES_PER_READ)
        if not found:
            yield PriorChange()  # a Redis that was emptied says nothing
        for key, entries in found:
            if wider and key == wider[1].encode():
                for _, run in entries:
                    yield SharedRun(layout.unpack(run[b"context"]), layout.unpack(run[b"tokens"]))
            else:
                yield PriorChange()


async def follow_ring(client: RedisClient, scope: Scope, after: str) -> AsyncGenerator[RingDocument, None]:
    """See `Store.follow_ring`."""
    wider = layout.wider_keys(scope)
    if wider is None:
        raise ValueError("the scope of one session has no ring")
    last_ids = {wider[2].encode(): after.encode() or b"0"}
    document = b""
    while True:
        for _, entries in await _read(client, last_ids, DOCUMENTS_PER_READ):
            for entry_id, piece in entries:
                document += piece[b"tokens"]
                if piece[b"open"] == b"0":
                    yield RingDocument(entry_id.decode(), layout.unpack(document))
                    document = b""


async def _read(client: RedisClient, last_ids: dict[bytes, bytes], count: int) -> list[tuple[bytes, _Entries]]:
    """The next entries of streams, the last ids moved on; empty after BLOCK_MS without any."""
    with client.reaching():
        async with asyncio.timeout(READ_TIMEOUT_S):
            found: list[Any] = await client.unhurried.xread(last_ids, count=count, block=BLOCK_MS)
    for key, entries in found:
        last_ids[key] = entries[-1][0]
    return [(key, entries) for key, entries in found]
