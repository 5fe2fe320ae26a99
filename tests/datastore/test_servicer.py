"""The datastore over gRPC, on a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import grpc
import pytest

from outrider.datastore.redis_store import RedisStore
from outrider.datastore.servicer import DatastoreServicer
from outrider.datastore.settings import DatastoreSettings
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc as pb_grpc
from outrider.v1 import types_pb2
from outrider.version import __version__

SETTINGS = DatastoreSettings(
    max_match_len=3, max_continuation_len=8, max_num_queries=2, max_num_tokens=6, max_num_rejections=1
)


@pytest.fixture
async def stub(store: RedisStore) -> AsyncIterator[pb_grpc.DatastoreServiceAsyncStub]:
    async with serving(store) as stub:
        yield stub


class serving:
    """A stub for a server of this store."""

    def __init__(self, store: RedisStore) -> None:
        self._server = grpc.aio.server()
        pb_grpc.add_DatastoreServiceServicer_to_server(DatastoreServicer(store, SETTINGS), self._server)

    async def __aenter__(self) -> pb_grpc.DatastoreServiceAsyncStub:
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        return pb_grpc.DatastoreServiceStub(self._channel)

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        await self._server.stop(None)


@pytest.fixture
def named(scope) -> pb.Scope:
    return pb.Scope(tokenizer_hash=scope.tokenizer_hash, session_id=scope.session_id)


def query(*context: int, **fields) -> pb.Query:
    return pb.Query(context_token_ids=context, **fields)


async def look_up(stub, *requests: pb.LookupRequest) -> list[pb.LookupResponse]:
    return [response async for response in stub.Lookup(iter(requests))]


async def refusal(call) -> tuple[grpc.StatusCode, str]:
    """How an RPC failed."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def test_what_was_recorded_is_found(stub, named):
    records = [pb.RecordRequest(scope=named, accepted_token_ids=[1, 2]), pb.RecordRequest(accepted_token_ids=[3, 4])]
    assert await stub.Record(iter(records)) == pb.RecordResponse(num_accepted_tokens=4)
    request = pb.LookupRequest(scope=named, queries=[query(9, 2, query_id=7, base_len=130), query(9, query_id=8)])
    [response] = await look_up(stub, request)
    assert list(response.results) == [
        pb.LookupResult(
            query_id=7,
            base_len=130,
            match_len=1,
            tier=types_pb2.SOURCE_DYNAMIC,
            parent_offsets=[0, 1],
            token_ids=[3, 4],
            counts=[1, 1],
        ),
        pb.LookupResult(query_id=8),
    ]


async def test_a_rejection_is_found_with_what_the_target_said_instead(stub, named):
    rejection = pb.Rejection(context_token_ids=[1, 2], rejected_token_ids=[3], continuation_token_ids=[4])
    assert (await stub.Record(iter([pb.RecordRequest(scope=named, rejections=[rejection])]))).num_rejections == 1
    [response] = await look_up(stub, pb.LookupRequest(scope=named, queries=[query(1, 2)]))
    assert (response.results[0].tier, list(response.results[0].token_ids)) == (types_pb2.SOURCE_REJECTED, [4])


async def test_requests_on_an_open_stream_are_answered_in_order_and_keep_the_scope(stub, named):
    await stub.Record(iter([pb.RecordRequest(scope=named, accepted_token_ids=range(6))]))
    call = stub.Lookup()
    for token in (4, 9, 2):
        scope = named if token == 4 else None
        await call.write(pb.LookupRequest(scope=scope, queries=[query(token, query_id=token)], max_continuation_len=1))
        [result] = (await call.read()).results
        assert (result.query_id, list(result.token_ids)) == (token, [token + 1] if token < 5 else [])
    await call.done_writing()
    assert await call.code() == grpc.StatusCode.OK


async def test_the_callers_lengths_are_kept(stub, named):
    await stub.Record(iter([pb.RecordRequest(scope=named, accepted_token_ids=[1, 2, 3, 4, 5, 6])]))
    request = pb.LookupRequest(scope=named, queries=[query(1, 2)], max_match_len=1, max_continuation_len=2)
    [response] = await look_up(stub, request)
    assert (response.results[0].match_len, list(response.results[0].token_ids)) == (1, [3, 4])


async def test_an_ended_session_is_forgotten(stub, named):
    await stub.Record(iter([pb.RecordRequest(scope=named, accepted_token_ids=[1, 2], end_session=True)]))
    [response] = await look_up(stub, pb.LookupRequest(scope=named, queries=[query(1)]))
    assert response.results[0].match_len == 0


async def test_a_prior_is_loaded_listed_used_and_deleted(stub, named):
    named.corpus = "code"
    pieces = [
        pb.LoadPriorRequest(scope=named, documents=[pb.TokenSequence(token_ids=[1, 2])]),
        pb.LoadPriorRequest(documents=[pb.TokenSequence(token_ids=[2, 3, 4])]),
    ]
    assert (await stub.LoadPrior(iter(pieces))).num_tokens == 5
    corpora = (await stub.ListCorpora(pb.ListCorporaRequest(tokenizer_hash=named.tokenizer_hash))).corpora
    assert list(corpora) == [pb.CorpusInfo(tokenizer_hash=named.tokenizer_hash, corpus="code", num_tokens=5)]
    [response] = await look_up(stub, pb.LookupRequest(scope=named, queries=[query(2)]))
    assert (response.results[0].tier, list(response.results[0].token_ids)) == (types_pb2.SOURCE_PRIOR, [3, 4])
    await stub.DeleteCorpus(pb.DeleteCorpusRequest(scope=named))
    assert not (await stub.ListCorpora(pb.ListCorporaRequest(tokenizer_hash=named.tokenizer_hash))).corpora
    code, message = await refusal(stub.DeleteCorpus(pb.DeleteCorpusRequest(scope=named)))
    assert (code, "'code'" in message) == (grpc.StatusCode.NOT_FOUND, True)


async def test_describes_itself_and_counts_lookups(stub, named):
    await stub.Record(iter([pb.RecordRequest(scope=named, accepted_token_ids=[1, 2])]))
    await look_up(stub, pb.LookupRequest(scope=named, queries=[query(1), query(9)]))
    info = await stub.GetInfo(pb.DatastoreServiceGetInfoRequest())
    assert (info.max_match_len, info.max_continuation_len, info.version) == (3, 8, __version__)
    assert (info.num_lookups, info.num_hits) == (2, 1)
    assert info.store.split()[0] in ("redis", "valkey")


async def test_watch_says_that_it_is_not_there(stub, named):
    code, message = await refusal(stub.Watch(pb.WatchRequest(scope=named)).read())
    assert (code, "Watch" in message) == (grpc.StatusCode.UNIMPLEMENTED, True)


SCOPE = pb.Scope(tokenizer_hash="t", session_id="s")


def lookup_of(**fields) -> pb.LookupRequest:
    return pb.LookupRequest(**{"scope": SCOPE, "queries": [query(1)], **fields})


def rejection_of(**fields) -> pb.RecordRequest:
    lists = {"context_token_ids": [1], "rejected_token_ids": [2], "continuation_token_ids": [3], **fields}
    return pb.RecordRequest(scope=SCOPE, rejections=[pb.Rejection(**lists)])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (lookup_of(scope=None), "scope must be set in the first message of a stream, got none"),
        (lookup_of(scope=pb.Scope()), "scope.tokenizer_hash must be set, got ''"),
        (
            lookup_of(scope=pb.Scope(tokenizer_hash="t" * 257)),
            "scope.tokenizer_hash must be at most 256 characters long, got 257",
        ),
        (lookup_of(queries=[query(1), query()]), "queries[1].context_token_ids must be 1 to 4096 tokens long"),
        (lookup_of(queries=[query(1, -5)]), "queries[0].context_token_ids must be without negative token ids, got -5"),
        (lookup_of(queries=[query(*[1] * 4097)]), "1 to 4096 tokens long, got 4097 tokens"),
        (lookup_of(queries=[query(1, base_len=-1)]), "queries[0].base_len must be >= 0, got -1"),
        (lookup_of(queries=[query(1)] * 3), "queries must be at most 2 in one message, got 3"),
        (lookup_of(max_match_len=4), "max_match_len must be in [1, 3], or 0 for the default, got 4"),
        (lookup_of(max_match_len=-1), "max_match_len must be in [1, 3]"),
        (lookup_of(max_continuation_len=9), "max_continuation_len must be in [1, 8]"),
        (pb.RecordRequest(accepted_token_ids=[1]), "scope must be set in the first message"),
        (
            pb.RecordRequest(scope=pb.Scope(tokenizer_hash="t"), accepted_token_ids=[1]),
            "scope.session_id must be set: tokens are recorded for a session",
        ),
        (pb.RecordRequest(scope=SCOPE, accepted_token_ids=[1, -1]), "accepted_token_ids must be without negative"),
        (pb.RecordRequest(scope=SCOPE, accepted_token_ids=[1] * 7), "accepted_token_ids must be 1 to 6 tokens long"),
        (rejection_of(context_token_ids=[]), "rejections[0].context_token_ids must be 1 to 256"),
        (rejection_of(rejected_token_ids=[]), "rejections[0].rejected_token_ids must be 1 to 256"),
        (rejection_of(continuation_token_ids=[]), "rejections[0].continuation_token_ids must be 1 to 256"),
        (
            pb.RecordRequest(scope=SCOPE, rejections=[pb.Rejection()] * 2),
            "rejections must be at most 1 in one message, got 2",
        ),
        (
            pb.LoadPriorRequest(scope=SCOPE, documents=[pb.TokenSequence()]),
            "documents[0].token_ids must be 1 to 6 tokens long",
        ),
        (pb.LoadPriorRequest(scope=SCOPE), "documents must be runs of two tokens or more"),
        (pb.DeleteCorpusRequest(scope=SCOPE), "scope.corpus must be set, got ''"),
    ],
)
async def test_a_bad_request_is_refused_with_its_field_and_rule(stub, request_, message):
    calls = {
        pb.LookupRequest: lambda: stub.Lookup(iter([request_])).read(),
        pb.RecordRequest: lambda: stub.Record(iter([request_])),
        pb.LoadPriorRequest: lambda: stub.LoadPrior(iter([request_])),
        pb.DeleteCorpusRequest: lambda: stub.DeleteCorpus(request_),
    }
    code, details = await refusal(calls[type(request_)]())
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert message in details


@pytest.mark.parametrize("messages", [[], [0, 1]], ids=["no message", "two scopes"])
async def test_a_prior_is_one_corpus_on_one_stream(stub, named, messages: Iterable[int]):
    pieces = [
        pb.LoadPriorRequest(
            scope=pb.Scope(tokenizer_hash=named.tokenizer_hash, corpus=f"{number}"),
            documents=[pb.TokenSequence(token_ids=[1, 2])],
        )
        for number in messages
    ]
    code, _ = await refusal(stub.LoadPrior(iter(pieces)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert not (await stub.ListCorpora(pb.ListCorporaRequest(tokenizer_hash=named.tokenizer_hash))).corpora


async def test_without_redis_the_server_stays_up_and_says_unavailable(own_redis, open_store, named):
    store = open_store(own_redis.url)
    async with serving(store) as stub:
        await stub.Record(iter([pb.RecordRequest(scope=named, accepted_token_ids=[1, 2])]))
        own_redis.kill()
        request = pb.LookupRequest(scope=named, queries=[query(1)])
        code, details = await refusal(stub.Lookup(iter([request])).read())
        assert (code, details.split(" cannot")[0]) == (
            grpc.StatusCode.UNAVAILABLE,
            f"Redis at 127.0.0.1:{own_redis.port}",
        )
        assert (await stub.GetInfo(pb.DatastoreServiceGetInfoRequest())).store == ""
        own_redis.start()
        assert len(await look_up(stub, request)) == 1
