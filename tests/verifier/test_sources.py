"""The verifier's own sources, and trees, on a server without peers: the text is that of plain decoding."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from tests.support.services import running_verifier
from tests.support.verifier_requests import refusal, request

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n"
READING = "import os\n\ndef read_config(path):\n"
"""A prompt that predicts little of its continuation."""
RECYCLED, POOL, DYNAMIC = types_pb2.SOURCE_RECYCLED, types_pb2.SOURCE_POOL, types_pb2.SOURCE_DYNAMIC
CHAIN, TREE = types_pb2.ROWS_CHAIN, types_pb2.ROWS_TREE
NUM_TOKENS = 40
VARIANTS: dict[str, tuple[int, list[types_pb2.Source]]] = {
    "recycled": (TREE, [RECYCLED]),
    "recycled chain": (CHAIN, [RECYCLED]),
    "pool": (TREE, [POOL]),
    "pool chain": (CHAIN, [POOL]),
    "own text as a tree": (TREE, [DYNAMIC]),
    "all": (TREE, [POOL, RECYCLED, DYNAMIC]),
}


@pytest.fixture
async def stub() -> AsyncIterator[Any]:
    async with running_verifier() as running, grpc.aio.insecure_channel(running.address) as channel:
        yield verifier_pb2_grpc.VerifierServiceStub(channel)


async def said(stub: Any, text: str = PROMPT, **fields: Any) -> tuple[list[int], verifier_pb2.SpeculationSummary]:
    """The output of a request, and its summary."""
    token_ids: list[int] = []
    prompt = verifier_pb2.Prompt(text=text)
    async for response in stub.Generate(request(prompt, max_tokens=NUM_TOKENS, seed=3, ignore_eos=True, **fields)):
        token_ids += response.chunk.token_ids
    return token_ids, response.finished.summary


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_the_text_is_that_of_plain_decoding_whatever_is_looked_up(stub: Any, temperature: float) -> None:
    plain, _ = await said(stub, method=types_pb2.METHOD_OFF, temperature=temperature)
    assert len(plain) == NUM_TOKENS
    for name, (rows, sources) in VARIANTS.items():
        asked = {"method": types_pb2.METHOD_RETRIEVAL, "rows": rows, "retrieval_params": {"sources": sources}}
        text, summary = await said(stub, temperature=temperature, **asked)
        assert text == plain, name
        accepted = {count.source: count.num_tokens for count in summary.accepted_by_source}
        assert accepted.keys() <= set(sources), name
        assert sum(accepted.values()) > 0, name


async def test_sources_of_its_own_need_no_datastore_even_where_one_is_configured() -> None:
    asked = {"method": types_pb2.METHOD_RETRIEVAL, "retrieval_params": {"sources": [RECYCLED, POOL]}}
    nobody = running_verifier(datastore="127.0.0.1:1")
    async with nobody as running, grpc.aio.insecure_channel(running.address) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        _, summary = await said(stub, **asked)
        assert not summary.degraded
        _, summary = await said(stub, method=types_pb2.METHOD_RETRIEVAL)
        assert summary.degraded, "the tiers are asked for, and there are none"
        [missing] = summary.missing_peers
        assert (missing.peer, missing.absence) == (verifier_pb2.PEER_DATASTORE, verifier_pb2.ABSENCE_UNREACHABLE)
        assert 0 < missing.num_rounds <= summary.num_rounds


@pytest.mark.parametrize(
    ("number", "rule"),
    [(types_pb2.SOURCE_DRAFT, "got 2"), (RECYCLED, "each at most once, got SOURCE_RECYCLED")],
)
async def test_a_source_that_cannot_be_asked_is_invalid_by_name(stub: Any, number: int, rule: str) -> None:
    asked = {"method": types_pb2.METHOD_RETRIEVAL, "retrieval_params": {"sources": [RECYCLED, number]}}
    error = await refusal(stub.Generate(request(**asked)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = error.details() or ""
    assert details.startswith("speculation.retrieval_params.sources[1] must be one of")
    assert rule in details


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", [types_pb2.METHOD_RETRIEVAL, types_pb2.METHOD_AUTO])
async def test_a_prediction_that_is_nearly_right_makes_the_same_text_with_fewer_forwards(
    stub: Any, method: types_pb2.Method, temperature: float
) -> None:
    plain, _ = await said(stub, READING, method=types_pb2.METHOD_OFF, temperature=temperature)
    earlier = await stub.Detokenize(verifier_pb2.DetokenizeRequest(token_ids=plain))
    words = earlier.text.split(" ")
    words[len(words) // 2] = "another"
    for rows in (CHAIN, TREE):
        given = {"method": method, "rows": rows, "temperature": temperature}
        text, without = await said(stub, READING, **given)
        same, summary = await said(stub, READING, **given, prediction=" ".join(words))
        assert text == same == plain
        if method == types_pb2.METHOD_AUTO:
            continue  # the number of its lookups depends on the times that it measures
        by_source = {count.source: count.num_tokens for count in summary.accepted_by_source}
        assert by_source.get(types_pb2.SOURCE_PREDICTION, 0) >= 10
        assert summary.num_rounds <= without.num_rounds // 3


async def test_a_prediction_is_looked_up_whatever_sources_are_named(stub: Any) -> None:
    plain, _ = await said(stub, READING, method=types_pb2.METHOD_OFF)
    earlier = await stub.Detokenize(verifier_pb2.DetokenizeRequest(token_ids=plain))
    for rows, sources in VARIANTS.values():
        asked = {"method": types_pb2.METHOD_RETRIEVAL, "rows": rows, "retrieval_params": {"sources": sources}}
        text, summary = await said(stub, READING, **asked, prediction=earlier.text)
        assert text == plain
        by_source = {count.source: count.num_tokens for count in summary.accepted_by_source}
        assert by_source.get(types_pb2.SOURCE_PREDICTION, 0) >= 10


async def test_a_wrong_prediction_changes_no_text(stub: Any) -> None:
    plain, _ = await said(stub, READING, method=types_pb2.METHOD_OFF)
    for rows in (CHAIN, TREE):
        text, _ = await said(stub, READING, method=types_pb2.METHOD_RETRIEVAL, rows=rows, prediction="a b c " * 40)
        assert text == plain
