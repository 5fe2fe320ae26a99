"""Every field is checked; a refusal names the field and the rule."""

from __future__ import annotations

import grpc
import pytest

from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import types_pb2
from tests.datastore.conftest import refusal

SCOPE = pb.Scope(tokenizer_hash="t", session_id="s")
WATCHED = pb.Scope(tokenizer_hash="t")


@pytest.fixture
async def stub(serve, redis_url):
    limits = {"max_continuation_len": 8, "max_num_queries": 2, "max_num_tokens": 6, "max_num_rejections": 1}
    return (await serve(redis_url, **limits)).stub


def query(*context: int, **fields) -> pb.Query:
    return pb.Query(context_token_ids=context, **fields)


def scoped(**fields) -> pb.Scope:
    return pb.Scope(**{"tokenizer_hash": "t", "session_id": "s", **fields})


def lookup(**fields) -> pb.LookupRequest:
    return pb.LookupRequest(**{"scope": SCOPE, "queries": [query(1)], **fields})


def record(**fields) -> pb.RecordRequest:
    return pb.RecordRequest(**{"scope": SCOPE, **fields})


def rejecting(**fields) -> pb.RecordRequest:
    lists = {"context_token_ids": [1], "rejected_token_ids": [2], "continuation_token_ids": [3], **fields}
    return record(rejections=[pb.Rejection(**lists)])


def accepting(**fields) -> pb.RecordRequest:
    return record(accepted_by_tier=[types_pb2.SourceCount(**fields)])


SMALL = scoped(vocab_size=10)
LONG = "x" * 257


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (lookup(scope=None), "scope must be set in the first message of a stream, got none"),
        (lookup(scope=pb.Scope()), "scope.tokenizer_hash must be set, got ''"),
        *(
            (lookup(scope=scoped(**{field: LONG})), f"scope.{field} must be at most 256 characters long, got 257")
            for field in ("tokenizer_hash", "session_id", "corpus", "tenant")
        ),
        (lookup(scope=scoped(retrieval_scope=9)), "scope.retrieval_scope must be a RetrievalScope, got 9"),
        (
            lookup(scope=scoped(contribute=True)),
            "scope.contribute must be unset or false with the scope of one session",
        ),
        (
            lookup(scope=scoped(contribute=True, retrieval_scope=types_pb2.RETRIEVAL_SCOPE_SESSION)),
            "scope.contribute must be unset or false with the scope of one session",
        ),
        (lookup(scope=scoped(vocab_size=-1)), "scope.vocab_size must be >= 0 (0 = not checked), got -1"),
        (lookup(queries=[query(1), query()]), "queries[1].context_token_ids must be 1 to 4096 tokens long"),
        (lookup(queries=[query(1, -5)]), "queries[0].context_token_ids must be without negative token ids, got -5"),
        (lookup(queries=[query(*[1] * 4097)]), "1 to 4096 tokens long, got 4097 tokens"),
        (
            lookup(scope=SMALL, queries=[query(9), query(10, 1)]),
            "queries[1].context_token_ids must be token ids below scope.vocab_size (10), got 10",
        ),
        (lookup(queries=[query(1, base_len=-1)]), "queries[0].base_len must be >= 0, got -1"),
        (lookup(queries=[query(1)] * 3), "queries must be at most 2 in one message, got 3"),
        (lookup(max_match_len=4), "max_match_len must be in [1, 3], or 0 for the default, got 4"),
        (lookup(max_match_len=-1), "max_match_len must be in [1, 3]"),
        (lookup(max_continuation_len=9), "max_continuation_len must be in [1, 8]"),
        (lookup(max_continuation_len=-1), "max_continuation_len must be in [1, 8]"),
        (
            lookup(tiers=[types_pb2.SOURCE_PRIOR, types_pb2.SOURCE_DRAFT]),
            "tiers[1] must be one of PRIOR, DYNAMIC, SHARED, REJECTED, RING, got 2",
        ),
        (lookup(tiers=[0]), "tiers[0] must be one of"),
        (pb.RecordRequest(accepted_token_ids=[1]), "scope must be set in the first message"),
        (
            record(scope=WATCHED, accepted_token_ids=[1]),
            "scope.session_id must be set: tokens are recorded for a session",
        ),
        (record(base_len=-1), "base_len must be >= 0, got -1"),
        (record(accepted_token_ids=[1, -1]), "accepted_token_ids must be without negative"),
        (record(accepted_token_ids=[1] * 7), "accepted_token_ids must be 1 to 6 tokens long"),
        (record(scope=SMALL, accepted_token_ids=[10]), "accepted_token_ids must be token ids below scope.vocab_size"),
        *(
            (rejecting(**{field: token_ids}), f"rejections[0].{field} must be {rule}")
            for field in ("context_token_ids", "rejected_token_ids", "continuation_token_ids")
            for token_ids, rule in (
                ([], "1 to 256 tokens long"),
                ([1] * 257, "1 to 256 tokens long"),
                ([-1], "without negative"),
            )
        ),
        (record(rejections=[pb.Rejection()] * 2), "rejections must be at most 1 in one message, got 2"),
        (accepting(num_tokens=1), "accepted_by_tier[0].source must be one of PRIOR, DYNAMIC, SHARED, REJECTED, RING"),
        (accepting(source=types_pb2.SOURCE_DRAFT), "accepted_by_tier[0].source must be one of"),
        (
            record(accepted_by_tier=[types_pb2.SourceCount(source=types_pb2.SOURCE_RING)] * 6),
            "accepted_by_tier must be at most 5 long, one entry for each tier, got 6",
        ),
        (accepting(source=types_pb2.SOURCE_RING, num_tokens=-1), "accepted_by_tier[0].num_tokens must be >= 0, got -1"),
        (pb.WatchRequest(), "scope must be set, got none"),
        (pb.WatchRequest(scope=SCOPE), "scope.session_id must be unset: a session's own tiers are not watched, got s"),
        (pb.WatchRequest(scope=pb.Scope()), "scope.tokenizer_hash must be set"),
        (
            pb.LoadPriorRequest(scope=SMALL, documents=[pb.TokenSequence(token_ids=[1, 10])]),
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
        lookup(),
        record(accepted_token_ids=[1]),
        pb.WatchRequest(scope=WATCHED),
        pb.LoadPriorRequest(scope=WATCHED, documents=[pb.TokenSequence(token_ids=[1, 2])]),
        pb.DeleteCorpusRequest(scope=pb.Scope(tokenizer_hash="t", corpus="c")),
    ],
    ids=lambda request_: type(request_).__name__,
)
async def test_a_server_for_one_tokenizer_refuses_another(serve, redis_url, request_):
    stub = (await serve(redis_url, tokenizer_hash="mine")).stub
    code, details = await refusal(call(stub, request_))
    assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, "this server serves tokenizer 'mine', not 't'")
