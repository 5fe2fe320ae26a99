"""The datastore over gRPC, on a real Redis."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import grpc
import pytest

from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import types_pb2
from outrider.version import __version__
from tests.support.datastores import load_prior, look_up, query, record, refusal, sequence


@pytest.fixture
def named(scope) -> pb.Scope:
    return pb.Scope(tokenizer_hash=scope.tokenizer_hash, session_id=scope.session_id)


async def test_what_was_recorded_is_found(stub, named):
    records = [
        pb.RecordRequest(scope=named, accepted_token_ids=[1, 2]),
        pb.RecordRequest(accepted_token_ids=[3, 4], base_len=2),
    ]
    assert [response async for response in stub.Record(iter(records))] == [
        pb.RecordResponse(session_id="a session", num_tokens=2),
        pb.RecordResponse(session_id="a session", num_tokens=4),
    ]
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
    assert not response.is_local


async def test_a_continuation_is_a_tree_with_alternatives(stub, named):
    pairs = [(1, 2, 5), (1, 2, 6), (1, 3, 7), (1, 4, 7), (1, 2, 5), (1, 8, 7), (1, 9, 7)]
    documents = [sequence(*pair) for pair in pairs]
    await load_prior(stub, pb.LoadPriorRequest(scope=named, documents=documents))
    [response] = await look_up(stub, pb.LookupRequest(scope=named, queries=[query(1)]))
    [result] = response.results
    assert list(result.token_ids) == [2, 5, 9, 8, 4, 6]
    assert list(result.parent_offsets) == [0, 1, 0, 0, 0, 5]
    assert list(result.counts) == [3, 2, 1, 1, 1, 1]


async def test_a_rejection_is_found_again_behind_its_context(stub, named):
    rejection = pb.Rejection(context_token_ids=[1, 2], rejected_token_ids=[3, 4])
    assert await record(stub, pb.RecordRequest(scope=named, rejections=[rejection])) == [0]
    [response] = await look_up(stub, pb.LookupRequest(scope=named, queries=[query(1, 2)]))
    assert (response.results[0].tier, list(response.results[0].token_ids)) == (types_pb2.SOURCE_REJECTED, [3, 4])


async def test_only_the_tiers_that_were_asked_for_are_searched(stub, named):
    await load_prior(stub, pb.LoadPriorRequest(scope=named, documents=[sequence(1, 2)]))
    await record(stub, pb.RecordRequest(scope=named, accepted_token_ids=[1, 3]))
    for tiers, token_ids in (([], [2]), ([types_pb2.SOURCE_DYNAMIC], [3]), ([types_pb2.SOURCE_SHARED], [])):
        [response] = await look_up(stub, pb.LookupRequest(scope=named, queries=[query(1)], tiers=tiers))
        assert list(response.results[0].token_ids) == token_ids


async def test_requests_on_a_stream_are_answered_in_order_and_keep_the_scope(stub, named):
    await record(stub, pb.RecordRequest(scope=named, accepted_token_ids=range(6)))
    call = stub.Lookup()
    for token in (4, 9, 2):
        scope = named if token == 4 else None
        await call.write(pb.LookupRequest(scope=scope, queries=[query(token, query_id=token)], max_continuation_len=1))
        [result] = (await call.read()).results
        assert (result.query_id, list(result.token_ids)) == (token, [token + 1] if token < 5 else [])
    await call.done_writing()
    assert await call.code() == grpc.StatusCode.OK


async def test_a_record_stream_answers_at_once_and_may_change_sessions(stub, named):
    call = stub.Record()
    other = pb.Scope(tokenizer_hash=named.tokenizer_hash, session_id="another")
    for scope, base_len, num_tokens in ((named, 0, 2), (other, 0, 2), (None, 2, 4), (named, 2, 4)):
        await call.write(pb.RecordRequest(scope=scope, base_len=base_len, accepted_token_ids=[1, 2]))
        response = await call.read()
        expected = "a session" if scope is named else "another"
        assert (response.session_id, response.num_tokens) == (expected, num_tokens)
    await call.done_writing()
    assert await call.code() == grpc.StatusCode.OK


async def test_the_callers_lengths_are_kept(stub, named):
    await record(stub, pb.RecordRequest(scope=named, accepted_token_ids=[1, 2, 3, 4, 5, 6]))
    request = pb.LookupRequest(scope=named, queries=[query(1, 2)], max_match_len=1, max_continuation_len=2)
    [response] = await look_up(stub, request)
    assert (response.results[0].match_len, list(response.results[0].token_ids)) == (1, [3, 4])


async def test_an_ended_session_is_forgotten(stub, named):
    assert await record(stub, pb.RecordRequest(scope=named, accepted_token_ids=[1, 2], end_session=True)) == [2]
    [response] = await look_up(stub, pb.LookupRequest(scope=named, queries=[query(1)]))
    assert response.results[0].match_len == 0


async def test_a_session_does_not_end_at_another_position_than_its_own(stub, named):
    await record(stub, pb.RecordRequest(scope=named, accepted_token_ids=[1, 2, 3]))
    early = pb.RecordRequest(scope=named, base_len=2, end_session=True)
    late = pb.RecordRequest(scope=named, base_len=5, accepted_token_ids=[6], end_session=True)
    assert await record(stub, early, late) == [3, 3]
    [response] = await look_up(stub, pb.LookupRequest(scope=named, queries=[query(1)]))
    assert response.results[0].match_len == 1
    assert await record(stub, pb.RecordRequest(scope=named, base_len=3, end_session=True)) == [3]
    [response] = await look_up(stub, pb.LookupRequest(scope=named, queries=[query(1)]))
    assert response.results[0].match_len == 0


async def test_ending_a_session_that_is_not_there_is_no_error(stub, named):
    assert await record(stub, pb.RecordRequest(scope=named, base_len=7, end_session=True)) == [7]


async def test_a_prior_is_loaded_listed_used_and_deleted(stub, named):
    named.corpus = "code"
    pieces = [
        pb.LoadPriorRequest(scope=named, documents=[sequence(1, 2)], num_tokens=5),
        pb.LoadPriorRequest(documents=[sequence(2, 3, 4)]),
    ]
    responses = await load_prior(stub, *pieces)
    assert [response.is_done for response in responses[:-1]] == [False] * (len(responses) - 1)
    assert responses[-1] == pb.LoadPriorResponse(num_tokens=5, num_ngrams=4, num_stored_ngrams=4, is_done=True)
    corpora = (await stub.ListCorpora(pb.ListCorporaRequest(tokenizer_hash=named.tokenizer_hash))).corpora
    expected = pb.CorpusInfo(tokenizer_hash=named.tokenizer_hash, corpus="code", num_tokens=5, num_ngrams=4)
    assert list(corpora) == [expected]
    [response] = await look_up(stub, pb.LookupRequest(scope=named, queries=[query(2)]))
    assert (response.results[0].tier, list(response.results[0].token_ids)) == (types_pb2.SOURCE_PRIOR, [3, 4])
    await stub.DeleteCorpus(pb.DeleteCorpusRequest(scope=named))
    assert not (await stub.ListCorpora(pb.ListCorporaRequest(tokenizer_hash=named.tokenizer_hash))).corpora
    code, message = await refusal(stub.DeleteCorpus(pb.DeleteCorpusRequest(scope=named)))
    assert (code, "'code'" in message) == (grpc.StatusCode.NOT_FOUND, True)


async def test_a_tenants_own_prior_stands_in_front_of_the_one_for_all(stub, named):
    own = pb.Scope(tokenizer_hash=named.tokenizer_hash, tenant="acme")
    await load_prior(stub, pb.LoadPriorRequest(scope=named, documents=[sequence(1, 2), sequence(5, 6)]))
    await load_prior(stub, pb.LoadPriorRequest(scope=own, documents=[sequence(1, 3)]))
    assert await found_after(stub, own, 1, 5) == [[3], []]
    assert await found_after(stub, named, 1, 5) == [[2], [6]]
    corpora = (await stub.ListCorpora(pb.ListCorporaRequest(tokenizer_hash=named.tokenizer_hash))).corpora
    assert [(corpus.corpus, corpus.tenant) for corpus in corpora] == [("default", ""), ("default", "acme")]
    await stub.DeleteCorpus(
        pb.DeleteCorpusRequest(scope=pb.Scope(tokenizer_hash=named.tokenizer_hash, tenant="acme", corpus="default"))
    )
    assert await found_after(stub, own, 1, 5) == [[2], [6]]


async def found_after(stub, scope: pb.Scope, *tokens: int) -> list[list[int]]:
    """Returns the tokens that follow each."""
    [response] = await look_up(stub, pb.LookupRequest(scope=scope, queries=[query(token) for token in tokens]))
    return [list(result.token_ids) for result in response.results]


@pytest.mark.parametrize("rpc", ["Lookup", "Record", "Watch"])
async def test_a_corpus_that_is_named_must_exist(stub, named, rpc):
    named.corpus = "nowhere"
    watched = pb.Scope(tokenizer_hash=named.tokenizer_hash, corpus="nowhere")
    calls = {
        "Lookup": lambda: stub.Lookup(iter([pb.LookupRequest(scope=named, queries=[query(1)])])),
        "Record": lambda: stub.Record(iter([pb.RecordRequest(scope=named, accepted_token_ids=[1])])),
        "Watch": lambda: stub.Watch(pb.WatchRequest(scope=watched)),
    }
    code, message = await refusal(calls[rpc]())
    expected = f"there is no corpus 'nowhere' for tokenizer {named.tokenizer_hash!r}"
    assert (code, message) == (grpc.StatusCode.NOT_FOUND, expected)


async def test_a_named_corpus_exists_from_loading_to_deletion(stub, named):
    named.corpus = "code"
    await load_prior(stub, pb.LoadPriorRequest(scope=named, documents=[sequence(1, 2)]))
    assert await record(stub, pb.RecordRequest(scope=named, accepted_token_ids=[1])) == [1]
    assert await found_after(stub, named, 1) == [[2]]
    await stub.DeleteCorpus(pb.DeleteCorpusRequest(scope=named))
    code, _ = await refusal(stub.Lookup(iter([pb.LookupRequest(scope=named, queries=[query(1)])])))
    assert code == grpc.StatusCode.NOT_FOUND


async def test_describes_itself_and_counts_what_each_tier_does(stub, named):
    accepted = [types_pb2.SourceCount(source=types_pb2.SOURCE_DYNAMIC, num_tokens=3)]
    await record(stub, pb.RecordRequest(scope=named, accepted_token_ids=[1, 2, 3], accepted_by_tier=accepted))
    await look_up(stub, pb.LookupRequest(scope=named, queries=[query(1, 2), query(2), query(9)]))
    info = await stub.GetInfo(pb.DatastoreServiceGetInfoRequest())
    assert (info.max_match_len, info.max_continuation_len, info.version) == (3, 16, __version__)
    assert (info.num_lookups, info.num_hits, info.num_local_lookups, info.max_ring_match_len) == (3, 2, 0, 10)
    assert info.store.split()[0] in ("redis", "valkey")
    assert info.used_memory_bytes > 100_000
    [dynamic] = [tier for tier in info.tiers if tier.tier == types_pb2.SOURCE_DYNAMIC]
    assert (dynamic.num_hits, dynamic.num_matched_tokens, dynamic.num_accepted_tokens) == (2, 3, 3)
    assert len(info.tiers) == 5


async def test_a_request_that_stores_nothing_is_not_counted(stub, named):
    accepted = [types_pb2.SourceCount(source=types_pb2.SOURCE_PRIOR, num_tokens=3)]
    gap = pb.RecordRequest(scope=named, base_len=5, accepted_token_ids=[1], accepted_by_tier=accepted)
    assert await record(stub, gap) == [0]
    info = await stub.GetInfo(pb.DatastoreServiceGetInfoRequest())
    assert sum(tier.num_accepted_tokens for tier in info.tiers) == 0


async def test_draining_ends_endless_streams_and_refuses_new_calls(served, named):
    stub = served.stub
    lookups, records = stub.Lookup(), stub.Record()
    watched = pb.Scope(tokenizer_hash=named.tokenizer_hash)
    watch = stub.Watch(pb.WatchRequest(scope=watched))
    await lookups.write(pb.LookupRequest(scope=named, queries=[query(1)]))
    await records.write(pb.RecordRequest(scope=named, accepted_token_ids=[1]))
    await asyncio.gather(lookups.read(), records.read(), watch.read())
    served.servicer.drain()
    for call in (lookups, records, watch):
        assert await call.code() == grpc.StatusCode.OK
    calls = [
        stub.Lookup(iter([pb.LookupRequest(scope=named)])),
        stub.Record(iter([pb.RecordRequest(scope=named)])),
        stub.Watch(pb.WatchRequest(scope=watched)),
        stub.LoadPrior(iter([pb.LoadPriorRequest(scope=named)])),
        stub.ListCorpora(pb.ListCorporaRequest()),
    ]
    for call in calls:
        assert await refusal(call) == (grpc.StatusCode.UNAVAILABLE, "the datastore is draining")


async def test_a_stream_ages_and_ends_between_requests_but_a_watcher_stays(serve, redis_url, named):
    stub = (await serve(redis_url, max_connection_age_s=0.3)).stub
    watch = stub.Watch(pb.WatchRequest(scope=pb.Scope(tokenizer_hash=named.tokenizer_hash)))
    await watch.read()
    num_answers, began = 0, time.monotonic()
    call = stub.Record()
    # gRPC decides which of these errors a write gets at the end.
    with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        while True:
            await call.write(pb.RecordRequest(scope=named, base_len=num_answers, accepted_token_ids=[1]))
            if (answer := await call.read()) is grpc.aio.EOF:
                break
            num_answers += 1
            assert answer.num_tokens == num_answers
    assert time.monotonic() - began >= 0.3
    assert num_answers > 1
    assert not watch.done()
    idle = stub.Lookup()
    await idle.write(pb.LookupRequest(scope=named, queries=[query(1)]))
    await idle.read()
    assert await idle.read() is grpc.aio.EOF
    assert await idle.code() == grpc.StatusCode.OK
    watch.cancel()


async def test_what_is_being_answered_when_a_server_drains_is_answered(served, named, monkeypatch):
    begun, may_end = asyncio.Event(), asyncio.Event()
    look_up_in_store = served.replica.look_up

    async def slow(*arguments):
        begun.set()
        await may_end.wait()
        return await look_up_in_store(*arguments)

    monkeypatch.setattr(served.replica, "look_up", slow)
    call = served.stub.Lookup()
    await call.write(pb.LookupRequest(scope=named, queries=[query(1)]))
    await begun.wait()
    served.servicer.drain()
    may_end.set()
    assert len((await call.read()).results) == 1
    assert await call.read() is grpc.aio.EOF
    assert await call.code() == grpc.StatusCode.OK
