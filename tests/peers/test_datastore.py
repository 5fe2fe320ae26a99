"""Records and copies: every loss is counted."""

from __future__ import annotations

import asyncio

import pytest

from outrider.core.params import TIERS, RetrievalScope, Source
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.peers import recording
from outrider.peers.datastore import DatastorePeer
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import types_pb2
from tests.support.longest_turn import LongestTurn
from tests.support.retrieving import Listener, retrieve
from tests.support.scripted_datastore import babbling, scripted_datastore
from tests.support.waiting import until


async def test_tokens_arrive_in_order_and_the_end_of_a_session_arrives_last() -> None:
    async with scripted_datastore() as (datastore, peer):
        committed = [1, 2, 3]
        stream = retrieve(peer, "s", committed, Listener())
        for token in range(4, 100):
            committed.append(token)
            stream.record_verdict([Source.TARGET])
        stream.close()
        await until(lambda: "s" in datastore.ended)
        assert datastore.tokens["s"] == list(range(1, 100))
        assert datastore.num_records < 20, "records are joined"
        assert peer.state.num_shed_tokens == 0


async def test_a_lost_stream_loses_no_token_no_rejection_and_no_count() -> None:
    async with scripted_datastore() as (datastore, peer):
        committed = [1] * 40
        stream = retrieve(peer, "s", committed, Listener())
        await until(lambda: len(datastore.tokens.get("s", ())) == 40)
        datastore.fail_records_from = datastore.num_records + 1
        committed.extend([2, 3])
        stream.record_verdict([Source.PRIOR, Source.TARGET], [9, 8])
        stream.close()
        await until(lambda: "s" in datastore.ended)
        assert datastore.num_record_streams == 2
        assert datastore.tokens["s"] == [1] * 40 + [2, 3]
        [rejection] = datastore.rejections
        assert rejection.rejected_token_ids == [9, 8]
        assert rejection.context_token_ids[-2:] == [1, 2]
        assert datastore.accepted_by_tier == {types_pb2.SOURCE_PRIOR: 1}


async def test_a_datastore_that_has_lost_tokens_gets_them_again() -> None:
    async with scripted_datastore() as (datastore, peer):
        committed = list(range(50))
        stream = retrieve(peer, "s", committed, Listener())
        await until(lambda: len(datastore.tokens.get("s", ())) == 50)
        del datastore.tokens["s"][20:]  # as after a restart of its Redis
        committed.append(50)
        stream.record_verdict([Source.TARGET])
        stream.close()
        await until(lambda: "s" in datastore.ended)
        assert datastore.tokens["s"] == list(range(51))


async def test_a_datastore_that_takes_nothing_costs_a_bounded_backlog_and_says_what_was_shed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording, "MAX_BACKLOG_TOKENS", 1000)
    async with scripted_datastore() as (datastore, peer):
        datastore.holds_records.clear()
        for number in range(10):
            retrieve(peer, f"s{number}", [number] * 300, Listener()).close()
        assert peer.state.num_shed_tokens == 7 * 300
        datastore.holds_records.set()
        await until(lambda: datastore.ended >= {"s7", "s8", "s9"})
        assert datastore.tokens["s9"] == [9] * 300


async def test_a_session_that_is_refused_does_not_hold_up_the_others_and_every_token_of_it_is_counted_once() -> None:
    async with scripted_datastore() as (datastore, peer):
        datastore.refuses = {"bad"}
        committed = [1] * 40
        bad = retrieve(peer, "bad", committed, Listener())
        await until(lambda: peer.state.num_shed_tokens == 40)
        committed.extend([2, 3])
        bad.record_verdict([Source.TARGET] * 2)
        bad.close()
        good = retrieve(peer, "good", [1] * 40, Listener())
        good.close()
        await until(lambda: "good" in datastore.ended)
        assert peer.state.num_shed_tokens == 42
        assert "bad" not in datastore.tokens


async def test_closing_sends_what_is_left_or_counts_it() -> None:
    async with scripted_datastore() as (datastore, peer):
        retrieve(peer, "s", [1, 2], Listener()).close()
        await peer.close()
        assert datastore.ended == {"s"}
    async with scripted_datastore() as (datastore, peer):
        datastore.holds_records.clear()
        retrieve(peer, "s", [1, 2], Listener()).close()
        await peer._recorder.close(0.01)
        assert peer.state.num_shed_tokens == 2


async def test_a_datastore_that_answers_and_records_nothing_is_connected_and_says_why() -> None:
    async with scripted_datastore() as (datastore, peer):
        datastore.trouble = "the disk is full"
        stream = retrieve(peer, "s", [1, 2, 3], listener := Listener())
        stream.look_up()
        await until(lambda: listener.answers)
        await until(lambda: "the disk is full" in peer.state.info().last_error)
        assert peer.state.info().connected
        datastore.trouble = ""
        await until(lambda: not peer.state.info().last_error)
        assert datastore.tokens["s"] == [1, 2, 3]


async def test_without_the_rejected_tier_no_rejection_is_recorded() -> None:
    async with scripted_datastore() as (datastore, peer):
        others = RetrievalPlan(sources=tuple(tier for tier in TIERS if tier is not Source.REJECTED))
        for name, plan in (("a", others), ("b", RetrievalPlan(context_len=2)), ("c", None)):
            committed = [1, 2, 3]
            stream = retrieve(peer, name, committed, Listener(), plan)
            committed.extend([4, 5])
            stream.record_verdict([Source.PRIOR, Source.TARGET], [9, 8])
            stream.close()
            await until(lambda name=name: name in datastore.ended)
        [rejection] = datastore.rejections
        assert list(rejection.context_token_ids) == [3, 4], "as long as the lookups that it must meet"
        assert datastore.tokens["a"] == datastore.tokens["c"] == [1, 2, 3, 4, 5]


async def test_the_prior_is_copied_piece_by_piece_and_replaced_as_a_whole() -> None:
    def piece(**fields: object) -> pb.WatchResponse:
        return pb.WatchResponse(prior=pb.PriorPiece(**fields))  # type: ignore[arg-type]

    def runs(*token_ids: list[int]) -> list[pb.TokenSequence]:
        return [pb.TokenSequence(token_ids=run) for run in token_ids]

    async with scripted_datastore() as (datastore, _):
        datastore.watched = [
            piece(is_first=True, documents=runs([1, 2, 3], [4, 5]), is_open=True),
            piece(documents=runs([6], [7, 8]), is_last=True),
        ]
        address = _.state.address
        peer = DatastorePeer(address, "a tokenizer", 1000)
        tiers = peer.tiers(RetrievalScope.SESSION)
        await until(lambda: tiers.prior is not None)
        assert tiers.prior is not None
        assert tiers.prior.followers((4, 5)) == ((6, 1),), "a document that comes in two pieces is one"
        assert tiers.prior.followers((6,)) == (), "documents do not touch"
        assert tiers.prior.followers((7,)) == ((8, 1),)
        assert tiers.shared is None
        assert peer.state.is_connected, "whoever is sent something is connected"
        await peer.close()


async def test_a_prior_that_cannot_be_one_is_refused_and_the_next_one_is_taken() -> None:
    async with scripted_datastore() as (datastore, other):
        wrong = pb.PriorPiece(is_first=True, is_last=True, documents=[pb.TokenSequence(token_ids=[1, -2, 3])])
        datastore.watched = [pb.WatchResponse(prior=wrong)]
        peer = DatastorePeer(other.state.address, "a tokenizer", 1000)
        await until(lambda: "cannot be one" in peer.state.last_error)
        right = pb.PriorPiece(is_first=True, is_last=True, documents=[pb.TokenSequence(token_ids=[1, 2, 3])])
        datastore.watched = [pb.WatchResponse(prior=right)]
        await until(lambda: peer.tiers(RetrievalScope.SESSION).prior is not None)
        await peer.close()


async def test_the_shared_tier_is_copied_for_a_scope_that_has_one() -> None:
    async with scripted_datastore() as (datastore, peer):
        run = pb.SharedRun(context_token_ids=[1, 2], token_ids=[3, 4])
        datastore.watched = [pb.WatchResponse(shared=run), pb.WatchResponse(shared=run)]
        tiers = peer.tiers(RetrievalScope.TENANT)
        await until(lambda: tiers.shared is not None and tiers.shared.followers((3,)) == ((4, 2),))
        assert tiers.shared is not None
        assert tiers.shared.followers((1,)) == (), "the context was counted when it was a run"
        assert peer.tiers(RetrievalScope.TENANT) is tiers, "one copy for all sessions"


async def test_a_run_of_any_length_is_learnt_without_holding_up_the_loop() -> None:
    longest = LongestTurn()
    async with scripted_datastore() as (datastore, peer):
        last = pb.SharedRun(context_token_ids=[1, 2], token_ids=[3, 4])
        long = pb.SharedRun(context_token_ids=[1] * 100_000, token_ids=list(range(500_000)))
        datastore.watched = [pb.WatchResponse(shared=run) for run in (long, last)]
        tiers = peer.tiers(RetrievalScope.TENANT)
        watching = asyncio.create_task(longest.watch())
        await until(lambda: tiers.shared is not None and tiers.shared.followers((2, 3)) == ((4, 1),))
        watching.cancel()
        assert tiers.shared is not None
        assert tiers.shared.followers((499_998,)) == ((499_999, 1),)
    assert longest.seconds < 0.4  # all at once would take seconds


async def test_a_datastore_that_cannot_be_understood_is_used_once_it_can_be() -> None:
    async with babbling() as (address, called):
        peer = DatastorePeer(address, "a tokenizer", 1000)
        listener = Listener()
        stream = retrieve(peer, "s", [1, 2, 3], listener)
        stream.look_up()
        await until(lambda: listener.num_lost)
        await until(lambda: {"Record", "Lookup", "Watch"} <= set(called) and called.count("Record") > 1)
        assert "cannot be parsed" in peer.state.last_error
    async with scripted_datastore(address, peer) as (datastore, _):
        datastore.lookup_results[3] = pb.LookupResult(match_len=2, parent_offsets=[0], token_ids=[7], counts=[1])

        def answered() -> bool:
            stream.look_up()
            return bool(listener.answers)

        await until(answered)
        stream.close()
        await until(lambda: "s" in datastore.ended)
        assert datastore.tokens["s"] == [1, 2, 3]
