"""The tiers in Redis or Valkey, 7.0 or later. `layout` has the keys and values, ngrams.lua what Redis computes itself.

Redis runs one command at a time, and a Function call is one command: while it runs, every other caller waits. Long work
is therefore cut into calls of bounded length (the `..._PER_CALL` of `layout`):

- A lookup of up to CONTEXTS_PER_CALL contexts is one call; several calls share one round trip.
- A record is one call for every TOKENS_PER_CALL tokens, one round trip each.
- A prior is stored under a temporary name, piece by piece, and renamed by one call at the end.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice

from outrider.core.params import Source
from outrider.core.retrieval.ngrams import FANOUT, MAX_FOLLOWERS, TokenId
from outrider.core.retrieval.prior import PriorTable
from outrider.datastore.redis import layout
from outrider.datastore.redis.client import Command, RedisClient
from outrider.datastore.settings import DatastoreSettings
from outrider.datastore.types import (
    CorpusId,
    CorpusInfo,
    CorpusNotFound,
    Health,
    Limits,
    LookupAnswer,
    Prior,
    PriorChange,
    Rejection,
    RingDocument,
    Scope,
    SharedRun,
    StoreFull,
    StoreUnavailable,
)

FANOUT_DIGITS = "".join(map(str, FANOUT))

COMMANDS_PER_TRIP = 8
"""Commands of FIELDS_PER_CALL n-grams that are sent together while a prior is stored."""

BLOCK_MS = 1000
"""Longest wait for a stream entry in one command."""
READ_TIMEOUT_S = BLOCK_MS / 1000 + 1
"""Time after which a Redis that answers no stream command counts as hung."""
CHANGES_PER_READ = 256
DOCUMENTS_PER_READ = 16

_Entries = list[tuple[bytes, dict[bytes, bytes]]]
"""Entries of a stream: id, and values by field."""


class RedisStore:
    """Reads and writes the tiers by scope.

    Every method but `health` raises StoreUnavailable; those that write raise StoreFull, too.
    """

    def __init__(self, settings: DatastoreSettings) -> None:
        """Opens no connection yet: `start` does, or the first use."""
        self._settings = settings
        self._client = RedisClient(
            settings.redis_url,
            lookup_timeout_s=settings.lookup_timeout_ms / 1000,
            timeout_s=settings.redis_timeout_s,
            memory_budget_bytes=settings.memory_budget_mb << 20,
        )

    async def start(self) -> None:
        """Connects if Redis is reachable, and again whenever it is back."""
        await self._client.start()

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.close()

    @property
    def num_errors(self) -> int:
        """Calls that Redis did not answer, or refused."""
        return self._client.num_errors

    async def health(self) -> Health:
        """Reads the state of the server. Never raises."""
        try:
            with self._client.errors_translated():
                info = await self._client.call("INFO")
                # Valkey also reports a `redis_version`, for compatibility, next to its own version.
                product = info.get("server_name", "redis")
                version = info.get(f"{product}_version") or info["redis_version"]
                used, limit, num_evicted = (int(info[name]) for name in ("used_memory", "maxmemory", "evicted_keys"))
                return Health(f"{product} {version}", used, limit, num_evicted)
        except (StoreUnavailable, StoreFull) as error:
            return Health("", problem=self._client.problem or str(error))

    # Sessions and lookups ---------------------------------------------------------------------------------------------

    async def lookup(self, scope: Scope, contexts: Sequence[Sequence[TokenId]], limits: Limits) -> LookupAnswer:
        """Looks contexts up in the n-gram tiers.

        Gives up after the lookup timeout, and at once while Redis is known not to answer.
        """
        longest, step = self._settings.max_match_len, layout.CONTEXTS_PER_CALL
        head = _lookup_head(scope, limits, longest)
        tails = [layout.pack(context[-longest:]) for context in contexts]
        # A lookup without contexts is sent, too: its reply says which prior there is.
        replies = await self._client.look_up([(*head, *tails[i : i + step]) for i in range(0, len(tails) or 1, step)])
        own, of_all = scope.corpus_ids
        with self._client.errors_translated():
            continuations = [layout.continuation_from(answer) for reply in replies for answer in reply[1:]]
            if len(continuations) != len(contexts):
                raise ValueError(f"{len(continuations)} answers to {len(contexts)} contexts")
            return LookupAnswer(continuations, {b"1": own, b"2": of_all}.get(replies[0][0]))

    async def record(
        self, scope: Scope, base_len: int, accepted: Sequence[TokenId], rejections: Sequence[Rejection]
    ) -> int:
        """Adds the session's tokens from position base_len on, and its refused drafts.

        Tokens that are there already are not added again, nor are refused drafts that come only with such tokens: a
        request that is sent twice counts once.

        Returns:
            The session's position afterwards. If it is less than base_len, there was a gap, and nothing is stored.
        """
        head, limits = _record_head(scope), self._record_limits
        # An empty range is falsy. There is one call even without tokens and drafts: its reply is the position.
        starts = range(0, len(accepted), layout.TOKENS_PER_CALL) or range(1)
        firsts = range(0, len(rejections), layout.REJECTIONS_PER_CALL) or range(1)
        # One call after the other, not a pipeline: Redis would run a pipeline at one go, while lookups wait. Calls for
        # further drafts begin where the tokens end, and so carry none.
        for number, start in enumerate((*starts, *([len(accepted)] * (len(firsts) - 1)))):
            tokens = accepted[start : start + layout.TOKENS_PER_CALL]
            # Refused drafts come with the last tokens, and after them. If the request is cut off before, the missing
            # tokens show that it has to be sent again; missing drafts would not show.
            first = (number + 1 - len(starts)) * layout.REJECTIONS_PER_CALL
            refused = rejections[first : first + layout.REJECTIONS_PER_CALL] if first >= 0 else ()
            runs = (tokens, *(run for r in refused for run in (r.context, r.rejected)))
            packed_tokens, *packed_lists = map(layout.pack, runs)
            arguments = (base_len + start, packed_tokens, *limits, *packed_lists)
            with self._client.errors_translated():
                found, is_repeated = await self._client.call(*head, *arguments)
                position = layout.position_from(found)
            is_last_token = number + 1 >= len(starts)
            if position < base_len + start or (is_repeated and is_last_token):
                break
        return position

    async def end_session(self, scope: Scope, base_len: int) -> int:
        """Deletes the session's tiers; if it contributes, its tokens become a document of the ring.

        A session that is not there is no error: Redis may have evicted it, or a repeated request ended it before.

        Returns:
            The session's position. If it is not base_len, nothing is done.
        """
        settings = self._settings
        keys = [*layout.session_keys(scope)]
        if scope.contribute and (shared := layout.shared_keys(scope)):
            keys.append(shared.ring)
        entry_tokens = min(layout.RING_ENTRY_TOKENS, settings.ring_capacity)
        ring = (settings.ring_capacity, entry_tokens, settings.shared_ttl_s)
        with self._client.errors_translated():
            found = await self._client.call("FCALL", "outrider_end_session_4", len(keys), *keys, base_len, *ring)
            return layout.position_from(found)

    @property
    def _record_limits(self) -> tuple[int, ...]:
        settings = self._settings
        session = (settings.max_match_len, MAX_FOLLOWERS, settings.session_ttl_s, settings.max_session_tokens)
        return (*session, settings.shared_ttl_s, settings.max_num_shared_ngrams, settings.max_num_shared_changes)

    # Priors -----------------------------------------------------------------------------------------------------------

    async def corpus_exists(self, scope: Scope) -> bool:
        """Returns True if there is a prior for the scope: the tenant's own, or that of all tenants."""
        return bool(await self._client.call("EXISTS", *(layout.prior_key(corpus) for corpus in scope.corpus_ids)))

    async def load_prior(
        self, corpus: CorpusId, documents: Sequence[Sequence[TokenId]], table: PriorTable
    ) -> AsyncGenerator[int, None]:
        """Replaces the prior of that name, and yields from time to time the number of n-grams stored.

        The prior is in use when the iterator ends. If anything is raised, or the caller closes the iterator halfway,
        the former prior stays, and the new one is discarded.

        Args:
            corpus: Name of the prior.
            documents: The corpus itself, for watchers and for the copies that replicas hold.
            table: The n-grams that were counted in it.
        """
        client = self._client
        loading = layout.loading_key(corpus, uuid.uuid4().hex)
        num_stored = 0
        try:
            packed = await asyncio.to_thread(layout.packed_documents, documents)
            await client.call("SET", loading + ":documents", packed, "EX", layout.LOADING_TTL_S)
            for commands, num_ngrams in _store_commands(loading, table):
                await client.call_all(commands)
                num_stored += num_ngrams
                yield num_stored
            keys = (loading, loading + ":documents", *layout.prior_keys(corpus))
            num_tokens, version = sum(map(len, documents)), uuid.uuid4().hex
            numbers = (table.num_ngrams, num_tokens, version, layout.NUM_PRIOR_CHANGES)
            switch = ("FCALL", "outrider_switch_prior_4", len(keys), *keys, *numbers)
            # In one transaction: the index may name a prior that does not exist, but must never lack one that does, and
            # a deletion could come in between. Not in the Function itself, whose keys must share a slot.
            add = ("SADD", layout.CORPORA, layout.corpus_entry(corpus))
            with client.errors_translated():
                is_there, _ = await client.call_all([switch, add], is_transaction=True)
            # The Function compares the number of n-grams: keys that expire are evicted under volatile-lfu, and a
            # prior has an expiry until it is complete.
            if not is_there:
                raise client.unavailable("it has lost a part of the corpus while it was loaded")
        except BaseException:  # GeneratorExit and CancelledError among them
            with suppress(StoreUnavailable, StoreFull):  # it expires by itself
                await client.call("UNLINK", loading, loading + ":documents")
            raise

    async def delete_prior(self, corpus: CorpusId) -> None:
        """Deletes a prior. Raises CorpusNotFound."""
        keys = layout.prior_keys(corpus)
        ttl_s = self._settings.shared_ttl_s
        delete = ("FCALL", "outrider_delete_prior_4", len(keys), *keys, ttl_s)
        # In this order: a prior that is loaded in between is deleted as well. After the Function, it would lose only
        # its entry. Not as a transaction, which a full Redis refuses.
        with self._client.errors_translated():
            _, was_there = await self._client.call_all([("SREM", layout.CORPORA, layout.corpus_entry(corpus)), delete])
        if not was_there:
            raise CorpusNotFound(corpus.tokenizer_hash, corpus.corpus)

    async def list_corpora(self) -> list[CorpusInfo]:
        """Lists the stored priors by tokenizer, name and tenant."""
        with self._client.errors_translated():
            corpora = [layout.corpus_of(entry) for entry in await self._client.call("SMEMBERS", layout.CORPORA)]
            if not corpora:
                return []
            infos = await self._client.call_all(
                [("HMGET", layout.prior_key(corpus) + ":info", "num_tokens", "num_ngrams") for corpus in corpora]
            )
            listed = [
                CorpusInfo(corpus, *map(int, numbers))
                for corpus, numbers in zip(corpora, infos, strict=True)
                if None not in numbers
            ]
        return sorted(listed, key=lambda info: (info.id.tokenizer_hash, info.id.corpus, info.id.tenant))

    async def prior_versions(self, corpora: Sequence[CorpusId]) -> list[str | None]:
        """Returns the versions of priors, in order. None means that there is no such prior."""
        commands = [("HGET", layout.prior_key(corpus) + ":info", "version") for corpus in corpora]
        with self._client.errors_translated():
            return [found.decode() if found else None for found in await self._client.call_all(commands)]

    async def read_prior(self, corpus: CorpusId) -> Prior | None:
        """Returns a prior's version and documents, or None if there is no such prior."""
        prior = layout.prior_key(corpus)
        commands = (("HGET", prior + ":info", "version"), ("GET", prior + ":documents"))
        with self._client.errors_translated():
            # In one transaction: a load in between would pair the old version with the new documents.
            version, packed = await self._client.call_all(commands, is_transaction=True)
            if not version or packed is None:
                return None
            return Prior(version.decode(), await asyncio.to_thread(layout.unpacked_documents, packed))

    # Streams ----------------------------------------------------------------------------------------------------------

    async def follow(self, scope: Scope) -> AsyncGenerator[PriorChange | SharedRun, None]:
        """Yields changes of the scope's priors and of its shared tier: first the stored ones, then new ones.

        Begins with a PriorChange, and never ends by itself.
        """
        priors = [layout.prior_keys(corpus).changes for corpus in dict.fromkeys(scope.corpus_ids)]
        shared = layout.shared_keys(scope)
        last_ids: dict[str, bytes] = {}
        for changes in priors:
            # Read before the caller reads the prior itself, so that no change between the two is missed.
            latest: _Entries = await self._client.call_blocking(
                READ_TIMEOUT_S, "XREVRANGE", changes, "+", "-", "COUNT", 1
            )
            with self._client.errors_translated():
                last_ids[changes] = latest[0][0] if latest else b"0"
        yield PriorChange()
        if shared:
            last_ids[shared.changes] = b"0"
        while True:
            found = await self._read_streams(last_ids, CHANGES_PER_READ)
            if not found:
                yield PriorChange()  # FLUSHALL, or a restart without a file, writes no entry into any stream
            for key, entries in found:
                if shared and key == shared.changes:
                    for _, run in entries:
                        with self._client.errors_translated():
                            shared_run = SharedRun(layout.unpack(run[b"context"]), layout.unpack(run[b"tokens"]))
                        yield shared_run
                else:
                    yield PriorChange()

    async def follow_ring(self, scope: Scope, after: str = "") -> AsyncGenerator[RingDocument, None]:
        """Yields the documents of the scope's ring, the oldest first, then new ones. Never ends by itself.

        Args:
            scope: A scope with a ring: not that of a single session.
            after: Entry id of the last document that is known. Empty means from the beginning.
        """
        shared = layout.shared_keys(scope)
        if shared is None:
            raise ValueError("the scope of one session has no ring")
        last_ids = {shared.ring: after.encode() or b"0"}
        document = b""
        while True:
            for _, entries in await self._read_streams(last_ids, DOCUMENTS_PER_READ):
                for entry_id, entry in entries:
                    with self._client.errors_translated():
                        document += entry[b"tokens"]
                        # Only whole documents have an id to resume after: one that an error cuts off is read again.
                        if entry[b"open"] != b"0":
                            continue
                        whole = RingDocument(entry_id.decode(), layout.unpack(document))
                    yield whole
                    document = b""

    async def _read_streams(self, last_ids: dict[str, bytes], count: int) -> list[tuple[str, _Entries]]:
        """Reads the next entries of streams and moves their last ids on. Empty if none came within BLOCK_MS."""
        options = ("COUNT", count, "BLOCK", BLOCK_MS, "STREAMS")
        found = await self._client.call_blocking(READ_TIMEOUT_S, "XREAD", *options, *last_ids, *last_ids.values())
        with self._client.errors_translated():
            streams: list[tuple[str, _Entries]] = [(key.decode(), entries) for key, entries in found]
            for key, entries in streams:
                last_ids[key] = entries[-1][0]
        return streams


# The heads are cached: a session looks up and records after every round, always with the same ones.
@lru_cache(4096)
def _record_head(scope: Scope) -> tuple[str | int, ...]:
    """Returns the record Function and its keys."""
    keys: tuple[str, ...] = layout.session_keys(scope)
    if scope.contribute and (shared := layout.shared_keys(scope)):
        keys = (*keys, shared.ngrams, shared.changes)
    return ("FCALL", "outrider_record_4", len(keys), *keys)


@lru_cache(4096)
def _lookup_head(scope: Scope, limits: Limits, longest: int) -> Command:
    """Returns the lookup Function, its keys, and all of its arguments but the contexts."""
    # In the order of NGRAM_TIERS, in which Redis tries them at equal length. The two priors are included even if that
    # tier is not requested: the reply says which of them exists.
    keys = [layout.prior_key(corpus) for corpus in scope.corpus_ids]
    tiers = [Source.PRIOR, Source.PRIOR]
    if scope.session_id:
        keys.append(layout.session_keys(scope).dynamic)
        tiers.append(Source.DYNAMIC)
    if shared := layout.shared_keys(scope):
        keys.append(shared.ngrams)
        tiers.append(Source.SHARED)
    if scope.session_id:
        keys.append(layout.session_keys(scope).rejected)
        tiers.append(Source.REJECTED)
    digits = "".join(str(tier.value if tier in limits.tiers else 0) for tier in tiers)
    lengths = (limits.max_match_len, longest, limits.max_continuation_len)
    return ("FCALL_RO", "outrider_lookup_4", len(keys), *keys, digits, *lengths, FANOUT_DIGITS)


def _store_commands(loading: str, table: PriorTable) -> Iterator[tuple[list[Command], int]]:
    """Yields the commands that store a table, a round trip at a time, and the number of their n-grams."""
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
        # With each trip: if Redis has evicted the key meanwhile, HSET makes a new one, which would live for ever.
        # Besides, a load may take longer than this time.
        commands += [("EXPIRE", key, layout.LOADING_TTL_S) for key in (loading, loading + ":documents")]
        yield commands, num_ngrams
