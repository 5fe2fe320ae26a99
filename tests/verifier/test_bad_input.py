"""All client errors are refused by name; the server stays up, and nothing is left over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from tests.support.services import RunningVerifier, running_verifier
from tests.support.verifier_requests import (
    BAD_REQUESTS,
    Code,
    generate,
    opening,
    refusal,
    request,
)


@pytest.fixture
async def verifier() -> AsyncIterator[RunningVerifier]:
    async with running_verifier(max_num_sessions=2, stall_timeout_s=0.3) as running:
        yield running


@pytest.fixture
async def stub(verifier: RunningVerifier) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(verifier.address) as channel:
        yield verifier_pb2_grpc.VerifierServiceStub(channel)


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_a_bad_request_is_refused_by_name(stub: Any, verifier: RunningVerifier, name: str) -> None:
    message, code, words = BAD_REQUESTS[name]
    error = await refusal(stub.Generate(message))
    assert (error.code(), words in (error.details() or "")) == (code, True), error.details()
    assert await verifier.is_idle()
    assert len(await generate(stub)) == 4


async def summary_of(stub: Any, **fields: Any) -> verifier_pb2.SpeculationSummary:
    responses = [response async for response in stub.Generate(request(**fields))]
    summary: verifier_pb2.SpeculationSummary = responses[-1].finished.summary
    return summary


@pytest.mark.parametrize("method", [types_pb2.METHOD_CARD, types_pb2.METHOD_SPACELIKE])
async def test_where_the_request_allows_it_a_method_without_its_peer_is_replaced(stub: Any, method: int) -> None:
    summary = await summary_of(stub, method=method, retrieval=True, allow_fallback=True)
    assert (summary.method, summary.requested_method) == (types_pb2.METHOD_OFF, method)


async def test_a_method_that_has_its_peers_is_not_replaced(stub: Any) -> None:
    summary = await summary_of(stub, method=types_pb2.METHOD_RETRIEVAL, allow_fallback=True)
    assert (summary.method, summary.requested_method) == (types_pb2.METHOD_RETRIEVAL, types_pb2.METHOD_UNSPECIFIED)


@pytest.mark.parametrize("has_datastore", [False, True])
async def test_a_server_offers_the_methods_whose_peers_it_has(has_datastore: bool) -> None:
    nobody = "127.0.0.1:1" if has_datastore else ""
    async with running_verifier(datastore=nobody) as running, grpc.aio.insecure_channel(running.address) as channel:
        info = await verifier_pb2_grpc.VerifierServiceStub(channel).GetInfo(verifier_pb2.GetInfoRequest())
    without = {types_pb2.METHOD_OFF, types_pb2.METHOD_RETRIEVAL, types_pb2.METHOD_AUTO}
    assert set(info.methods) == without | ({types_pb2.METHOD_SPACELIKE} if has_datastore else set())
    assert info.max_num_rows == 32


async def test_with_a_datastore_a_method_without_speculator_falls_back_on_retrieval() -> None:
    asked = {"method": types_pb2.METHOD_PEARL, "acceptance_rule": types_pb2.ACCEPTANCE_RULE_RATIO}
    nobody = running_verifier(datastore="127.0.0.1:1")
    async with nobody as running, grpc.aio.insecure_channel(running.address) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        for retrieval in (False, True):  # whether asked for or not, the fallback retrieves
            summary = await summary_of(stub, retrieval=retrieval, allow_fallback=True, **asked)
            assert summary.method == types_pb2.METHOD_RETRIEVAL
            assert summary.requested_method == types_pb2.METHOD_PEARL


async def test_a_refused_field_is_named_in_the_details_too(stub: Any) -> None:
    error = await refusal(stub.Generate(request(top_p=2.0)))
    trailers = dict(error.trailing_metadata() or ())
    assert b"sampling.top_p" in trailers["grpc-status-details-bin"]


async def test_a_session_too_many_is_told_when_to_come_back(stub: Any, verifier: RunningVerifier) -> None:
    running = [stub.Generate(request(max_tokens=1500, ignore_eos=True)) for _ in range(2)]
    for call in running:
        await call.read()
    error = await refusal(stub.Generate(request()))
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert "all 2 sessions" in (error.details() or "")
    assert any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())
    for call in running:
        call.cancel()
    assert await verifier.is_idle()


async def test_a_cancelled_generation_leaves_nothing(stub: Any, verifier: RunningVerifier) -> None:
    call = stub.Generate(request(max_tokens=1500, ignore_eos=True))
    while (await call.read()).WhichOneof("event") != "chunk":
        pass
    rounds_before = verifier.engine.num_sessions
    call.cancel()
    assert rounds_before == 1
    assert await verifier.is_idle()


async def test_a_collaboration_must_begin_with_open(stub: Any) -> None:
    error = await refusal(stub.Collaborate(iter([verifier_pb2.CollaborateRequest(draft=types_pb2.Draft())])))
    assert error.code() is Code.INVALID_ARGUMENT
    assert "event must be open" in (error.details() or "")


async def test_a_second_open_is_refused(stub: Any, verifier: RunningVerifier) -> None:
    first = opening(verifier)
    first.open.request.sampling.max_tokens = 1500
    first.open.request.sampling.ignore_eos = True
    error = await refusal(stub.Collaborate(iter([first, opening(verifier)])))
    assert error.code() is Code.INVALID_ARGUMENT
    assert "event must be draft" in (error.details() or "")
    assert await verifier.is_idle()


async def test_bytes_that_are_no_message_end_a_collaboration(verifier: RunningVerifier) -> None:
    first = opening(verifier)
    first.open.request.sampling.max_tokens = 1500
    first.open.request.sampling.ignore_eos = True
    async with grpc.aio.insecure_channel(verifier.address) as channel:
        collaborate: Any = channel.stream_stream("/outrider.v1.VerifierService/Collaborate")
        error = await refusal(collaborate(iter([first.SerializeToString(), b"\xff"])))
    assert error.code() is Code.INVALID_ARGUMENT
    assert "got 1 bytes that are none" in (error.details() or "")
    assert await verifier.is_idle()


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"tokenizer_hash": "00ff"}, Code.FAILED_PRECONDITION, "got 00ff (edge)"),
        ({"tokenizer_hash": ""}, Code.INVALID_ARGUMENT, "handshake.tokenizer_hash must be set"),
        ({"protocol_version": 9}, Code.FAILED_PRECONDITION, "handshake.protocol_version must be 1"),
        ({"vocab_size": 0}, Code.INVALID_ARGUMENT, "handshake.vocab_size must be >= 1"),
    ],
)
async def test_a_handshake_that_does_not_fit_is_refused(
    stub: Any, verifier: RunningVerifier, changes: dict[str, Any], code: Code, words: str
) -> None:
    error = await refusal(stub.Collaborate(iter([opening(verifier, **changes)])))
    assert (error.code(), words in (error.details() or "")) == (code, True), error.details()


async def test_a_padded_vocabulary_of_the_same_tokenizer_is_accepted(stub: Any, verifier: RunningVerifier) -> None:
    responses = [r async for r in stub.Collaborate(iter([opening(verifier, vocab_size=2176)]))]
    assert responses[-1].finished.num_output_tokens == 4


async def test_a_collaboration_needs_a_method_with_a_draft_model(stub: Any, verifier: RunningVerifier) -> None:
    error = await refusal(stub.Collaborate(iter([opening(verifier, types_pb2.METHOD_RETRIEVAL)])))
    assert "speculation.method must be one with a draft model" in (error.details() or "")


async def test_detokenizing_an_unknown_id_names_it(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=r"token_ids\[1\] must be in \[0, 2048\)"):
        await stub.Detokenize(verifier_pb2.DetokenizeRequest(token_ids=[1, 99999]))
