"""The datastore's RPCs: convert, call the store, convert."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

import grpc

from outrider.core.ngrams import TokenId
from outrider.core.params import InvalidParameter, check
from outrider.datastore.conversion import (
    accepted_from,
    contexts_from,
    documents_from,
    lengths_from,
    rejections_from,
    result_from,
    scope_from,
    scope_from_proto,
    session_scope_from,
)
from outrider.datastore.settings import DatastoreSettings
from outrider.datastore.store import CorpusNotFound, Scope, Store, StoreUnavailable
from outrider.rpc.errors import NotFound, Unavailable, Unimplemented, rpc_errors
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc as pb_grpc
from outrider.version import __version__

Context = grpc.aio.ServicerContext[object, object]


@contextmanager
def errors_as_status(context: Context) -> Iterator[None]:
    """Turns what the body raises, the store's own errors among it, into the status of the call."""
    with rpc_errors(context):
        try:
            yield
        except StoreUnavailable as error:
            raise Unavailable(str(error)) from error
        except CorpusNotFound as error:
            raise NotFound(str(error)) from error


class DatastoreServicer(pb_grpc.DatastoreServiceServicer):
    """Serves one store. An RPC that fails for want of the store leaves the server up: the next one tries anew."""

    def __init__(self, store: Store, settings: DatastoreSettings) -> None:
        self._store = store
        self._settings = settings
        self._num_lookups = 0
        self._num_hits = 0

    async def Lookup(
        self, request_iterator: AsyncIterator[pb.LookupRequest], context: Context
    ) -> AsyncIterator[pb.LookupResponse]:
        scope: Scope | None = None
        with errors_as_status(context):
            async for request in request_iterator:
                scope = scope_from(request, scope)
                yield await self._look_up(scope, request)

    async def Record(self, request_iterator: AsyncIterator[pb.RecordRequest], context: Context) -> pb.RecordResponse:
        scope: Scope | None = None
        response = pb.RecordResponse()
        with errors_as_status(context):
            async for request in request_iterator:
                scope = session_scope_from(request, scope)
                await self._record(scope, request)
                response.num_accepted_tokens += len(request.accepted_token_ids)
                response.num_rejections += len(request.rejections)
        return response

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:
        with errors_as_status(context):
            raise Unimplemented("Watch: this server does not publish changes, ask with Lookup")
            yield  # makes this a generator, as gRPC expects of a stream

    async def LoadPrior(
        self, request_iterator: AsyncIterator[pb.LoadPriorRequest], context: Context
    ) -> pb.LoadPriorResponse:
        response = pb.LoadPriorResponse()
        with errors_as_status(context):
            first = await anext(aiter(request_iterator), None)
            if first is None:
                raise InvalidParameter("documents", "runs of two tokens or more", "no message")
            scope = scope_from(first, None)
            documents = self._documents(scope, first, request_iterator)
            response.num_tokens = await self._store.load_prior(scope, documents)
        return response

    async def ListCorpora(self, request: pb.ListCorporaRequest, context: Context) -> pb.ListCorporaResponse:
        response = pb.ListCorporaResponse()
        with errors_as_status(context):
            for corpus in await self._store.list_corpora():
                if request.tokenizer_hash in ("", corpus.tokenizer_hash):
                    response.corpora.add(
                        tokenizer_hash=corpus.tokenizer_hash, corpus=corpus.name, num_tokens=corpus.num_tokens
                    )
        return response

    async def DeleteCorpus(self, request: pb.DeleteCorpusRequest, context: Context) -> pb.DeleteCorpusResponse:
        with errors_as_status(context):
            # The default that other requests have would make an empty field delete what everybody uses.
            check(request.scope.corpus != "", "scope.corpus", "set", "''")
            await self._store.delete_corpus(scope_from_proto(request.scope))
        return pb.DeleteCorpusResponse()

    async def GetInfo(
        self, request: pb.DatastoreServiceGetInfoRequest, context: Context
    ) -> pb.DatastoreServiceGetInfoResponse:
        try:
            store = await self._store.describe()
        except StoreUnavailable:
            store = ""
        return pb.DatastoreServiceGetInfoResponse(
            store=store,
            max_match_len=self._settings.max_match_len,
            max_continuation_len=self._settings.max_continuation_len,
            num_lookups=self._num_lookups,
            num_hits=self._num_hits,
            version=__version__,
        )

    async def _look_up(self, scope: Scope, request: pb.LookupRequest) -> pb.LookupResponse:
        contexts = contexts_from(request, self._settings)
        found = await self._store.lookup(scope, contexts, *lengths_from(request, self._settings)) if contexts else []
        self._num_lookups += len(found)
        self._num_hits += sum(continuation.match_len > 0 for continuation in found)
        return pb.LookupResponse(
            results=[
                result_from(query, continuation) for query, continuation in zip(request.queries, found, strict=True)
            ]
        )

    async def _record(self, scope: Scope, request: pb.RecordRequest) -> None:
        accepted = accepted_from(request, self._settings)
        rejections = rejections_from(request, self._settings)
        if accepted or rejections:
            await self._store.record(scope, accepted, rejections)
        if request.end_session:
            await self._store.end_session(scope)

    async def _documents(
        self, scope: Scope, first: pb.LoadPriorRequest, others: AsyncIterator[pb.LoadPriorRequest]
    ) -> AsyncIterator[Sequence[TokenId]]:
        for document in documents_from(first, self._settings):
            yield document
        async for request in others:
            same = scope_from(request, scope) == scope
            check(same, "scope", "that of the first message: one stream loads one corpus", "another")
            for document in documents_from(request, self._settings):
                yield document
