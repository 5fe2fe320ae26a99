"""A datastore that does what a test wants, on a real gRPC server: for faults that a real one cannot be made to have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from outrider.peers.datastore import DatastorePeer
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc

Context = grpc.aio.ServicerContext[object, object]


class ScriptedDatastore(datastore_pb2_grpc.DatastoreServiceServicer):
    """Keeps sessions as a real one does. The test sets everything else."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.rejections: list[pb.Rejection] = []
        self.accepted_by_tier: dict[int, int] = {}
        self.ended: set[str] = set()
        self.num_records = 0
        self.num_record_streams = 0
        self.fail_records_from: int | None = None
        """Number of the record from which on streams fail, once."""
        self.trouble = ""
        """Why records are refused; empty = all are accepted."""
        self.refuses: set[str] = set()
        """Sessions whose records are INVALID_ARGUMENT."""
        self.holds_records = asyncio.Event()
        self.holds_records.set()
        """While cleared, records are accepted, but neither stored nor answered."""
        self.lookup_results: dict[int, pb.LookupResult] = {}
        """Answers by base_len; absent = nothing found."""
        self.lookups: list[pb.LookupRequest] = []
        self.holds_lookups = asyncio.Event()
        self.holds_lookups.set()
        self.watched: list[pb.WatchResponse] = []

    async def Record(
        self, requests: AsyncIterator[pb.RecordRequest], context: Context
    ) -> AsyncIterator[pb.RecordResponse]:
        self.num_record_streams += 1
        scope = pb.Scope()
        async for request in requests:
            if request.HasField("scope"):
                scope = request.scope
            self.num_records += 1
            if self.fail_records_from is not None and self.num_records >= self.fail_records_from:
                self.fail_records_from = None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "as the test wants it")
            if self.trouble:
                await context.abort(grpc.StatusCode.UNAVAILABLE, self.trouble)
            if scope.session_id in self.refuses:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "as the test wants it")
            await self.holds_records.wait()
            yield self._store(scope.session_id, request)

    def _store(self, session_id: str, request: pb.RecordRequest) -> pb.RecordResponse:
        tokens = self.tokens.setdefault(session_id, [])
        if request.base_len <= len(tokens):
            tokens.extend(request.accepted_token_ids[len(tokens) - request.base_len :])
            self.rejections.extend(request.rejections)
            for count in request.accepted_by_tier:
                self.accepted_by_tier[count.source] = self.accepted_by_tier.get(count.source, 0) + count.num_tokens
            if request.end_session:
                self.ended.add(session_id)
        return pb.RecordResponse(session_id=session_id, num_tokens=len(tokens))

    async def Lookup(
        self, requests: AsyncIterator[pb.LookupRequest], context: Context
    ) -> AsyncIterator[pb.LookupResponse]:
        async for request in requests:
            self.lookups.append(request)
            await self.holds_lookups.wait()
            results = []
            for query in request.queries:
                result = self.lookup_results.get(query.base_len, pb.LookupResult())
                result.query_id, result.base_len = query.query_id, query.base_len
                results.append(result)
            yield pb.LookupResponse(results=results)

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:
        for response in self.watched:
            yield response
        await asyncio.Event().wait()


@asynccontextmanager
async def babbling(address: str = "127.0.0.1:0") -> AsyncIterator[tuple[str, list[str]]]:
    """A server that answers every message to a datastore with meaningless bytes. Yields its address, and the methods
    that were called."""
    called: list[str] = []

    class Handlers(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
            async def babble(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
                called.append(str(details.method).rpartition("/")[2])
                async for _ in requests:
                    yield b"\xff\xff\xff"

            return grpc.stream_stream_rpc_method_handler(babble)

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((Handlers(),))
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", called
    finally:
        await server.stop(0)


@asynccontextmanager
async def scripted_datastore(
    address: str = "127.0.0.1:0", dialled: DatastorePeer | None = None
) -> AsyncIterator[tuple[ScriptedDatastore, DatastorePeer]]:
    """A scripted datastore and a peer that dials it; if `dialled`, the peer is already connected."""
    servicer = ScriptedDatastore()  # type: ignore[abstract]  # other methods are UNIMPLEMENTED
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    datastore_pb2_grpc.add_DatastoreServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(address)
    await server.start()
    peer = dialled or DatastorePeer(f"127.0.0.1:{port}", "a tokenizer", 1000)
    try:
        yield servicer, peer
    finally:
        servicer.holds_records.set()
        servicer.holds_lookups.set()
        await peer.close()
        await server.stop(0)
