"""Peers with TLS and tokens: new calls after a rotation use the new files, and running calls continue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from outrider.core.methods import PEARL
from outrider.core.params import RetrievalScope, SamplingParams
from outrider.core.speculation import SpeculationParams
from outrider.core.statistics import Absence
from outrider.core.tree import Draft
from outrider.peers.channel import PeerState
from outrider.peers.datastore import DatastorePeer
from outrider.peers.speculator import SpeculationSpec, SpeculatorPeer
from outrider.peers.tier_copies import TierCopies, TierWatch
from outrider.security.certificates import server_credentials
from outrider.security.peer_channel import PeerSecurity
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc, speculator_pb2, speculator_pb2_grpc, types_pb2
from tests.support.certificates import Authority, replaced
from tests.support.services import draft_model
from tests.support.shared_calls import shared
from tests.support.waiting import until

Stub = datastore_pb2_grpc.DatastoreServiceStub


@dataclass
class Seen:
    """What a server has noticed of one stream."""

    certificate: str
    token: str
    scopes: list[pb.Scope] = field(default_factory=list)


class Witness(datastore_pb2_grpc.DatastoreServiceServicer):
    """Answers lookups with nothing, and remembers the callers."""

    def __init__(self) -> None:
        self.lookups: list[Seen] = []
        self.watches: list[Seen] = []

    async def Lookup(  # type: ignore[override]
        self, requests: AsyncIterator[pb.LookupRequest], context: Any
    ) -> AsyncIterator[pb.LookupResponse]:
        self.lookups.append(_seen(context))
        async for request in requests:
            if request.HasField("scope"):
                self.lookups[-1].scopes.append(request.scope)
            yield pb.LookupResponse(results=[pb.LookupResult() for _ in request.queries])

    async def Watch(  # type: ignore[override]
        self, request: pb.WatchRequest, context: Any
    ) -> AsyncIterator[pb.WatchResponse]:
        self.watches.append(_seen(context))
        self.watches[-1].scopes.append(request.scope)
        yield pb.WatchResponse(prior=pb.PriorPiece(is_first=True, is_last=True))
        await asyncio.Event().wait()


def _seen(context: Any) -> Seen:
    names = context.auth_context().get("x509_common_name", [b""])
    return Seen(names[0].decode(), dict(context.invocation_metadata()).get("authorization", ""))


@asynccontextmanager
async def witness(tls: grpc.ServerCredentials | None = None) -> AsyncIterator[tuple[Witness, str]]:
    servicer, server = Witness(), grpc.aio.server()
    datastore_pb2_grpc.add_DatastoreServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0") if tls is None else server.add_secure_port("127.0.0.1:0", tls)
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def asked(call: Any) -> None:
    """One more lookup on a stream, with its answer."""
    await call.write(pb.LookupRequest(queries=[pb.Query()]))
    assert isinstance(await call.read(), pb.LookupResponse)


async def test_a_new_stream_shows_the_certificate_and_the_token_of_now_and_an_old_one_goes_on(tmp_path: Path) -> None:
    authority = Authority("ca")
    ca = replaced(tmp_path / "ca", authority.pem)
    server_pair = authority.issue("server").write(tmp_path, "server")
    cert, key = authority.issue("first").write(tmp_path, "peer")
    token = replaced(tmp_path / "token", b"one\n")
    security = PeerSecurity(str(ca), str(cert), str(key), str(token))
    async with witness(server_credentials(*map(str, server_pair), str(ca))) as (servicer, address):
        state = PeerState("datastore", address, security)
        old = state.stub(Stub).Lookup()
        await asked(old)
        authority.issue("second").write(tmp_path, "peer")
        replaced(token, b"two")
        new = state.stub(Stub).Lookup()
        await asked(new)
        await asked(old)
        assert [(seen.certificate, seen.token) for seen in servicer.lookups] == [
            ("first", "Bearer one"),
            ("second", "Bearer two"),
        ]
        for call in (old, new):
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
        await state.close()


async def test_both_sides_may_change_their_authority_while_streams_run(tmp_path: Path) -> None:
    old_one, new_one = Authority("old"), Authority("new")
    ca = replaced(tmp_path / "ca", old_one.pem)
    server_pair = old_one.issue("server").write(tmp_path, "server")
    cert, key = old_one.issue("peer").write(tmp_path, "peer")
    security = PeerSecurity(str(ca), str(cert), str(key))
    async with witness(server_credentials(*map(str, server_pair), str(ca))) as (servicer, address):
        state = PeerState("datastore", address, security)
        calls = [state.stub(Stub).Lookup()]
        await asked(calls[0])

        def believe(*authorities: Authority) -> None:
            replaced(ca, b"".join(authority.pem for authority in authorities))

        for step in (
            lambda: believe(old_one, new_one),
            lambda: new_one.issue("server").write(tmp_path, "server"),
            lambda: new_one.issue("new peer").write(tmp_path, "peer"),
            lambda: believe(new_one),
        ):
            step()
            calls.append(state.stub(Stub).Lookup())
            for call in calls:
                await asked(call)
        assert [seen.certificate for seen in servicer.lookups] == ["peer"] * 3 + ["new peer"] * 2
        left_behind = PeerState("datastore", address, _of(tmp_path, old_one))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await asked(left_behind.stub(Stub).Lookup(timeout=5))
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        await left_behind.close()
        await state.close()


def _of(folder: Path, authority: Authority) -> PeerSecurity:
    """Files of a peer whose authority is no longer trusted."""
    cert, key = authority.issue("left behind").write(folder, "left-behind")
    return PeerSecurity(str(folder / "ca"), str(cert), str(key))


async def test_an_old_channel_is_closed_when_its_last_stream_is_over(tmp_path: Path) -> None:
    authority = Authority("ca")
    ca = replaced(tmp_path / "ca", authority.pem)
    pair = authority.issue("server").write(tmp_path, "server")
    async with witness(server_credentials(*map(str, pair))) as (_, address):
        state = PeerState("datastore", address, PeerSecurity(str(ca)))
        old = state.stub(Stub).Lookup()
        await asked(old)
        replaced(ca, authority.pem + Authority("another").pem)
        await asked(state.stub(Stub).Lookup())
        closing = state._channel._closing
        assert len(closing) == 1
        await old.done_writing()
        assert await old.read() is grpc.aio.EOF
        async with asyncio.timeout(5):
            await asyncio.gather(*closing.values())
        await asyncio.sleep(0)
        assert not closing
        await state.close()


async def test_plaintext_and_tokens_leave_the_machine_only_if_that_was_asked_for() -> None:
    with pytest.raises(ValueError, match="is not on this machine: give --peer-ca"):
        PeerState("datastore", "10.0.0.2:1")
    await PeerState("datastore", "10.0.0.2:1", PeerSecurity(insecure=True)).close()


async def test_a_token_goes_in_plaintext_to_this_machine(tmp_path: Path) -> None:
    token = replaced(tmp_path / "token", b"one")
    async with witness() as (servicer, address):
        state = PeerState("datastore", address, PeerSecurity(token_file=str(token)))
        await asked(state.stub(Stub).Lookup())
        assert servicer.lookups[0].token == "Bearer one"
        await state.close()


async def test_every_tenant_asks_and_watches_in_its_own_name() -> None:
    async with witness() as (servicer, address):
        peer = DatastorePeer(address, "a tokenizer", 100, tenant="house")
        streams = [
            peer.retrieve(
                f"session of {tenant}",
                [1],
                RetrievalScope.TENANT,
                False,
                lambda *_: None,
                lambda: None,
                tenant=tenant,
            )
            for tenant in ("acme", "evil", None)
        ]
        for stream in streams:
            stream.look_up()
        tiers = [peer.tiers(RetrievalScope.TENANT, tenant) for tenant in ("acme", "evil", None, "acme")]
        assert tiers[0] is tiers[3]
        assert len(set(map(id, tiers))) == 3
        await until(lambda: len(servicer.watches) == 4 and servicer.lookups and len(servicer.lookups[0].scopes) == 3)
        asked_for = {(scope.session_id, scope.tenant) for scope in servicer.lookups[0].scopes}
        assert asked_for == {
            ("session of acme", "acme"),
            ("session of evil", "evil"),
            ("session of None", "house"),
        }
        assert sorted(seen.scopes[0].tenant for seen in servicer.watches) == ["acme", "evil", "house", "house"]
        await peer.close()


async def test_copies_are_bounded_and_those_that_nobody_asks_for_are_dropped() -> None:
    async with witness() as (_, address):
        state = PeerState("datastore", address)

        def watch(scope: RetrievalScope, tenant: str) -> TierWatch:
            return TierWatch(state, pb.Scope(tokenizer_hash="t", tenant=tenant))

        copies = TierCopies(watch, max_num_copies=2, idle_s=60)
        first = copies.get(RetrievalScope.TENANT, "a")
        copies.get(RetrievalScope.TENANT, "b")
        assert copies.get(RetrievalScope.TENANT, "a") is first
        copies.get(RetrievalScope.TENANT, "c")  # replaces b
        assert copies.get(RetrievalScope.TENANT, "a") is first
        assert len(copies) == 2
        copies.stop()
        assert len(copies) == 0
        brief = TierCopies(watch, idle_s=0.01)
        brief.get(RetrievalScope.TENANT, "a")
        await until(lambda: not len(brief))
        await state.close()


class Flooder(speculator_pb2_grpc.SpeculatorServiceServicer):
    """Sends 40 drafts of 500 nodes at once, whatever the request."""

    async def Speculate(  # type: ignore[override]
        self, requests: AsyncIterator[speculator_pb2.SpeculateRequest], context: Any
    ) -> AsyncIterator[speculator_pb2.SpeculateResponse | bytes]:
        async for response in shared(self.speculate, requests, context):
            yield response

    async def speculate(
        self, requests: AsyncIterator[speculator_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[speculator_pb2.SessionResponse]:
        yield speculator_pb2.SessionResponse(opened=speculator_pb2.SpeculateOpened())
        for number in range(40):
            draft = types_pb2.Draft(
                base_len=3, first_node_id=1 + 500 * number, parent_offsets=[0] * 500, token_ids=range(500)
            )
            yield speculator_pb2.SessionResponse(draft=speculator_pb2.SpeculatorDraft(draft=draft))
        await asyncio.Event().wait()


class Listener:
    """Counts callbacks."""

    def __init__(self) -> None:
        self.num_nodes = 0

    def on_attached(self, forward_us: int) -> None: ...

    def on_draft(self, draft: Draft) -> None:
        self.num_nodes += len(draft.token_ids)

    def on_detached(self, absence: Absence) -> None: ...


async def test_a_speculator_that_floods_is_not_listened_to() -> None:
    server = grpc.aio.server()
    speculator_pb2_grpc.add_SpeculatorServiceServicer_to_server(Flooder(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    peer = SpeculatorPeer(f"127.0.0.1:{port}", draft_model(), max_nodes_per_s=1000)
    listener = Listener()
    spec = SpeculationSpec("s", 3, SamplingParams(seed=1), SpeculationParams(PEARL))
    with capture_logs() as logs:
        stream = peer.speculate(spec, [1, 2, 3], listener)
        limit = stream._limit
        await until(lambda: listener.num_nodes + limit.num_dropped_nodes == 20_000)
    assert 1000 <= listener.num_nodes <= 6000, "a second's worth, and what the time between them allows"
    assert [event["event"] for event in logs].count("drafts.dropped") == 1
    stream.close()
    await peer.state.close()
    await server.stop(0)
