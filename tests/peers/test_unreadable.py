"""A peer that sends bytes which are no message counts as lost like one that has died, and is tried again like one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from outrider.core.methods import PEARL
from outrider.core.params import RetrievalScope, SamplingParams, Source
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.core.speculation import SpeculationParams
from outrider.core.statistics import Absence
from outrider.core.tree import Draft
from outrider.peers.datastore import DatastorePeer
from outrider.peers.speculator import SpeculationSpec, SpeculatorPeer
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import speculator_pb2, types_pb2
from tests.support.services import draft_model
from tests.support.waiting import until

GARBAGE = b"\xff\xff"


class Peer:
    """A speculator and a datastore, each stream of which answers with garbage until `is_well`."""

    def __init__(self) -> None:
        self.is_well = False
        self.recorded: list[int] = []

    async def speculate(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            number = speculator_pb2.SpeculateRequest.FromString(message).sessions[0].number
            draft = types_pb2.Draft(base_len=2, first_node_id=1, parent_offsets=[0], token_ids=[5])
            answers = [
                speculator_pb2.SessionResponse(number=number, opened=speculator_pb2.SpeculateOpened()),
                speculator_pb2.SessionResponse(number=number, draft=speculator_pb2.SpeculatorDraft(draft=draft)),
            ]
            good = speculator_pb2.SpeculateResponse(sessions=answers)
            yield good.SerializeToString() if self.is_well else GARBAGE

    async def look_up(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            result = pb.LookupResult(base_len=2)
            yield pb.LookupResponse(results=[result]).SerializeToString() if self.is_well else GARBAGE

    async def record(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            request = pb.RecordRequest.FromString(message)
            end = request.base_len + len(request.accepted_token_ids)
            if self.is_well:
                self.recorded.append(end)
            yield pb.RecordResponse(num_tokens=end).SerializeToString() if self.is_well else GARBAGE

    async def watch(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        piece = pb.PriorPiece(is_first=True, is_last=True, documents=[pb.TokenSequence(token_ids=[1, 2, 3])])
        yield pb.WatchResponse(prior=piece).SerializeToString() if self.is_well else GARBAGE
        await asyncio.Event().wait()


@pytest.fixture
async def peer_and_address() -> AsyncIterator[tuple[Peer, str]]:
    peer, server = Peer(), grpc.aio.server()
    stream: Any = grpc.stream_stream_rpc_method_handler
    unary: Any = grpc.unary_stream_rpc_method_handler
    services = {
        "outrider.v1.SpeculatorService": {"Speculate": stream(peer.speculate)},
        "outrider.v1.DatastoreService": {
            "Lookup": stream(peer.look_up),
            "Record": stream(peer.record),
            "Watch": unary(peer.watch),
        },
    }
    handlers = [grpc.method_handlers_generic_handler(name, methods) for name, methods in services.items()]
    server.add_generic_rpc_handlers(tuple(handlers))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield peer, f"127.0.0.1:{port}"
    await server.stop(None)


class Listener:
    """A session's callbacks from its speculator."""

    def __init__(self) -> None:
        self.drafts: list[Draft] = []
        self.num_lost = 0

    def on_attached(self, forward_us: int) -> None: ...

    def on_draft(self, draft: Draft) -> None:
        self.drafts.append(draft)

    def on_detached(self, absence: Absence) -> None:
        self.num_lost += 1


async def test_a_speculator_s_stream_is_opened_again(
    peer_and_address: tuple[Peer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.peers.speculator.GARBAGE_RETRY_S", 0.05)
    server, address = peer_and_address
    peer, listener = SpeculatorPeer(address, draft_model()), Listener()
    spec = SpeculationSpec("s", 2, SamplingParams(), SpeculationParams(PEARL))
    stream = peer.speculate(spec, [1, 2], listener)
    await until(lambda: listener.num_lost)
    assert "cannot be parsed" in peer.state.last_error
    server.is_well = True
    await until(lambda: listener.drafts)
    stream.close()
    await peer.state.close()


async def test_a_datastore_s_streams_are_opened_again(peer_and_address: tuple[Peer, str]) -> None:
    server, address = peer_and_address
    peer = DatastorePeer(address, "a tokenizer", 1000)
    answers: list[int] = []
    num_lost = 0

    def lose(absence: Absence) -> None:
        nonlocal num_lost
        num_lost += 1

    def answer(base_len: int, _: object) -> None:
        answers.append(base_len)

    tiers = peer.tiers(RetrievalScope.SESSION)
    committed = [1, 2]
    stream = peer.retrieve("s", committed, RetrievalScope.SESSION, False, answer, lose, RetrievalPlan())
    stream.look_up()
    await until(lambda: num_lost)
    assert "cannot be parsed" in peer.state.last_error
    server.is_well = True

    def ask_again() -> bool:
        stream.look_up()
        return bool(answers)

    await until(ask_again)
    await until(lambda: tiers.prior is not None)
    committed.append(3)
    stream.record_verdict([Source.TARGET])
    stream.close()
    await until(lambda: 3 in server.recorded)
    await peer.close()
