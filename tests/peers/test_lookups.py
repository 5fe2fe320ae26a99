"""Lookups at the datastore: each answer reaches its caller, and nobody waits for a datastore that is away."""

from __future__ import annotations

import time

import pytest

from outrider.core.params import TIERS, Source
from outrider.core.retrieval.ngrams import Continuation
from outrider.core.retrieval.plan import CONTEXT_LEN, RetrievalPlan
from outrider.peers import lookups
from outrider.peers.datastore import EVERYTHING, DatastorePeer
from outrider.peers.lookups import ANSWER_TIMEOUT_S, MAX_MATCH_LEN
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import types_pb2
from outrider.wire.convert import MAX_DRAFT_LEN
from tests.support.forgetful_proxy import forgetful
from tests.support.retrieving import Listener, retrieve
from tests.support.scripted_datastore import scripted_datastore
from tests.support.waiting import until


async def test_answers_reach_the_session_that_asked() -> None:
    async with scripted_datastore() as (datastore, peer):
        datastore.lookup_results[2] = pb.LookupResult(
            match_len=2, tier=types_pb2.SOURCE_RING, parent_offsets=[0, 1, 2], token_ids=[7, 8, 9], counts=[3, 2, 1]
        )
        first, second = Listener(), Listener()
        streams = [retrieve(peer, "a", [5, 6], first), retrieve(peer, "b", [5, 6, 7], second)]
        for stream in streams:
            stream.look_up()
        await until(lambda: first.answers and second.answers)
        [(base_len, found)] = first.answers
        assert (base_len, found.match_len, found.tier, found.token_ids) == (2, 2, Source.RING, (7, 8, 9))
        assert second.answers == [(3, Continuation(0, None, (), (), ()))]
        assert peer.state.is_connected


@pytest.mark.parametrize(("match_len", "believed"), [(-(2**31), 0), (2**31 - 1, MAX_MATCH_LEN)])
async def test_a_match_that_cannot_be_is_cut_to_one_that_can(match_len: int, believed: int) -> None:
    async with scripted_datastore() as (datastore, peer):
        lists = {"parent_offsets": [0] * 5000, "token_ids": [7] * 5000, "counts": [1] * 5000}
        datastore.lookup_results[2] = pb.LookupResult(match_len=match_len, tier=types_pb2.SOURCE_RING, **lists)
        listener = Listener()
        retrieve(peer, "a", [5, 6], listener).look_up()
        await until(lambda: listener.answers)
        [(_, found)] = listener.answers
        assert (found.match_len, len(found.token_ids)) == (believed, MAX_DRAFT_LEN)


async def test_a_question_is_about_as_many_tokens_and_tiers_as_the_plan_says() -> None:
    async with scripted_datastore() as (datastore, peer):
        ring = RetrievalPlan(context_len=3, sources=(Source.RING,))
        committed = list(range(1, 31))
        for name, plan in (("a", EVERYTHING), ("b", ring), ("c", RetrievalPlan(sources=tuple(reversed(TIERS))))):
            listener = Listener()
            retrieve(peer, name, committed, listener, plan).look_up()
            await until(lambda listener=listener: listener.answers)
        asked = [(list(request.tiers), list(request.queries[0].context_token_ids)) for request in datastore.lookups]
        assert asked == [
            ([], committed[-CONTEXT_LEN:]),
            ([types_pb2.SOURCE_RING], [28, 29, 30]),
            ([], committed[-CONTEXT_LEN:]),
        ]


async def test_what_comes_behind_tokens_that_are_only_expected_can_be_asked() -> None:
    async with scripted_datastore() as (datastore, peer):
        listener = Listener()
        stream = retrieve(peer, "s", [1, 2, 3], listener, RetrievalPlan(context_len=4))
        stream.look_up([4, 5])
        await until(lambda: listener.answers)
        [query] = datastore.lookups[0].queries
        assert (query.base_len, list(query.context_token_ids)) == (5, [2, 3, 4, 5])
        assert listener.answers[0][0] == 5


async def test_who_has_no_plan_asks_nothing() -> None:
    async with scripted_datastore() as (datastore, peer):
        listener = Listener()
        retrieve(peer, "silent", [1, 2], listener, None).look_up()
        asking = Listener()
        retrieve(peer, "s", [1, 2], asking).look_up()
        await until(lambda: asking.answers)
        assert len(datastore.lookups) == 1
        assert not listener.answers


async def test_questions_that_come_too_fast_give_way_to_the_latest() -> None:
    async with scripted_datastore() as (datastore, peer):
        datastore.holds_lookups.clear()
        listener, committed = Listener(), [1]
        stream = retrieve(peer, "s", committed, listener)
        stream.look_up()
        await until(lambda: len(datastore.lookups) == 1)
        for token in range(2, 50):
            committed.append(token)
            stream.record_verdict([Source.TARGET])
            stream.look_up()
        datastore.holds_lookups.set()
        await until(lambda: len(listener.answers) == 2)
        assert [base_len for base_len, _ in listener.answers] == [1, 49]
        assert len(datastore.lookups) == 2


async def test_a_datastore_that_hangs_is_given_up_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "ANSWER_TIMEOUT_S", 0.05)
    async with scripted_datastore() as (datastore, peer):
        datastore.holds_lookups.clear()
        listener = Listener()
        stream = retrieve(peer, "s", [1], listener)
        stream.look_up()
        await until(lambda: listener.num_lost == 1)
        assert not peer.state.is_connected
        assert "no answer within" in peer.state.last_error
        stream.look_up()
        assert listener.num_lost == 2, "nobody waits for a datastore that is away"
        datastore.holds_lookups.set()
        await until(lambda: listener.answers)
        assert peer.state.is_connected


async def test_a_connection_that_something_on_the_way_has_forgotten_is_replaced() -> None:
    async with scripted_datastore() as (_, near), forgetful(near.state.address) as proxy:
        peer = DatastorePeer(proxy.address, "a tokenizer", 1000)
        listener = Listener()
        stream = retrieve(peer, "s", [1, 2, 3], listener)
        stream.look_up()
        await until(lambda: listener.answers)
        proxy.forget()
        began = time.monotonic()

        def answered_again() -> bool:
            stream.look_up()
            return len(listener.answers) > 1

        await until(answered_again)
        assert time.monotonic() - began < ANSWER_TIMEOUT_S + 1.5  # gRPC by itself: 30 s
        await peer.close()
