"""A caller names no tenant but its own: what the message says counts only for those who speak for all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest

from outrider.core.params import RetrievalScope
from outrider.datastore.redis.store import RedisStore
from outrider.datastore.replica import Replica
from outrider.datastore.servicer import DatastoreServicer
from outrider.datastore.types import Scope
from outrider.security.credentials import credential_book
from outrider.security.gate import Gate
from outrider.security.tokens import CallsWithMetadata, bearer
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc as pb_grpc
from tests.datastore.conftest import load, load_prior, look_up, record, refusal, settings_for
from tests.support.certificates import credentials_file, entry

DENIED = grpc.StatusCode.PERMISSION_DENIED
CALLERS = [
    entry("acme", "retrieve", tenant="acme"),
    entry("evil", "retrieve", tenant="evil"),
    entry("nobody's", "retrieve"),
    entry("acme's manager", "manage", tenant="acme"),
    entry("manager", "manage"),
    entry("service", "service"),
]


class Callers:
    """A stub for each caller."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def __getitem__(self, token: str) -> Any:
        return pb_grpc.DatastoreServiceStub(cast(grpc.aio.Channel, CallsWithMetadata(self._channel, bearer(token))))


@asynccontextmanager
async def gated(redis_url: str, folder) -> AsyncIterator[tuple[Callers, Replica]]:
    settings = settings_for(redis_url)
    store = RedisStore(settings)
    replica = Replica(store, settings)
    file = credentials_file(folder / "credentials", *CALLERS)
    gate = Gate(credential_book(str(file), has_client_certificates=False), "outrider.v1.DatastoreService")
    server = grpc.aio.server(interceptors=[gate])
    pb_grpc.add_DatastoreServiceServicer_to_server(DatastoreServicer(replica, settings), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await store.start()
    replica.start()
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Callers(channel), replica
    finally:
        await server.stop(None)
        await replica.close()
        await store.close()


@pytest.fixture
async def callers(redis_url, tmp_path) -> AsyncIterator[Callers]:
    async with gated(redis_url, tmp_path) as (stubs, _):
        yield stubs


def wire(scope: Scope, tenant: str = "", retrieval_scope=RetrievalScope.TENANT, **fields) -> pb.Scope:
    return pb.Scope(
        tokenizer_hash=scope.tokenizer_hash,
        session_id=scope.session_id,
        tenant=tenant,
        retrieval_scope=retrieval_scope.value,
        **fields,
    )


def asking(scope: pb.Scope) -> pb.LookupRequest:
    return pb.LookupRequest(scope=scope, queries=[pb.Query(context_token_ids=[1, 2])])


async def found(stub, scope: pb.Scope) -> list[int]:
    [response] = await look_up(stub, asking(scope))
    return list(response.results[0].token_ids)


async def test_what_a_tenant_has_recorded_is_found_by_itself_and_by_those_who_speak_for_it(callers, scope):
    request = pb.RecordRequest(scope=wire(scope, contribute=True), accepted_token_ids=[1, 2, 3])
    await record(callers["acme"], request)
    other = replace(scope, session_id="another")
    for session in (scope, other):
        assert await found(callers["acme"], wire(session)) == [3]
        assert await found(callers["acme"], wire(session, "acme")) == [3]
        assert await found(callers["service"], wire(session, "acme")) == [3]
        assert await found(callers["service"], wire(session)) == []
        for stranger in ("evil", "nobody's"):
            assert await found(callers[stranger], wire(session)) == []


@pytest.mark.parametrize("caller", ["evil", "nobody's"])
async def test_another_tenant_cannot_be_named(callers, scope, caller):
    stub, theirs = callers[caller], wire(scope, "acme")
    watched = pb.Scope(tokenizer_hash=scope.tokenizer_hash, tenant="acme")
    code, text = await refusal(stub.Lookup(iter([asking(theirs)])))
    assert code is DENIED
    assert text.startswith("scope.tenant must be the caller's own")
    assert (await refusal(stub.Record(iter([pb.RecordRequest(scope=theirs, accepted_token_ids=[1])]))))[0] is DENIED
    assert (await refusal(stub.Watch(pb.WatchRequest(scope=watched))))[0] is DENIED


async def test_another_tenant_cannot_be_named_later_on_a_stream(callers, scope):
    call = callers["evil"].Lookup()
    await call.write(asking(wire(scope)))
    assert isinstance(await call.read(), pb.LookupResponse)
    await call.write(asking(wire(scope, "acme")))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    assert error.value.code() is DENIED


async def test_tenants_meet_in_the_global_scope_as_ever(callers, scope):
    everybody = wire(scope, retrieval_scope=RetrievalScope.GLOBAL, contribute=True)
    await record(callers["acme"], pb.RecordRequest(scope=everybody, accepted_token_ids=[1, 2, 3]))
    other = replace(scope, session_id="another")
    assert await found(callers["evil"], wire(other, retrieval_scope=RetrievalScope.GLOBAL)) == [3]


async def corpora_of(stub, scope: Scope) -> list[str]:
    response = await stub.ListCorpora(pb.ListCorporaRequest(tokenizer_hash=scope.tokenizer_hash))
    return [corpus.tenant for corpus in response.corpora]


async def test_corpora_are_listed_to_their_tenants(callers, store, scope):
    for tenant in ("", "acme", "evil"):
        await load(store, scope, [1, 2, 3], tenant=tenant)
    everything = ["", "acme", "evil"]
    seen = {caller: await corpora_of(callers[caller], scope) for caller in ("acme", "evil", "nobody's")}
    assert seen == {"acme": ["", "acme"], "evil": ["", "evil"], "nobody's": [""]}
    seen = {caller: await corpora_of(callers[caller], scope) for caller in ("acme's manager", "manager", "service")}
    assert seen == {"acme's manager": ["", "acme"], "manager": everything, "service": everything}


async def test_a_tenants_manager_changes_its_own_corpora_alone(callers, scope):
    def loading(tenant: str) -> pb.LoadPriorRequest:
        documents = [pb.TokenSequence(token_ids=[1, 2, 3])]
        return pb.LoadPriorRequest(scope=wire(scope, tenant, RetrievalScope.SESSION), documents=documents)

    def deletion(tenant: str) -> pb.DeleteCorpusRequest:
        return pb.DeleteCorpusRequest(scope=wire(scope, tenant, RetrievalScope.SESSION, corpus="default"))

    for tenant in ("", "acme", "evil"):
        assert (await load_prior(callers["manager"], loading(tenant)))[-1].is_done
    own = callers["acme's manager"]
    for tenant in ("", "evil"):
        code, text = await refusal(own.LoadPrior(iter([loading(tenant)])))
        assert code is DENIED
        assert text.startswith("scope.tenant must be 'acme'")
        assert (await refusal(own.DeleteCorpus(deletion(tenant))))[0] is DENIED
    assert (await load_prior(own, loading("acme")))[-1].is_done
    await own.DeleteCorpus(deletion("acme"))
    assert await corpora_of(callers["service"], scope) == ["", "evil"]
    for tenant in ("", "evil"):
        await callers["service"].DeleteCorpus(deletion(tenant))
    assert (await refusal(callers["acme"].DeleteCorpus(deletion("acme"))))[0] is DENIED


async def test_rings_of_others_are_not_described(redis_url, tmp_path, scope):
    async with gated(redis_url, tmp_path) as (stubs, replica):
        for tenant in ("acme", "evil"):
            asker = replace(scope, tenant=tenant, retrieval_scope=RetrievalScope.TENANT)
            replica.rings.ring_for(asker)
        info = await stubs["acme"].GetInfo(pb.DatastoreServiceGetInfoRequest())
        assert [ring.tenant for ring in info.rings] == ["acme"]
        info = await stubs["service"].GetInfo(pb.DatastoreServiceGetInfoRequest())
        assert [ring.tenant for ring in info.rings] == ["acme", "evil"]
