"""A datastore that checks what it is sent, and a verifier that knows one: for the tests of `outrider prior`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc

from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc, types_pb2, verifier_pb2
from tests.support.fake_verifier import FakeVerifier

TOKENIZER_HASH = "ab" * 32
VOCAB_SIZE = 256


class FakeDatastore(datastore_pb2_grpc.DatastoreServiceServicer):
    """Keeps what it is sent, and reports everything that the protocol forbids."""

    def __init__(self) -> None:
        self.address = ""
        self.loads: list[list[pb.LoadPriorRequest]] = []
        self.corpora: list[pb.CorpusInfo] = []
        self.deleted: list[pb.Scope] = []
        self.failure: tuple[grpc.StatusCode, str] | None = None
        self.is_done = True
        self.is_stuck = False
        self.started, self.ended = threading.Event(), threading.Event()

    def LoadPrior(
        self, request_iterator: Iterator[pb.LoadPriorRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.LoadPriorResponse]:
        context.add_callback(self.ended.set)
        self.started.set()
        self._fail(context)
        if self.is_stuck:
            self.ended.wait(30)
        messages = list(request_iterator)
        self.loads.append(messages)
        num_tokens = sum(len(document.token_ids) for message in messages for document in message.documents)
        if any(message.HasField("scope") or message.num_tokens for message in messages[1:]):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "scope must be in the first message")
        if messages[0].num_tokens != num_tokens:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"num_tokens must be {num_tokens}")
        yield pb.LoadPriorResponse(num_tokens=num_tokens)
        yield pb.LoadPriorResponse(num_tokens=num_tokens, num_ngrams=9, num_stored_ngrams=4)
        if self.is_done:
            yield pb.LoadPriorResponse(num_tokens=num_tokens, num_ngrams=9, num_stored_ngrams=9, is_done=True)

    def ListCorpora(self, request: pb.ListCorporaRequest, context: grpc.ServicerContext) -> pb.ListCorporaResponse:
        self._fail(context)
        return pb.ListCorporaResponse(corpora=self.corpora)

    def DeleteCorpus(self, request: pb.DeleteCorpusRequest, context: grpc.ServicerContext) -> pb.DeleteCorpusResponse:
        self._fail(context)
        self.deleted.append(request.scope)
        return pb.DeleteCorpusResponse()

    def _fail(self, context: grpc.ServicerContext) -> None:
        if self.failure is not None:
            context.abort(*self.failure)


class KnowingVerifier(FakeVerifier):
    """A verifier with a tokenizer and a datastore; counts how often it was asked."""

    datastore = ""
    num_asked = 0

    def GetInfo(
        self, request: verifier_pb2.GetInfoRequest, context: grpc.ServicerContext
    ) -> verifier_pb2.GetInfoResponse:
        self.num_asked += 1
        model = types_pb2.ModelInfo(
            model_id="fake", vocab_size=VOCAB_SIZE, tokenizer_hash=TOKENIZER_HASH, max_context_len=64
        )
        peer = verifier_pb2.PeerInfo(address=self.datastore) if self.datastore else None
        return verifier_pb2.GetInfoResponse(model=model, datastore=peer, max_num_sessions=4)


@contextmanager
def serving(add: Callable[[grpc.Server], None]) -> Iterator[str]:
    """The address of a server with the servicer that `add` adds."""
    with futures.ThreadPoolExecutor(max_workers=4) as pool:
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        add(server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()
