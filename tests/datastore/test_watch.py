"""Watch: remote copies of the prior and of the shared tier."""

from __future__ import annotations

import asyncio
from array import array

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from outrider.datastore.watch import PRIOR_PIECE_TOKENS, pieces_of
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc as pb_grpc
from outrider.v1 import types_pb2
from tests.support.datastores import Served, hung, load_prior, record, refusal
from tests.support.waiting import until

piece_len = PRIOR_PIECE_TOKENS
lengths = st.integers(1, 3) | st.integers(piece_len - 2, piece_len + 2) | st.just(2 * piece_len)


@pytest.fixture
def watched(scope) -> pb.Scope:
    return pb.Scope(tokenizer_hash=scope.tokenizer_hash, retrieval_scope=types_pb2.RETRIEVAL_SCOPE_TENANT)


def assembled(pieces: list[pb.PriorPiece]) -> list[list[int]]:
    """Assembles the pieces of one prior as a watcher does."""
    found: list[list[int]] = []
    is_open = False
    for index, piece in enumerate(pieces):
        assert piece.is_first == (index == 0)
        assert piece.is_last == (index == len(pieces) - 1)
        for sequence in piece.documents:
            if is_open:
                found[-1] += sequence.token_ids
            else:
                found.append(list(sequence.token_ids))
            is_open = False
        is_open = piece.is_open
    assert not is_open
    return found


@given(lengths=st.lists(lengths, max_size=6))
def test_a_prior_in_pieces_is_that_prior(lengths):
    total = iter(range(sum(lengths)))
    documents = [array("i", [next(total) for _ in range(length)]) for length in lengths]
    pieces = list(pieces_of(documents))
    assert assembled(pieces) == [list(document) for document in documents]
    assert all(sum(len(each.token_ids) for each in piece.documents) <= PRIOR_PIECE_TOKENS for piece in pieces)


class Watcher:
    """Reads a Watch stream."""

    def __init__(self, stub, scope: pb.Scope) -> None:
        self.call = stub.Watch(pb.WatchRequest(scope=scope))

    async def prior(self) -> list[list[int]]:
        """The next complete prior."""
        pieces: list[pb.PriorPiece] = []
        while not pieces or not pieces[-1].is_last:
            response = await self._next()
            assert response.WhichOneof("change") == "prior"
            pieces.append(response.prior)
        return assembled(pieces)

    async def shared(self) -> tuple[list[int], list[int]]:
        """The next tokens of the shared tier, after those before them."""
        response = await self._next()
        assert response.WhichOneof("change") == "shared"
        return list(response.shared.context_token_ids), list(response.shared.token_ids)

    async def _next(self) -> pb.WatchResponse:
        async with asyncio.timeout(10):
            response = await self.call.read()
        assert response is not grpc.aio.EOF, await self.call.details()
        return response

    async def end(self) -> tuple[grpc.StatusCode, str]:
        """Returns the status that the stream ends with."""
        return await self.call.code(), await self.call.details()


def prior_of(tokenizer_hash: str, *documents: list[int], tenant: str = "") -> pb.LoadPriorRequest:
    scope = pb.Scope(tokenizer_hash=tokenizer_hash, tenant=tenant)
    return pb.LoadPriorRequest(scope=scope, documents=[pb.TokenSequence(token_ids=each) for each in documents])


async def test_a_watcher_is_sent_what_there_is_and_then_what_comes(stub, contributing, watched):
    await load_prior(stub, prior_of(contributing.tokenizer_hash, [1, 2], [3, 4, 5]))
    await record(stub, pb.RecordRequest(scope=contributing, accepted_token_ids=[10, 11, 12, 13]))
    watcher = Watcher(stub, watched)
    assert await watcher.prior() == [[1, 2], [3, 4, 5]]
    assert await watcher.shared() == ([], [10, 11, 12, 13])
    await record(stub, pb.RecordRequest(scope=contributing, base_len=3, accepted_token_ids=[13, 14]))
    assert await watcher.shared() == ([11, 12, 13], [14])


async def test_a_prior_that_is_loaded_or_deleted_is_sent_as_it_happens(stub, watched):
    watcher = Watcher(stub, watched)
    assert await watcher.prior() == []
    await load_prior(stub, prior_of(watched.tokenizer_hash, [1, 2]))
    assert await watcher.prior() == [[1, 2]]
    await load_prior(stub, prior_of(watched.tokenizer_hash, [3, 4], tenant="default"))
    assert await watcher.prior() == [[3, 4]]
    # The tenant's own prior comes first, so nothing changes for this watcher.
    await load_prior(stub, prior_of(watched.tokenizer_hash, [5, 6]))
    delete = pb.DeleteCorpusRequest(
        scope=pb.Scope(tokenizer_hash=watched.tokenizer_hash, tenant="default", corpus="default")
    )
    await stub.DeleteCorpus(delete)
    assert await watcher.prior() == [[5, 6]]
    delete.scope.tenant = ""
    await stub.DeleteCorpus(delete)
    assert await watcher.prior() == []


async def test_a_scope_of_one_session_is_sent_the_prior_alone(stub, contributing, watched):
    await record(stub, pb.RecordRequest(scope=contributing, accepted_token_ids=[10, 11]))
    watched.retrieval_scope = types_pb2.RETRIEVAL_SCOPE_SESSION
    watcher = Watcher(stub, watched)
    assert await watcher.prior() == []
    await record(stub, pb.RecordRequest(scope=contributing, base_len=2, accepted_token_ids=[12]))
    await load_prior(stub, prior_of(contributing.tokenizer_hash, [1, 2]))
    assert await watcher.prior() == [[1, 2]]


async def test_only_the_latest_additions_are_kept_for_new_watchers(serve, redis_url, contributing, watched):
    stub = (await serve(redis_url, max_num_shared_changes=16)).stub
    for position in range(500):
        await record(stub, pb.RecordRequest(scope=contributing, base_len=position, accepted_token_ids=[position]))
    watcher = Watcher(stub, watched)
    await watcher.prior()
    _, [first] = await watcher.shared()
    assert first > 100
    for token in range(first + 1, 500):
        assert await watcher.shared() == ([token - 3, token - 2, token - 1], [token])


@pytest.mark.slow
async def test_a_watcher_who_stops_reading_is_cut_off_and_holds_no_one_up(serve, redis_url, contributing, watched):
    served = await serve(redis_url, stall_timeout_s=0.5)
    stub = served.stub
    # More than fits into the buffers between the two.
    await load_prior(stub, *many_documents(contributing.tokenizer_hash))
    stalled = stub.Watch(pb.WatchRequest(scope=watched))
    await stalled.read()
    reading = Watcher(stub, watched)
    assert len(await reading.prior()) == 16
    await record(stub, pb.RecordRequest(scope=contributing, accepted_token_ids=[10, 11]))
    assert await reading.shared() == ([], [10, 11])
    await until(lambda: served.servicer.num_watchers == 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_to_the_end(stalled)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert caught.value.details() == "the watcher has read nothing for 0.5 s"
    await record(stub, pb.RecordRequest(scope=contributing, base_len=2, accepted_token_ids=[12]))
    assert await reading.shared() == ([10, 11], [12])


async def read_to_the_end(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def many_documents(tokenizer_hash: str) -> list[pb.LoadPriorRequest]:
    """A prior of some megabytes."""
    first = prior_of(tokenizer_hash, [2**30] * 250_000)
    return [first, *(pb.LoadPriorRequest(documents=first.documents) for _ in range(15))]


async def test_a_message_that_is_being_sent_when_a_server_drains_is_sent(served, watched):
    await load_prior(served.stub, prior_of(watched.tokenizer_hash, [2**30] * PRIOR_PIECE_TOKENS))
    # Little is sent to a caller that does not read.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(served.address, options=options) as channel:
        watch = pb_grpc.DatastoreServiceStub(channel).Watch(pb.WatchRequest(scope=watched))
        await watch.initial_metadata()  # it comes with the beginning of the first message
        served.servicer.drain()
        assert (await watch.read()).prior.is_first
        assert await watch.read() is grpc.aio.EOF
        assert await watch.code() == grpc.StatusCode.OK


async def test_there_are_no_more_watchers_than_may_be(serve, redis_url, watched):
    stub = (await serve(redis_url, max_num_watchers=1)).stub
    watcher = Watcher(stub, watched)
    await watcher.prior()
    code, message = await refusal(stub.Watch(pb.WatchRequest(scope=watched)))
    assert (code, message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "all 1 watchers that may be are there")
    watcher.call.cancel()

    async def may_watch() -> bool:
        another = stub.Watch(pb.WatchRequest(scope=watched))
        try:
            return await another.read() is not grpc.aio.EOF
        except grpc.aio.AioRpcError:
            return False

    await until(may_watch)


@pytest.mark.slow
async def test_a_watcher_notices_that_redis_is_lost(serve, own_redis, watched):
    served: Served = await serve(own_redis.url)
    watcher = Watcher(served.stub, watched)
    await watcher.prior()
    own_redis.kill()
    code, message = await watcher.end()
    assert (code, f"Redis at 127.0.0.1:{own_redis.port} cannot be used" in message) == (
        grpc.StatusCode.UNAVAILABLE,
        True,
    )
    own_redis.start()

    async def watches_again() -> bool:
        try:
            return await Watcher(served.stub, watched).prior() == []
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            return False

    await until(watches_again)


@pytest.mark.slow
async def test_a_watcher_notices_that_redis_hangs_and_that_it_was_emptied(serve, own_redis, watched):
    served = await serve(own_redis.url)
    await load_prior(served.stub, prior_of(watched.tokenizer_hash, [1, 2]))
    watcher = Watcher(served.stub, watched)
    assert await watcher.prior() == [[1, 2]]
    async with Redis.from_url(own_redis.url) as redis:
        await redis.flushall()
    assert await watcher.prior() == []
    with hung(own_redis):
        assert (await watcher.end())[0] == grpc.StatusCode.UNAVAILABLE
