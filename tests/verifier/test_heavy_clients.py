"""Clients that send megabytes, or read nothing, or are silent, do not disturb others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from outrider.verifier.servicer import NUM_THREADS
from tests.support.services import RunningVerifier, running_verifier
from tests.support.verifier_requests import Code, generate, opening, refusal, request


async def refusal_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@pytest.fixture
async def verifier() -> AsyncIterator[RunningVerifier]:
    async with running_verifier(max_num_sessions=2, stall_timeout_s=0.3) as running:
        yield running


@pytest.fixture
async def stub(verifier: RunningVerifier) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(verifier.address) as channel:
        yield verifier_pb2_grpc.VerifierServiceStub(channel)


async def test_a_message_of_ten_megabytes_is_refused(stub: Any, verifier: RunningVerifier) -> None:
    error = await refusal(stub.Generate(request(verifier_pb2.Prompt(text="x" * 10_000_000))))
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert await verifier.is_idle()
    assert len(await generate(stub)) == 4


async def test_a_prompt_of_megabytes_is_refused_before_it_is_tokenized(stub: Any, verifier: RunningVerifier) -> None:
    text = "def add(a, b):\n" * 200_000
    message = verifier_pb2.ChatMessage
    for prompt in (
        verifier_pb2.Prompt(text=text),
        verifier_pb2.Prompt(chat={"messages": [message(role="", content=text)]}),
        verifier_pb2.Prompt(chat={"messages": [message(role=text, content="")]}),
    ):
        error = await refusal(stub.Generate(request(prompt)))
        assert error.code() is Code.OUT_OF_RANGE
        begin = f"prompt must be shorter than the context of 2048 tokens, got {len(text)} characters: "
        assert (error.details() or "").startswith(begin)
        error = await refusal_of(stub.Tokenize(verifier_pb2.TokenizeRequest(prompt=prompt)))
        assert error.code() is Code.OUT_OF_RANGE
        assert (error.details() or "").startswith(begin)
    assert await verifier.is_idle()


async def test_nobody_waits_while_a_megabyte_is_tokenized(stub: Any) -> None:
    prompt = verifier_pb2.Prompt(text="def add(a, b):\n" * 30_000)
    tokenizing = stub.Tokenize(verifier_pb2.TokenizeRequest(prompt=prompt))
    assert len(await generate(stub)) == 4
    assert not tokenizing.done()
    assert len((await tokenizing).token_ids) > 100_000


async def test_a_client_that_reads_nothing_disturbs_nobody(stub: Any, verifier: RunningVerifier) -> None:
    # Its chunks fill the transport's buffers at first; then the stall timeout ends it.
    idle = stub.Generate(request(max_tokens=1500, ignore_eos=True))
    assert len(await generate(stub)) == 4
    idle.cancel()
    assert await verifier.is_idle()


async def test_who_opens_a_stream_and_says_nothing_holds_no_session(stub: Any, verifier: RunningVerifier) -> None:
    silent = [stub.Collaborate() for _ in range(5)]  # more than there are session slots
    for call in silent:
        await call.wait_for_connection()
    assert len(await generate(stub)) == 4
    assert verifier.servicer.num_sessions == 0
    for call in silent:
        call.cancel()


async def test_a_client_that_reads_nothing_is_cut_off(verifier: RunningVerifier) -> None:
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]  # so that little is read ahead for it
    async with grpc.aio.insecure_channel(verifier.address, options=options) as channel:
        call = verifier_pb2_grpc.VerifierServiceStub(channel).Generate(request(max_tokens=1500, ignore_eos=True))
        await call.read()
        async with asyncio.timeout(30):
            while not await verifier.is_idle():
                pass
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert await call.code() is Code.DEADLINE_EXCEEDED
        assert await call.details() == "the client has read nothing for 0.3 s"


@pytest.mark.parametrize("name", ["x" * 1_000_000, "\U0001f680" * 100_000])
async def test_however_long_what_is_wrong_is_the_status_gets_through(
    stub: Any, verifier: RunningVerifier, name: str
) -> None:
    error = await refusal(stub.Collaborate(iter([opening(verifier, tokenizer_hash=name)])))
    assert error.code() is Code.FAILED_PRECONDITION
    assert (error.details() or "").startswith("handshake.tokenizer_hash must be")
    saguaro = {"fan_out": types_pb2.FAN_OUT_GEOMETRIC, "fan_outs": [1] * 100_000}
    error = await refusal(stub.Generate(request(method=types_pb2.METHOD_SAGUARO, saguaro=saguaro)))
    assert error.code() is Code.INVALID_ARGUMENT
    assert (error.details() or "").startswith("speculation.saguaro.fan_outs must be")


async def test_token_ids_that_no_context_holds_are_refused_before_they_are_read(stub: Any) -> None:
    many = [1] * 10_000
    for call in (
        stub.Tokenize(verifier_pb2.TokenizeRequest(prompt=verifier_pb2.Prompt(token_ids={"token_ids": many}))),
        stub.Detokenize(verifier_pb2.DetokenizeRequest(token_ids=many)),
    ):
        error = await refusal_of(call)
        assert error.code() is Code.OUT_OF_RANGE
        assert "must have at most 2048 tokens, got 10000" in (error.details() or "")


async def test_a_structure_is_compiled_while_long_texts_are_tokenized(stub: Any) -> None:
    text = "def add(a, b):\n" * 8_000
    texts = [
        stub.Tokenize(verifier_pb2.TokenizeRequest(prompt=verifier_pb2.Prompt(text=text)))
        for _ in range(NUM_THREADS + 2)
    ]
    structured = request()
    structured.structured_outputs.regex = "[ab]+"
    assert [response async for response in stub.Generate(structured)]
    assert not all(call.done() for call in texts)
    for call in texts:
        assert len((await call).token_ids) > 20_000
