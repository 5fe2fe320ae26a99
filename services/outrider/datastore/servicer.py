"""The RPCs of the datastore: convert a message, let the replica or its store do the work, convert the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import grpc

from outrider.core.params import check
from outrider.datastore import messages
from outrider.datastore.loading import PriorLoads
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
_Request = TypeVar("_Request")


class DatastoreServicer(pb_grpc.DatastoreServiceServicer):
    """Serves one replica. An RPC that fails because Redis is away leaves the server up: the next one tries again."""

    def __init__(self, replica: Replica, settings: DatastoreSettings) -> None:
        self._replica = replica
        self._store = replica.store
        self._settings = settings
        self._loads = PriorLoads(replica.store, settings)
        self.num_watchers = 0
        """Watch streams that are open."""
        self._streams = DrainableStreams(settings.max_connection_age_s)
        self._is_draining = False

    def drain(self) -> None:
        """Refuses new calls, and ends the streams that would never end by themselves. Their callers open others."""
        self._is_draining = True
        self._streams.end()

    async def Lookup(
        self, request_iterator: AsyncIterator[pb.LookupRequest], context: Context
    ) -> AsyncIterator[pb.LookupResponse]:
        scope: Scope | None = None
        with _errors_as_status(context), self._drainable() as stream:
            async for request in stream.until_end(self._opened(request_iterator)):
                with traced_message(LOOKUP, request.traceparent) as span:
                    command = messages.lookup_command(request, scope, self._settings)
                    scope = command.scope
                    response = pb.LookupResponse()
                    # A message without contexts only sets the scope of those after it: Redis is not asked.
                    if command.contexts:
                        answers = await self._replica.look_up(command)
                        results = map(messages.lookup_result, request.queries, answers.continuations)
                        response = pb.LookupResponse(results=results, is_local=answers.is_local)
                    if span.is_recorded:
                        # Numbers, not tokens: a trace must not show the texts of users.
                        span.set_attributes(
                            {
                                "outrider.session_id": scope.session_id,
                                "outrider.num_queries": len(response.results),
                                "outrider.num_matched_queries": sum(each.match_len > 0 for each in response.results),
                                "outrider.is_local": response.is_local,
                            }
                        )
                # After the span: a generator is suspended here until gRPC has sent the response.
                yield response

    async def Record(
        self, request_iterator: AsyncIterator[pb.RecordRequest], context: Context
    ) -> AsyncIterator[pb.RecordResponse]:
        scope: Scope | None = None
        with _errors_as_status(context), self._drainable() as stream:
            async for request in stream.until_end(self._opened(request_iterator)):
                with traced_message(RECORD, request.traceparent) as span:
                    command = messages.record_command(request, scope, self._settings)
                    scope = command.scope
                    num_tokens = await self._replica.record(command)
                    if span.is_recorded:
                        span.set_attributes(
                            {"outrider.session_id": scope.session_id, "outrider.num_tokens": num_tokens}
                        )
                yield pb.RecordResponse(session_id=scope.session_id, num_tokens=num_tokens)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:  # type: ignore[override]
        # The stubs know only generators; a method that writes to its context can put a deadline on each write.
        # The stream has no age limit: on a new one the caller would be sent everything again.
        with _errors_as_status(context), self._watching(), self._drainable(ages=False) as stream:
            scope = messages.watched_scope(request, self._settings)
            await self._replica.check_exists(scope)
            async with aclosing(watch(self._store, scope)) as responses:
                async for response in stream.until_end(responses):
                    await streams.write(context, response, self._settings.stall_timeout_s, "watcher")

    async def LoadPrior(
        self, request_iterator: AsyncIterator[pb.LoadPriorRequest], context: Context
    ) -> AsyncIterator[pb.LoadPriorResponse]:
        with _errors_as_status(context):
            # Not drainable: a load ends by itself, and one that is cut short stores nothing.
            self._check_serving()
            async with aclosing(self._loads.load(request_iterator)) as responses:
                async for response in responses:
                    yield response

    async def ListCorpora(self, request: pb.ListCorporaRequest, context: Context) -> pb.ListCorporaResponse:
        response = pb.ListCorporaResponse()
        with _errors_as_status(context):
            self._check_serving()
            for info in await self._store.list_corpora():
                if request.tokenizer_hash in ("", info.id.tokenizer_hash) and messages.may_see(info.id.tenant):
                    response.corpora.append(messages.corpus_info(info))
        return response

    async def DeleteCorpus(self, request: pb.DeleteCorpusRequest, context: Context) -> pb.DeleteCorpusResponse:
        with _errors_as_status(context):
            self._check_serving()
            # With the default of other requests, an empty field would delete what all tenants use.
            check(request.scope.corpus != "", "scope.corpus", "set", "''")
            scope = messages.managed_scope(request.scope, self._settings)
            await self._store.delete_prior(scope.corpus_id(scope.tenant))
        return pb.DeleteCorpusResponse()

    async def GetInfo(
        self, request: pb.DatastoreServiceGetInfoRequest, context: Context
    ) -> pb.DatastoreServiceGetInfoResponse:
        statistics, settings = self._replica.statistics, self._settings
        health = statistics.health = await self._store.health()
        rings = [held for held in self._replica.rings.held if messages.may_see(held.id.tenant)]
        return pb.DatastoreServiceGetInfoResponse(
            store=health.product,
            store_error=health.problem,
            max_match_len=settings.max_match_len,
            max_continuation_len=settings.max_continuation_len,
            max_ring_match_len=settings.max_ring_match_len,
            num_lookups=statistics.num_lookups,
            num_hits=statistics.num_hits,
            num_local_lookups=statistics.num_local_lookups,
            version=__version__,
            tiers=[messages.tier_info(tier, counts) for tier, counts in statistics.tiers.items()],
            used_memory_bytes=health.used_memory_bytes,
            max_memory_bytes=health.max_memory_bytes,
            num_evicted_keys=health.num_evicted_keys,
            rings=map(messages.ring_info, rings),
        )

    def _check_serving(self) -> None:
        if self._is_draining:
            raise NotServing("the datastore is draining")

    def _opened(self, requests: AsyncIterator[_Request]) -> AsyncIterator[_Request]:
        return streams.opened(requests, self._settings.stall_timeout_s)

    @contextmanager
    def _drainable(self, *, ages: bool = True) -> Iterator[DrainableStream]:
        """A context around a stream that never ends by itself."""
        self._check_serving()
        with self._streams.open(ages=ages) as stream:
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


@contextmanager
def _errors_as_status(context: Context) -> Iterator[None]:
    """Turns what the body raises, including errors of the store, into the status of the call."""
    with rpc_errors(context):
        try:
            yield
        except StoreUnavailable as error:
            raise Unavailable(str(error)) from error
        except StoreFull as error:
            raise ResourceExhausted(str(error)) from error
        except CorpusNotFound as error:
            raise NotFound(str(error)) from error
