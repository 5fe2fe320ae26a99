"""Requests as the servicer reads them: every field is checked, and a caller may name only its own tenant.

A message's tenant counts only for callers that act for all tenants.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import grpc
import pytest

from outrider.core.params import RetrievalScope
from outrider.datastore.replica import Replica
from outrider.datastore.types import Scope
from outrider.security.credentials import credential_book
from outrider.security.gate import Gate
from outrider.security.peer_channel import CallsWithMetadata, bearer
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc as pb_grpc
from outrider.v1 import types_pb2
from tests.support.certificates import credentials_file, entry
from tests.support.datastores import (
    load,
    load_prior,
    look_up,
    query,
    record,
    refusal,
    sequence,
    serving,
    settings_for,
)

SCOPE = pb.Scope(tokenizer_hash="t", session_id="s")
WATCHED = pb.Scope(tokenizer_hash="t")


@pytest.fixture
async def stub(serve, redis_url):
    limits = {"max_continuation_len": 8, "max_num_queries": 2, "max_num_tokens": 6, "max_num_rejections": 1}
    return (await serve(redis_url, **limits)).stub


def scoped(**fields) -> pb.Scope:
    return pb.Scope(**{"tokenizer_hash": "t", "session_id": "s", **fields})


def looking_up(**fields) -> pb.LookupRequest:
    return pb.LookupRequest(**{"scope": SCOPE, "queries": [query(1)], **fields})


def recording(**fields) -> pb.RecordRequest:
    return pb.RecordRequest(**{"scope": SCOPE, **fields})


def rejecting(**fields) -> pb.RecordRequest:
    lists = {"context_token_ids": [1], "rejected_token_ids": [2], **fields}
    return recording(rejections=[pb.Rejection(**lists)])


def accepting(**fields) -> pb.RecordRequest:
    return recording(accepted_by_tier=[types_pb2.SourceCount(**fields)])


SMALL = scoped(vocab_size=10)
LONG = "x" * 257


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (looking_up(scope=None), "scope must be set in the first message of a stream, got none"),
        (looking_up(scope=pb.Scope()), "scope.tokenizer_hash must be set, got ''"),
        *(
            (
                looking_up(scope=scoped(**{field: LONG})),
                f"scope.{field} must be at most 256 characters long, got 257",
            )
            for field in ("tokenizer_hash", "session_id", "corpus", "tenant")
        ),
        (looking_up(scope=scoped(retrieval_scope=9)), "scope.retrieval_scope must be a RetrievalScope, got 9"),
        (
            looking_up(scope=scoped(contribute=True)),
            "scope.contribute must be unset or false with the scope of one session",
        ),
        (
            looking_up(scope=scoped(contribute=True, retrieval_scope=types_pb2.RETRIEVAL_SCOPE_SESSION)),
            "scope.contribute must be unset or false with the scope of one session",
        ),
        (looking_up(scope=scoped(vocab_size=-1)), "scope.vocab_size must be >= 0 (0 = not checked), got -1"),
        (looking_up(queries=[query(1), query()]), "queries[1].context_token_ids must be 1 to 4096 tokens long"),
        (
            looking_up(queries=[query(1, -5)]),
            "queries[0].context_token_ids must be without negative token ids, got -5",
        ),
        (looking_up(queries=[query(*[1] * 4097)]), "1 to 4096 tokens long, got 4097 tokens"),
        (
            looking_up(scope=SMALL, queries=[query(9), query(10, 1)]),
            "queries[1].context_token_ids must be token ids below scope.vocab_size (10), got 10",
        ),
        (looking_up(queries=[query(1, base_len=-1)]), "queries[0].base_len must be >= 0, got -1"),
        (looking_up(queries=[query(1)] * 3), "queries must be at most 2 in one message, got 3"),
        (looking_up(max_match_len=4), "max_match_len must be in [1, 3], or 0 for the default, got 4"),
        (looking_up(max_match_len=-1), "max_match_len must be in [1, 3]"),
        (looking_up(max_continuation_len=9), "max_continuation_len must be in [1, 8]"),
        (looking_up(max_continuation_len=-1), "max_continuation_len must be in [1, 8]"),
        (
            looking_up(tiers=[types_pb2.SOURCE_PRIOR, types_pb2.SOURCE_DRAFT]),
            "tiers[1] must be one of PRIOR, DYNAMIC, SHARED, REJECTED, RING, got 2",
        ),
        (looking_up(tiers=[0]), "tiers[0] must be one of"),
        (pb.RecordRequest(accepted_token_ids=[1]), "scope must be set in the first message"),
        (
            recording(scope=WATCHED, accepted_token_ids=[1]),
            "scope.session_id must be set: tokens are recorded for a session",
        ),
        (recording(base_len=-1), "base_len must be >= 0, got -1"),
        (recording(accepted_token_ids=[1, -1]), "accepted_token_ids must be without negative"),
        (recording(accepted_token_ids=[1] * 7), "accepted_token_ids must be 1 to 6 tokens long"),
        (
            recording(scope=SMALL, accepted_token_ids=[10]),
            "accepted_token_ids must be token ids below scope.vocab_size",
        ),
        *(
            (rejecting(**{field: token_ids}), f"rejections[0].{field} must be {rule}")
            for field in ("context_token_ids", "rejected_token_ids")
            for token_ids, rule in (
                ([], "1 to 256 tokens long"),
                ([1] * 257, "1 to 256 tokens long"),
                ([-1], "without negative"),
            )
        ),
        (recording(rejections=[pb.Rejection()] * 2), "rejections must be at most 1 in one message, got 2"),
        (accepting(num_tokens=1), "accepted_by_tier[0].source must be one of PRIOR, DYNAMIC, SHARED, REJECTED, RING"),
        (accepting(source=types_pb2.SOURCE_DRAFT), "accepted_by_tier[0].source must be one of"),
        (
            recording(accepted_by_tier=[types_pb2.SourceCount(source=types_pb2.SOURCE_RING)] * 6),
            "accepted_by_tier must be at most 5 long, one entry for each tier, got 6",
        ),
        (accepting(source=types_pb2.SOURCE_RING, num_tokens=-1), "accepted_by_tier[0].num_tokens must be >= 0, got -1"),
        (pb.WatchRequest(), "scope must be set, got none"),
        (pb.WatchRequest(scope=SCOPE), "scope.session_id must be unset: a session's own tiers are not watched, got s"),
        (pb.WatchRequest(scope=pb.Scope()), "scope.tokenizer_hash must be set"),
        (
            pb.LoadPriorRequest(scope=SMALL, documents=[sequence(1, 10)]),
            "documents[0].token_ids must be token ids below scope.vocab_size (10), got 10",
        ),
        (pb.DeleteCorpusRequest(scope=SCOPE), "scope.corpus must be set, got ''"),
        (pb.DeleteCorpusRequest(), "scope.corpus must be set, got ''"),
        (pb.DeleteCorpusRequest(scope=pb.Scope(corpus="c")), "scope.tokenizer_hash must be set"),
    ],
)
async def test_a_bad_request_is_refused_with_its_field_and_rule(stub, request_, message):
    code, details = await refusal(call(stub, request_))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert message in details


def call(stub, request_):
    """The RPC of a request."""
    name = type(request_).__name__.removesuffix("Request")
    is_stream = name in ("Lookup", "Record", "LoadPrior")
    return getattr(stub, name)(iter([request_]) if is_stream else request_)


@pytest.mark.parametrize(
    "request_",
    [
        looking_up(),
        recording(accepted_token_ids=[1]),
        pb.WatchRequest(scope=WATCHED),
        pb.LoadPriorRequest(scope=WATCHED, documents=[sequence(1, 2)]),
        pb.DeleteCorpusRequest(scope=pb.Scope(tokenizer_hash="t", corpus="c")),
    ],
    ids=lambda request_: type(request_).__name__,
)
async def test_a_server_for_one_tokenizer_refuses_another(serve, redis_url, request_):
    stub = (await serve(redis_url, tokenizer_hash="mine")).stub
    code, details = await refusal(call(stub, request_))
    assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, "this server serves tokenizer 'mine', not 't'")


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
    file = credentials_file(folder / "credentials", *CALLERS)
    gate = Gate(credential_book(str(file), has_client_certificates=False), "outrider.v1.DatastoreService")
    async with serving(settings_for(redis_url), gate) as served:
        yield Callers(served.channel), served.replica


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
    return pb.LookupRequest(scope=scope, queries=[query(1, 2)])


async def found(stub, scope: pb.Scope) -> list[int]:
    [response] = await look_up(stub, asking(scope))
    return list(response.results[0].token_ids)


async def test_a_tenants_tokens_are_found_by_it_and_those_who_speak_for_it(callers, scope):
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
        documents = [sequence(1, 2, 3)]
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
