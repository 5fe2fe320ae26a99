"""Streams in Redis, followed: what is there already, then what comes. Each follower has a connection of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from outrider.datastore import redis_layout as layout
from outrider.datastore.link import Command, CommandFailed, Link, LinkLost, Reply
from outrider.datastore.redis_client import RedisClient
from outrider.datastore.store import ALL_TENANTS, PriorChange, RingDocument, Scope, SharedRun

BLOCK_MS = 1000
"""Longest wait for an entry in one command. A Redis that has hung is noticed little later."""
READ_TIMEOUT_S = BLOCK_MS / 1000 + 1
CHANGES_PER_READ = 256
DOCUMENTS_PER_READ = 16


async def follow(client: RedisClient, scope: Scope) -> AsyncGenerator[PriorChange | SharedRun, None]:
    """See `Store.follow`."""
    priors = [layout.prior_key(scope, tenant) + ":changes" for tenant in dict.fromkeys((scope.tenant, ALL_TENANTS))]
    wider = layout.wider_keys(scope)
    async with _following(client) as link:
        last_ids: dict[bytes, bytes] = {}
        for key in priors:
            # Before the prior itself is read: no change between the two is missed.
            latest = await link.call(READ_TIMEOUT_S, "XREVRANGE", key, "+", "-", "COUNT", 1)
            last_ids[key.encode()] = latest[0][0] if latest else b"0"
        yield PriorChange()
        if wider:
            last_ids[wider[1].encode()] = b"0"
        while True:
            for key, entries in await _read(link, last_ids, CHANGES_PER_READ):
                if wider and key == wider[1].encode():
                    for _, (_, context, _, tokens) in entries:
                        yield SharedRun(layout.unpack(context), layout.unpack(tokens))
                else:
                    yield PriorChange()


async def follow_ring(client: RedisClient, scope: Scope, after: str) -> AsyncGenerator[RingDocument, None]:
    """See `Store.follow_ring`."""
    wider = layout.wider_keys(scope)
    if wider is None:
        raise ValueError("the scope of one session has no ring")
    last_ids = {wider[2].encode(): after.encode() or b"0"}
    document = b""
    async with _following(client) as link:
        while True:
            for _, entries in await _read(link, last_ids, DOCUMENTS_PER_READ):
                for entry_id, (_, _, _, is_open, _, tokens) in entries:
                    document += tokens
                    if is_open == b"0":
                        yield RingDocument(entry_id.decode(), layout.unpack(document))
                        document = b""


async def _read(link: Link, last_ids: dict[bytes, bytes], count: int) -> list[Reply]:
    """The next entries of streams, the last ids moved on; empty after BLOCK_MS without any."""
    command: Command = ("XREAD", "COUNT", count, "BLOCK", BLOCK_MS, "STREAMS", *last_ids, *last_ids.values())
    found: list[Reply] = await link.call(READ_TIMEOUT_S, *command) or []
    for key, entries in found:
        last_ids[key] = entries[-1][0]
    return found


@asynccontextmanager
async def _following(client: RedisClient) -> AsyncIterator[Link]:
    """A connection of the caller's own."""
    link: Link | None = None
    try:
        link = await client.connect_link()
        yield link
    except (LinkLost, CommandFailed) as error:
        raise client.unavailable(error) from error
    finally:
        if link is not None:
            link.close()
