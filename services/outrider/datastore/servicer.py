"""The datastore's RPCs: convert, look up or store, convert."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from outrider.core.params import check
from outrider.datastore import messages as convert
from outrider.datastore.loading import PriorLoads
from outrider.datastore.messages import check_manages, may_see, own_scope
from outrider.datastore.replica import Replica
from outrider.datastore.settings import DatastoreSettings
from outrider.datastore.types import CorpusNotFound, Scope, StoreFull, StoreUnavailable
from outrider.datastore.watch import watch
from outrider.server import streams
from outrider.server.streams import DrainableStream, DrainableStreams
from outrider.telemetry.tracing import LOOKUP, RECORD, traced_message
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc as pb_grpc
from outrider.version import __version__
from outrider.wire.errors import NotFound, NotServing, ResourceExhausted, Unavailable, rpc_errors

Context = grpc.aio.ServicerContext[Any, Any]


@contextmanager
def errors_as_status(context: Context) -> Iterator[None]:
    """Turns what the body raises, the store's own errors among it, into the status of the call."""
    with rpc_errors(context):
        try:
            yield
        except StoreUnavailable as error:
            raise Unavailable(str(error)) from error
        except StoreFull as error:
            raise ResourceExhausted(str(error)) from error
        except CorpusNotFound as error:
            raise NotFound(str(error)) from error


class DatastoreServicer(pb_grpc.DatastoreServiceServicer):
    """Serves one replica. An RPC that fails for want of Redis leaves the server up: the next one tries anew."""

    def __init__(self, replica: Replica, settings: DatastoreSettings) -> None:
        self._replica = replica
        self._store = replica.store
        self._settings = settings
        self._loads = PriorLoads(replica.store, settings)
        self.num_watchers = 0
        """Watch streams that are open."""
        self._lasting = DrainableStreams(settings.max_connection_age_s)
        self._is_draining = False

    def drain(self) -> None:
        """Refuses new calls, and ends the streams that would never end by themselves. Their callers open others."""
        self._is_draining = True
        self._lasting.end()

    async def Lookup(
        self, request_iterator: AsyncIterator[pb.LookupRequest], context: Context
    ) -> AsyncIterator[pb.LookupResponse]:
        scope: Scope | None = None
        with errors_as_status(context), self._endless() as stream:
            async for request in stream.requests(request_iterator):
                scope = convert.scope_from(request, scope, self._settings)
                if request.HasField("scope"):
                    scope = own_scope(scope, request.scope.tenant)
                with traced_message(LOOKUP, request.traceparent) as span:
                    response = await self._look_up(scope, request)
                    if span.is_recorded:
                        span.set_attributes(convert.lookup_attributes(scope, response))
                yield response

    async def Record(
        self, request_iterator: AsyncIterator[pb.RecordRequest], context: Context
    ) -> AsyncIterator[pb.RecordResponse]:
        scope: Scope | None = None
        with errors_as_status(context), self._endless() as stream:
            async for request in stream.requests(request_iterator):
                scope = convert.session_scope_from(request, scope, self._settings)
                if request.HasField("scope"):
                    scope = own_scope(scope, request.scope.tenant)
                with traced_message(RECORD, request.traceparent) as span:
                    num_tokens = await self._record(scope, request)
                    if span.is_recorded:
                        span.set_attributes(
                            {"outrider.session_id": scope.session_id, "outrider.num_tokens": num_tokens}
                        )
                yield pb.RecordResponse(session_id=scope.session_id, num_tokens=num_tokens)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:  # type: ignore[override]
        # It does not age: its caller would be sent everything again.
        with errors_as_status(context), self._watching(), self._endless(ages=False):
            scope = own_scope(convert.watched_scope_from(request, self._settings), request.scope.tenant)
            await self._replica.check_exists(scope)
            async with aclosing(watch(self._store, scope)) as responses:
                async for response in responses:
                    await streams.write(context, response, self._settings.stall_timeout_s, "watcher")

    async def LoadPrior(
        self, request_iterator: AsyncIterator[pb.LoadPriorRequest], context: Context
    ) -> AsyncIterator[pb.LoadPriorResponse]:
        with errors_as_status(context):
            self._check_serving()
            async with aclosing(self._loads.load(request_iterator)) as responses:
                async for response in responses:
                    yield response

    async def ListCorpora(self, request: pb.ListCorporaRequest, context: Context) -> pb.ListCorporaResponse:
        response = pb.ListCorporaResponse()
        with errors_as_status(context):
            self._check_serving()
            for corpus in await self._store.list_corpora():
                if request.tokenizer_hash in ("", corpus.tokenizer_hash) and may_see(corpus.tenant):
                    response.corpora.add(
                        tokenizer_hash=corpus.tokenizer_hash,
                        corpus=corpus.name,
                        tenant=corpus.tenant,
                        num_tokens=corpus.num_tokens,
                        num_ngrams=corpus.num_ngrams,
                    )
        return response

    async def DeleteCorpus(self, request: pb.DeleteCorpusRequest, context: Context) -> pb.DeleteCorpusResponse:
        with errors_as_status(context):
            self._check_serving()
            # The default that other requests have would make an empty field delete what everybody uses.
            check(request.scope.corpus != "", "scope.corpus", "set", "''")
            scope = convert.scope_from_proto(request.scope, self._settings)
            check_manages(request.scope.tenant)
            await self._store.delete_prior(scope, request.scope.tenant)
        return pb.DeleteCorpusResponse()

    async def GetInfo(
        self, request: pb.DatastoreServiceGetInfoRequest, context: Context
    ) -> pb.DatastoreServiceGetInfoResponse:
        statistics, settings = self._replica.statistics, self._settings
        health = statistics.health = await self._store.health()
        return pb.DatastoreServiceGetInfoResponse(
            store=health.product,
            max_match_len=settings.max_match_len,
            max_continuation_len=settings.max_continuation_len,
            max_ring_match_len=settings.max_ring_match_len,
            num_lookups=statistics.num_lookups,
            num_hits=statistics.num_hits,
            num_local_lookups=statistics.num_local_lookups,
            version=__version__,
            tiers=[convert.tier_info_from(tier, counts) for tier, counts in statistics.tiers.items()],
            used_memory_bytes=health.used_memory_bytes,
            max_memory_bytes=health.max_memory_bytes,
            num_evicted_keys=health.num_evicted_keys,
            rings=[convert.ring_info_from(held) for held in self._replica.rings.held if may_see(held.tenant)],
        )

    async def _look_up(self, scope: Scope, request: pb.LookupRequest) -> pb.LookupResponse:
        contexts = convert.contexts_from(request, scope, self._settings)
        limits = convert.limits_from(request, self._settings)
        if not contexts:
            return pb.LookupResponse()
        answers = await self._replica.look_up(scope, contexts, limits)
        results = map(convert.result_from, request.queries, answers.continuations)
        return pb.LookupResponse(results=results, is_local=answers.is_local)

    async def _record(self, scope: Scope, request: pb.RecordRequest) -> int:
        """Returns the session's position."""
        base_len = convert.base_len_from(request)
        accepted = convert.accepted_from(request, scope, self._settings)
        rejections = convert.rejections_from(request, scope, self._settings)
        accepted_by_tier = convert.accepted_by_tier_from(request)
        await self._replica.check_exists(scope)
        position = end = base_len + len(accepted)
        if accepted or rejections or not request.end_session:
            position = await self._store.record(scope, base_len, accepted, rejections)
        if position >= base_len:
            for tier, num_tokens in accepted_by_tier:
                self._replica.statistics.add_accepted(tier, num_tokens)
        if request.end_session and position == end:
            position = await self._store.end_session(scope, end)
        return position

    def _check_serving(self) -> None:
        if self._is_draining:
            raise NotServing("the datastore is draining")

    @contextmanager
    def _endless(self, *, ages: bool = True) -> Iterator[DrainableStream]:
        """Around a stream that `drain` must end."""
        self._check_serving()
        with self._lasting.open(ages=ages) as stream:
            yield stream

    @contextmanager
    def _watching(self) -> Iterator[None]:
        if self.num_watchers >= self._settings.max_num_watchers:
            raise ResourceExhausted(f"all {self.num_watchers} watchers that may be are there")
        self.num_watchers += 1
        try:
            yield
        finally:
            self.num_watchers -= 1
