"""LoadPrior: a corpus is collected, checked, counted, and stored."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager

from outrider.core.params import InvalidParameter, check
from outrider.core.retrieval.ngrams import TokenId
from outrider.datastore.background import count
from outrider.datastore.messages import documents_from, managed_scope
from outrider.datastore.redis.store import RedisStore
from outrider.datastore.settings import DatastoreSettings
from outrider.datastore.types import CorpusId, Scope
from outrider.v1 import datastore_pb2 as pb
from outrider.wire.errors import DeadlineExceeded, ResourceExhausted

RESPONSE_EVERY_NGRAMS = 50_000
"""N-grams stored between two responses."""
DOCUMENTS_PER_TURN = 1000
"""Documents checked before the event loop gets a turn: about 3 ms."""


class PriorLoads:
    """Loads priors, a few at a time: each holds its corpus in memory."""

    def __init__(self, store: RedisStore, settings: DatastoreSettings) -> None:
        self._store = store
        self._settings = settings
        self._num_loads = 0

    async def load(self, requests: AsyncIterator[pb.LoadPriorRequest]) -> AsyncGenerator[pb.LoadPriorResponse, None]:
        """Answers a LoadPrior.

        Raises:
            InvalidParameter: A field is missing, or outside its range.
            PermissionDenied: The prior is not the caller's to change.
            DeadlineExceeded: The caller sends nothing.
            ResourceExhausted: The largest allowed number of priors is being loaded.
            StoreUnavailable, StoreFull: Redis fails. The former prior stays.
        """
        with self._admitted():
            corpus, documents = await self._collect(requests)
            # One message for all responses: gRPC serializes it before it asks for the next one.
            response = pb.LoadPriorResponse(num_tokens=sum(map(len, documents)))
            yield response
            table = await count(documents, self._settings.max_match_len)
            check(
                table.num_ngrams > 0, "documents", "runs of two tokens or more", f"{response.num_tokens} tokens in all"
            )
            response.num_ngrams = table.num_ngrams
            yield response
            # Closed at once when the caller hangs up, so that the store removes what it has written so far.
            async with aclosing(self._store.load_prior(corpus, documents, table)) as progress:
                async for num_stored in progress:
                    if num_stored - response.num_stored_ngrams >= RESPONSE_EVERY_NGRAMS:
                        response.num_stored_ngrams = num_stored
                        yield response
            response.num_stored_ngrams = table.num_ngrams
            response.is_done = True
            yield response

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self._num_loads >= self._settings.max_num_loads:
            raise ResourceExhausted(f"{self._num_loads} priors are being loaded: all that may be at a time")
        self._num_loads += 1
        try:
            yield
        finally:
            self._num_loads -= 1

    async def _collect(self, requests: AsyncIterator[pb.LoadPriorRequest]) -> tuple[CorpusId, list[array[TokenId]]]:
        """Returns the name of the prior and all documents of the stream."""
        scope: Scope | None = None
        num_announced = num_tokens = 0
        documents: list[array[TokenId]] = []
        limit = self._settings.max_prior_tokens
        async for request in self._received(requests):
            if scope is None:
                num_announced = request.num_tokens
                check(0 <= num_announced <= limit, "num_tokens", f"in [1, {limit}], or 0 = not said", num_announced)
                check(request.HasField("scope"), "scope", "set in the first message of a stream", "none")
                scope = managed_scope(request.scope, self._settings)
            else:
                is_same = not request.HasField("scope") or managed_scope(request.scope, self._settings) == scope
                check(is_same, "scope", "that of the first message: one stream loads one corpus", "another")
                # A stream of empty messages would hold its place for ever.
                check(bool(request.documents), "documents", "set in every message but the first", "none")
            for index, document in enumerate(documents_from(request, scope, self._settings)):
                if index % DOCUMENTS_PER_TURN == DOCUMENTS_PER_TURN - 1:
                    await asyncio.sleep(0)  # a message may have a million of them: lookups are served in between
                documents.append(document)
                num_tokens += len(document)
                check(num_tokens <= limit, "documents", f"at most {limit} tokens in all", f"{num_tokens} or more")
        if scope is None:
            raise InvalidParameter("documents", "runs of two tokens or more", "no message")
        is_complete = num_announced in (0, num_tokens)
        check(is_complete, "num_tokens", f"the number of tokens that came, {num_tokens}", num_announced)
        return scope.corpus_id(scope.tenant), documents

    async def _received(self, requests: AsyncIterator[pb.LoadPriorRequest]) -> AsyncIterator[pb.LoadPriorRequest]:
        """Yields the messages of a stream.

        Raises DeadlineExceeded if none comes for the stall timeout: others may be waiting for its place.
        """
        limit = self._settings.stall_timeout_s
        iterator = aiter(requests)
        while True:
            try:
                async with asyncio.timeout(limit):
                    request = await anext(iterator, None)
            except TimeoutError:
                raise DeadlineExceeded(f"the caller has sent nothing for {limit:g} s") from None
            if request is None:
                return
            yield request
