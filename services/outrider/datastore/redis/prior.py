"""Prior corpora in Redis: load, delete, list, read."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from itertools import islice

from outrider.core.retrieval.ngrams import TokenId
from outrider.core.retrieval.prior import PriorTable
from outrider.datastore.redis import layout
from outrider.datastore.redis.client import Command, RedisClient
from outrider.datastore.types import Corpus, CorpusNotFound, Prior, Scope, StoreFull, StoreUnavailable

COMMANDS_PER_TRIP = 8
"""Commands of FIELDS_PER_CALL n-grams sent together. Redis takes others' turns between them."""


async def load(
    client: RedisClient, scope: Scope, tenant: str, documents: Sequence[Sequence[TokenId]], table: PriorTable
) -> AsyncGenerator[int, None]:
    """See `Store.load_prior`."""
    loading = layout.loading_key(scope, uuid.uuid4().hex)
    prior = layout.prior_key(scope, tenant)
    stored = 0
    try:
        corpus = await asyncio.to_thread(layout.packed_documents, documents)
        await client.call("SET", loading + ":documents", corpus, "EX", layout.LOADING_TTL_S)
        for commands, num_ngrams in _pieces(loading, table):
            await client.call_all(commands)
            stored += num_ngrams
            yield stored
        # An index only: it may name what does not exist, but never lack what does.
        await client.call("SADD", layout.CORPORA, layout.corpus_entry(scope, tenant))
        keys = (loading, loading + ":documents", prior, *(prior + kind for kind in (":documents", ":info", ":changes")))
        num_tokens, version = sum(map(len, documents)), uuid.uuid4().hex
        numbers = (table.num_ngrams, num_tokens, version, layout.NUM_PRIOR_CHANGES)
        if not await client.call("FCALL", "outrider_switch_prior_2", len(keys), *keys, *numbers):
            raise client.unavailable("it has lost a part of the corpus while it was loaded")
    except BaseException:
        with suppress(StoreUnavailable, StoreFull):  # it expires by itself
            await client.call("UNLINK", loading, loading + ":documents")
        raise


def _pieces(loading: str, table: PriorTable) -> Iterator[tuple[list[Command], int]]:
    """The commands that store a table, some at a time, and of how many n-grams they are."""
    entries = iter(table.entries())
    while True:
        commands: list[Command] = []
        num_ngrams = 0
        for _ in range(COMMANDS_PER_TRIP):
            if not (fields := [part for entry in islice(entries, layout.FIELDS_PER_CALL) for part in entry]):
                break
            commands.append(("HSET", loading, *fields))
            num_ngrams += len(fields) // 2
        if not commands:
            return
        # With each piece: Redis may have evicted the key since the last one.
        commands.append(("EXPIRE", loading, layout.LOADING_TTL_S))
        yield commands, num_ngrams


async def delete(client: RedisClient, scope: Scope, tenant: str, changes_ttl_s: int) -> None:
    """See `Store.delete_prior`."""
    prior = layout.prior_key(scope, tenant)
    keys = (prior, *(prior + kind for kind in (":documents", ":info", ":changes")))
    was_there = await client.call("FCALL", "outrider_delete_prior_2", len(keys), *keys, changes_ttl_s)
    await client.call("SREM", layout.CORPORA, layout.corpus_entry(scope, tenant))
    if not was_there:
        raise CorpusNotFound(scope)


async def list_corpora(client: RedisClient) -> list[Corpus]:
    """See `Store.list_corpora`."""
    names = [layout.corpus_of(entry) for entry in await client.call("SMEMBERS", layout.CORPORA)]
    infos = await client.call_all(
        [
            ("HMGET", layout.prior_key(Scope(tokenizer_hash, corpus=corpus), tenant) + ":info", *_NUMBERS)
            for tokenizer_hash, corpus, tenant in names
        ]
    )
    corpora = [
        Corpus(*name, *map(int, numbers)) for name, numbers in zip(names, infos, strict=True) if None not in numbers
    ]
    return sorted(corpora, key=lambda corpus: (corpus.tokenizer_hash, corpus.name, corpus.tenant))


_NUMBERS = ("num_tokens", "num_ngrams")


async def versions(client: RedisClient, priors: Sequence[tuple[Scope, str]]) -> list[str | None]:
    """See `Store.prior_versions`."""
    commands = [("HGET", layout.prior_key(scope, tenant) + ":info", "version") for scope, tenant in priors]
    return [found.decode() if found else None for found in await client.call_all(commands)]


async def read(client: RedisClient, scope: Scope, tenant: str) -> Prior | None:
    """See `Store.read_prior`."""
    prior = layout.prior_key(scope, tenant)
    commands = (("HGET", prior + ":info", "version"), ("GET", prior + ":documents"))
    version, corpus = await client.call_all(commands, together=True)
    return await asyncio.to_thread(layout.prior_from, version, corpus)
