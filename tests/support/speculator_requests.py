"""Requests of a stream to a speculator, and what comes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from outrider.v1 import speculator_pb2, types_pb2
from outrider.wire.convert import PROTOCOL_VERSION
from tests.support.services import RunningSpeculator

Code = grpc.StatusCode
PROMPT = list(range(10, 20))


def opening(speculator: RunningSpeculator, **changes: Any) -> speculator_pb2.SpeculateRequest:
    handshake = types_pb2.Handshake(
        protocol_version=PROTOCOL_VERSION,
        tokenizer_hash=changes.pop("tokenizer_hash", speculator.model.tokenizer_hash),
        vocab_size=2048,
        model_id="the target",
    )
    fields: dict[str, Any] = {
        "handshake": handshake,
        "session_id": "s",
        "committed_token_ids": PROMPT,
        "num_prompt_tokens": len(PROMPT),
        "sampling": types_pb2.SamplingParams(seed=1, temperature=0),
        "speculation": types_pb2.SpeculationParams(method=types_pb2.METHOD_SPECULATIVE, num_speculative_tokens=4),
    }
    return speculator_pb2.SpeculateRequest(open=speculator_pb2.SpeculateOpen(**(fields | changes)))


def commit(base_len: int, token_ids: Sequence[int]) -> speculator_pb2.SpeculateRequest:
    return speculator_pb2.SpeculateRequest(commit=types_pb2.Commit(base_len=base_len, token_ids=token_ids))


async def refusal(stub: Any, *requests: speculator_pb2.SpeculateRequest) -> tuple[Code, str]:
    """What a stream ends with that sends these and then waits."""

    async def send() -> AsyncIterator[speculator_pb2.SpeculateRequest]:
        for request in requests:
            yield request
        await asyncio.Event().wait()

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Speculate(send()):
            pass
    return caught.value.code(), caught.value.details() or ""


async def first_draft(call: Any) -> types_pb2.Draft:
    response = await call.read()
    while response.WhichOneof("event") != "draft":
        response = await call.read()
    draft: types_pb2.Draft = response.draft.draft
    return draft
