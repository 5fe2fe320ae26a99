"""Several replicas behind one name: sessions spread over them, and the loss of one is a small disturbance for its own
sessions and none for the others."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from outrider.peers import reconnecting
from outrider.peers.datastore import DatastorePeer
from outrider.peers.speculator import SpeculatorPeer
from outrider.security.peer_channel import PeerSecurity
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc
from tests.support.name_server import NameServer
from tests.support.retrieving import Listener as Retriever
from tests.support.retrieving import retrieve
from tests.support.scripted_datastore import Context, ScriptedDatastore
from tests.support.scripted_speculator import AModel, Listener, ScriptedSpeculator, serving, speculate
from tests.support.waiting import until

SOON_S = 1.0


class Name:
    """A name, and its addresses."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)
        self.server = NameServer(lambda name: self.addresses)

    def target(self, bound: str) -> str:
        """A gRPC target: the name, with the port of an address."""
        return f"dns://127.0.0.1:{self.server.port}/peer:{bound.rpartition(':')[2]}"


@asynccontextmanager
async def name(*addresses: str) -> AsyncIterator[Name]:
    found = Name(addresses)
    await found.server.start()
    try:
        yield found
    finally:
        found.server.stop()


@asynccontextmanager
async def dialling(target: str) -> AsyncIterator[SpeculatorPeer]:
    peer = SpeculatorPeer(target, AModel(), PeerSecurity(insecure=True))
    try:
        yield peer
    finally:
        await peer.close()


async def test_sessions_take_turns_and_a_replica_that_ends_holds_up_its_own_for_a_moment_only() -> None:
    going, staying = ScriptedSpeculator(), ScriptedSpeculator()
    async with AsyncExitStack() as last, name("127.0.0.2", "127.0.0.3") as peers:
        first = AsyncExitStack()
        bound = await first.enter_async_context(serving(going, "127.0.0.2:0"))
        await last.enter_async_context(serving(staying, f"127.0.0.3:{bound.rpartition(':')[2]}"))
        peer = await last.enter_async_context(dialling(peers.target(bound)))
        # The first sessions go to whichever connection is ready first.
        while not (going.num_streams and staying.num_streams):
            listener = Listener()
            speculate(peer, listener)
            await until(lambda listener=listener: listener.num_drafts)
        before = going.num_streams, staying.num_streams
        listeners = [Listener() for _ in range(8)]
        streams = [speculate(peer, listener) for listener in listeners]
        await until(lambda: all(listener.num_drafts for listener in listeners))
        assert (going.num_streams, staying.num_streams) == (before[0] + 4, before[1] + 4)
        num_drafts = {listener: listener.num_drafts for listener in listeners}
        began = time.monotonic()
        await first.aclose()
        await until(lambda: staying.num_streams == before[0] + before[1] + 8)
        await until(lambda: all(listener.num_drafts > num_drafts[listener] for listener in listeners if lost(listener)))
        assert time.monotonic() - began < SOON_S
        assert sorted(listener.num_detached for listener in listeners) == [0] * 4 + [1] * 4
        assert peer.breaker.is_closed
        assert staying.num_checks == 0  # nobody believed that the peer was down
        assert peer.state.is_connected
        for stream in streams:
            stream.close()


def lost(listener: Listener) -> bool:
    return listener.num_detached > 0


async def test_only_if_no_replica_takes_it_is_the_peer_taken_for_down() -> None:
    speculator, listener = ScriptedSpeculator(), Listener()
    async with name("127.0.0.2") as peers, AsyncExitStack() as stack:
        bound = await stack.enter_async_context(serving(speculator, "127.0.0.2:0"))
        peer = await stack.enter_async_context(dialling(peers.target(bound)))
        stream = speculate(peer, listener)
        await until(lambda: listener.num_drafts)
        speculator.refusal = grpc.StatusCode.UNAVAILABLE
        peer.state.dial_anew()
        refused = Listener()
        speculate(peer, refused)
        await until(lambda: len(speculator.opened) >= 3)
        await until(lambda: speculator.num_checks)
        stream.close()


@pytest.mark.slow
async def test_a_session_leaves_a_replica_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # A session that leaves a silent replica may be given the same one again, and then waits twice as long for it, so
    # the total time depends on chance. With short waits it is always short.
    monkeypatch.setattr(reconnecting, "FIRST_ANSWER_S", 0.3)
    monkeypatch.setattr(reconnecting, "MAX_FIRST_ANSWER_S", 1.0)
    silent, well = ScriptedSpeculator(), ScriptedSpeculator()
    silent.is_silent = True
    async with AsyncExitStack() as stack, name("127.0.0.2", "127.0.0.3") as peers:
        bound = await stack.enter_async_context(serving(silent, "127.0.0.2:0"))
        peer = await stack.enter_async_context(dialling(peers.target(bound)))
        listeners = [Listener() for _ in range(3)]
        streams = [speculate(peer, listener) for listener in listeners]
        await until(lambda: len(silent.opened) >= len(listeners))
        await stack.enter_async_context(serving(well, f"127.0.0.3:{bound.rpartition(':')[2]}"))
        await until(lambda: all(listener.num_drafts for listener in listeners))
        assert well.num_streams == len(listeners)
        for stream in streams:
            stream.close()


async def test_a_new_replica_is_found_when_a_connection_ends() -> None:
    old, new, listener = ScriptedSpeculator(), ScriptedSpeculator(), Listener()
    async with AsyncExitStack() as last, name("127.0.0.2") as peers:
        first = AsyncExitStack()
        bound = await first.enter_async_context(serving(old, "127.0.0.2:0"))
        peer = await last.enter_async_context(dialling(peers.target(bound)))
        stream = speculate(peer, listener)
        await until(lambda: listener.num_drafts)
        await last.enter_async_context(serving(new, f"127.0.0.3:{bound.rpartition(':')[2]}"))
        peers.addresses = ["127.0.0.3"]
        began = time.monotonic()
        await first.aclose()
        await until(lambda: new.num_streams)
        # gRPC resolves a name again after at least a second.
        assert time.monotonic() - began < 3 * SOON_S
        stream.close()


class Leaving(ScriptedDatastore):
    """Ends its streams of lookups in order after each answer."""

    async def Lookup(
        self, requests: AsyncIterator[pb.LookupRequest], context: Context
    ) -> AsyncIterator[pb.LookupResponse]:
        yield await anext(super().Lookup(requests, context))


async def test_questions_go_on_at_once_where_a_stream_was_ended_in_order() -> None:
    servicer = Leaving()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    datastore_pb2_grpc.add_DatastoreServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    peer = DatastorePeer(address, "a tokenizer", 1000)
    listener = Retriever()
    stream = retrieve(peer, "s", [5, 6], listener)
    for number in range(1, 20):
        stream.look_up()
        await until(lambda number=number: len(listener.answers) >= number, SOON_S)
    assert listener.num_lost == 0
    assert peer.state.is_connected
    assert len(servicer.lookups) == 19
    await peer.close()
    await server.stop(0)
