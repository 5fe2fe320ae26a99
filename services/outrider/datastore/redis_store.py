"""The n-gram tiers in Redis or Valkey (7.0 or later: Functions). The only file that speaks to Redis.

Layout. Names in keys are percent-encoded, so that none can reach into another's scope:

    outrider:1:{TOKENIZER:CORPUS}:prior                   hash; persistent
    outrider:1:{TOKENIZER:CORPUS}:s:SESSION:dynamic       hash; expires session_ttl_s after the last record
    outrider:1:{TOKENIZER:CORPUS}:s:SESSION:rejected      hash; expires likewise
    outrider:1:{TOKENIZER:CORPUS}:loading:UUID            hash; a prior on its way in, renamed to `prior` at the end
    outrider:1:corpora                                    hash; TOKENIZER:CORPUS -> number of tokens

A tier is one hash, so that a session is deleted, and expires, with two keys however long it was. Token ids are 4 bytes,
little-endian.

    field                          value
    n-gram (4 bytes a token)       followers, 8 bytes each: token id, count; the most counted first, then the latest
    "t"                            the last max_match_len tokens of the stream (dynamic only): n-grams span records
    "!" + n-gram                   tokens refused after it, the latest first (rejected only)

One lookup, or one record, is one call of a Function and so one round trip. In a Redis Cluster a Function may only touch
keys of one slot, hence the hash tag {TOKENIZER:CORPUS}: a session lives where its prior does. The price is that one
corpus is served by one shard; load it under several names to spread it.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import resources
from typing import Any
from urllib.parse import quote, unquote

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from outrider.core.ngrams import FANOUT, MAX_FOLLOWERS, NOTHING, Continuation, TokenId
from outrider.core.params import Source, check
from outrider.datastore.store import Corpus, CorpusNotFound, Rejection, Scope, StoreUnavailable

ROOT = "outrider:1:"
CORPORA = ROOT + "corpora"
TIERS = (Source.PRIOR, Source.DYNAMIC, Source.REJECTED)

TOKENS_PER_CALL = 64
"""Tokens learned in one call of a Function. Redis answers nobody else meanwhile: about 10 us a token."""

REJECTIONS_PER_CALL = 16
"""Refused drafts learned in one call."""

LOADING_TTL_S = 600
"""A prior whose loading stops halfway is gone after this time."""


class RedisStore:
    """Implements `Store`. Connects when used, anew when Redis is back; loads the Functions where they are missing."""

    def __init__(self, url: str, *, max_match_len: int, session_ttl_s: int, timeout_s: float) -> None:
        """`max_match_len` is the longest n-gram recorded; a command, and connecting, may take `timeout_s` each."""
        self._redis: Any = Redis.from_url(  # Any: the types of its commands are those of both clients, blocking and not
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # A draft that comes late is worth nothing: whoever asks decodes without, and asks again.
            retry=Retry(NoBackoff(), 0),
        )
        self._max_match_len = max_match_len
        self._session_ttl_s = session_ttl_s
        where = self._redis.connection_pool.connection_kwargs  # not the URL: it may hold a password
        self._address = where.get("path") or f"{where.get('host', 'localhost')}:{where.get('port', 6379)}"

    async def lookup(
        self, scope: Scope, contexts: Sequence[Sequence[TokenId]], max_match_len: int, max_continuation_len: int
    ) -> list[Continuation]:
        keys = [_tag(scope) + "prior", *_session_keys(scope)]
        tails = (_pack(context[-max_match_len:]) for context in contexts)
        call = ("FCALL_RO", "outrider_lookup_1", len(keys), *keys, max_match_len, max_continuation_len, *FANOUT, *tails)
        replies = await self._call(*call)
        return [_unpack(reply) for reply in replies]

    async def record(self, scope: Scope, accepted: Sequence[TokenId], rejections: Sequence[Rejection]) -> None:
        keys = _session_keys(scope)
        head = ("FCALL", "outrider_record_1", len(keys), *keys, self._max_match_len, MAX_FOLLOWERS, self._session_ttl_s)
        # One call after the other, not a pipeline: Redis would work that off in one go, and lookups would wait for it.
        for start in range(0, len(accepted), TOKENS_PER_CALL):
            await self._call(*head, _pack(accepted[start : start + TOKENS_PER_CALL]))
        for start in range(0, len(rejections), REJECTIONS_PER_CALL):
            lists = [
                _pack(token_ids)
                for rejection in rejections[start : start + REJECTIONS_PER_CALL]
                for token_ids in (rejection.context, rejection.rejected, rejection.continuation)
            ]
            await self._call(*head, b"", *lists)

    async def end_session(self, scope: Scope) -> None:
        await self._call("UNLINK", *_session_keys(scope))

    async def load_prior(self, scope: Scope, documents: AsyncIterator[Sequence[TokenId]]) -> int:
        loading = f"{_tag(scope)}loading:{uuid.uuid4().hex}"
        head = ("FCALL", "outrider_load_1", 1, loading, self._max_match_len, MAX_FOLLOWERS, LOADING_TTL_S)
        num_tokens = 0
        try:
            async for document in documents:
                for start in range(0, len(document), TOKENS_PER_CALL):
                    before = _pack(document[max(0, start - self._max_match_len) : start])
                    await self._call(*head, before, _pack(document[start : start + TOKENS_PER_CALL]))
                num_tokens += len(document)
            found = await self._call("PERSIST", loading)
            check(bool(found), "documents", "runs of two tokens or more", f"{num_tokens} tokens in all")
            await self._call("RENAME", loading, _tag(scope) + "prior")
        except BaseException:
            await self._forget(loading)
            raise
        await self._call("HSET", CORPORA, _name(scope), num_tokens)
        return num_tokens

    async def list_corpora(self) -> list[Corpus]:
        fields = await self._call("HGETALL", CORPORA)
        corpora = []
        for field, num_tokens in fields.items():
            tokenizer_hash, name = (unquote(part) for part in field.decode().split(":"))
            corpora.append(Corpus(tokenizer_hash, name, int(num_tokens)))
        return sorted(corpora, key=lambda corpus: (corpus.tokenizer_hash, corpus.name))

    async def delete_corpus(self, scope: Scope) -> None:
        # Listed until it is gone: a call that fails halfway can be repeated.
        await self._call("UNLINK", _tag(scope) + "prior")
        listed = await self._call("HDEL", CORPORA, _name(scope))
        if not listed:
            raise CorpusNotFound(f"there is no corpus {scope.corpus!r} for tokenizer {scope.tokenizer_hash!r}")

    async def describe(self) -> str:
        info = await self._call("INFO", "server")
        product = info.get("server_name", "redis")
        return f"{product} {info.get(f'{product}_version', info['redis_version'])}"

    async def close(self) -> None:
        await self._redis.aclose()

    async def _call(self, *command: Any) -> Any:
        """One command, one round trip. A Redis that came back empty gets the Functions first."""
        with self._reachable():
            try:
                return await self._redis.execute_command(*command)
            except ResponseError as error:
                if "Function not found" not in str(error):
                    raise
            source = resources.files(__package__).joinpath("ngrams.lua").read_text()
            await self._redis.execute_command("FUNCTION", "LOAD", "REPLACE", source)
            return await self._redis.execute_command(*command)

    async def _forget(self, key: str) -> None:
        with suppress(StoreUnavailable):  # it expires by itself
            await self._call("UNLINK", key)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError) as error:
            raise StoreUnavailable(
                f"Redis at {self._address} cannot be used: {error or type(error).__name__}"
            ) from error


def _name(scope: Scope) -> str:
    return f"{quote(scope.tokenizer_hash, safe='')}:{quote(scope.corpus, safe='')}"


def _tag(scope: Scope) -> str:
    return f"{ROOT}{{{_name(scope)}}}:"


def _session_keys(scope: Scope) -> list[str]:
    if not scope.session_id:
        return []
    session = f"{_tag(scope)}s:{quote(scope.session_id, safe='')}"
    return [session + ":dynamic", session + ":rejected"]


def _pack(token_ids: Sequence[TokenId]) -> bytes:
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def _unpack(reply: bytes) -> Continuation:
    """Match length, index of the tier from 1, then parent offset, token id and count of each node; empty = nothing."""
    if not reply:
        return NOTHING
    match_len, tier, *nodes = struct.unpack(f"<{len(reply) // 4}I", reply)
    return Continuation(match_len, TIERS[tier - 1], tuple(nodes[0::3]), tuple(nodes[1::3]), tuple(nodes[2::3]))
