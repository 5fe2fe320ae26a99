"""Sources of the verifier's own, and trees: the text of plain decoding, from a server without peers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from tests.support.services import running_verifier
from tests.support.verifier_requests import refusal, request

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n"
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


async def said(stub: Any, **fields: Any) -> tuple[list[int], verifier_pb2.SpeculationSummary]:
    """What a request generates, and its summary."""
    token_ids: list[int] = []
    prompt = verifier_pb2.Prompt(text=PROMPT)
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
