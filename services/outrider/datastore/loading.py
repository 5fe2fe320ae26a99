"""LoadPrior: a corpus is collected, checked, counted, and stored."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace

from outrider.core.params import InvalidParameter, check
from outrider.datastore.background import count
from outrider.datastore.messages import check_manages, document_from, scope_from
from outrider.datastore.settings import DatastoreSettings
from outrider.datastore.types import Scope, Store
from outrider.v1 import datastore_pb2 as pb
from outrider.wire.errors import DeadlineExceeded, ResourceExhausted

RESPONSE_EVERY_NGRAMS = 50_000
"""Between two responses while a corpus is stored."""
DOCUMENTS_PER_TURN = 1000
"""Documents checked at a time, about 3 ms."""


class PriorLoads:
    """Loads priors, a few at a time: each holds its corpus in memory."""

    def __init__(self, store: Store, settings: DatastoreSettings) -> None:
        self._store = store
        self._settings = settings
        self._num_loads = 0

    async def load(self, requests: AsyncIterator[pb.LoadPriorRequest]) -> AsyncGenerator[pb.LoadPriorResponse, None]:
        """Answers a LoadPrior. Raises InvalidParameter, ResourceExhausted, and what the store raises."""
        with self._admitted():
            scope, tenant, documents = await self._collect(requests)
            response = pb.LoadPriorResponse(num_tokens=sum(map(len, documents)))
            yield response
            table = await count(documents, self._settings.max_match_len)
            check(
                table.num_ngrams > 0, "documents", "runs of two tokens or more", f"{response.num_tokens} tokens in all"
            )
            response.num_ngrams = table.num_ngrams
            yield response
            async with aclosing(self._store.load_prior(scope, tenant, documents, table)) as progress:
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

    async def _collect(self, requests: AsyncIterator[pb.LoadPriorRequest]) -> tuple[Scope, str, list[array[int]]]:
        """All documents of the stream, and whose they are."""
        scope: Scope | None = None
        tenant = ""
        announced = num_tokens = 0
        documents: list[array[int]] = []
        limit = self._settings.max_prior_tokens
        async for request in self._arriving(requests):
            if scope is None:
                announced, tenant = request.num_tokens, request.scope.tenant
                check(0 <= announced <= limit, "num_tokens", f"in [1, {limit}], or 0 = not said", announced)
                scope = scope_from(request, None, self._settings)
                check_manages(tenant)
            else:
                same = scope_from(request, scope, self._settings) == scope
                same = same and (not request.HasField("scope") or request.scope.tenant == tenant)
                check(same, "scope", "that of the first message: one stream loads one corpus", "another")
                check(bool(request.documents), "documents", "set in every message but the first", "none")
            for index, document in enumerate(request.documents):
                if index % DOCUMENTS_PER_TURN == DOCUMENTS_PER_TURN - 1:
                    await asyncio.sleep(0)  # a message may have a million of them: lookups are served in between
                field, max_len = f"documents[{index}].token_ids", self._settings.max_document_len
                documents.append(document_from(document.token_ids, field, max_len, scope.vocab_size))
                num_tokens += len(documents[-1])
                check(num_tokens <= limit, "documents", f"at most {limit} tokens in all", f"{num_tokens} or more")
        if scope is None:
            raise InvalidParameter("documents", "runs of two tokens or more", "no message")
        check(announced in (0, num_tokens), "num_tokens", f"the number of tokens that came, {num_tokens}", announced)
        return replace(scope, session_id=""), tenant, documents

    async def _arriving(self, requests: AsyncIterator[pb.LoadPriorRequest]) -> AsyncIterator[pb.LoadPriorRequest]:
        """The messages of a stream. Raises DeadlineExceeded if none comes for too long: others wait for the place."""
        limit = self._settings.stall_timeout_s
        arriving = aiter(requests)
        while True:
            try:
                async with asyncio.timeout(limit):
                    request = await anext(arriving, None)
            except TimeoutError:
                raise DeadlineExceeded(f"the caller has sent nothing for {limit:g} s") from None
            if request is None:
                return
            yield request
