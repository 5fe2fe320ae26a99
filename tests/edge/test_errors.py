"""The cloud's errors reach the application unchanged, and nothing is left over anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from outrider.core.params import Source
from outrider.core.tree import Draft
from outrider.edge import relay
from outrider.speculator.drafter import Drafter
from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from outrider_client.client import Client
from outrider_client.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    OutriderError,
    ResourceExhausted,
    Unavailable,
    from_rpc_error,
)
from tests.support.scripted_cloud import ScriptedCloud, chunk, finish, serving, started
from tests.support.services import RunningEdge, RunningVerifier, draft_model, running_edge
from tests.support.verifier_requests import BAD_REQUESTS, refusal, request, tokens

PROMPT = "def add(a, b):\n"
SERVED = {"no speculator", "a scope for nothing"}
"""Requests that are fine with a draft model, or with METHOD_AUTO."""
BAD = {
    (code, words.partition(" ")[0].partition(".")[0]): name
    for name, (_, code, words) in BAD_REQUESTS.items()
    if name not in SERVED
}
"""A request for each status and part of a request: the verifier's own tests have them all."""


@pytest.fixture
async def stub(edge: RunningEdge) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(edge.address) as channel:
        yield verifier_pb2_grpc.VerifierServiceStub(channel)


@pytest.fixture
async def cloud_stub(verifier: RunningVerifier) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(verifier.address) as channel:
        yield verifier_pb2_grpc.VerifierServiceStub(channel)


def said(error: grpc.aio.AioRpcError) -> tuple[type[OutriderError], str, tuple[Message, ...]]:
    """Status, message and details."""
    typed = from_rpc_error(error)
    return type(typed), typed.message, typed.details


async def read_all(call: Any) -> None:
    """Reads the rest of a call that was read from before."""
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("name", BAD.values())
async def test_a_bad_request_is_refused_in_the_clouds_words(
    stub: Any, cloud_stub: Any, edge: RunningEdge, name: str
) -> None:
    bad = verifier_pb2.GenerateRequest()
    bad.CopyFrom(BAD_REQUESTS[name][0])
    bad.speculation.method = bad.speculation.method or types_pb2.METHOD_AUTO
    there = said(await refusal(cloud_stub.Generate(bad)))
    assert said(await refusal(stub.Generate(bad))) == there
    assert await edge.is_idle()


async def test_a_drafted_method_needs_no_speculator_in_the_cloud(stub: Any) -> None:
    bad_for_the_cloud = BAD_REQUESTS["no speculator"][0]
    responses = [response async for response in stub.Generate(bad_for_the_cloud)]
    assert responses[-1].finished.summary.method == types_pb2.METHOD_BEST_FIRST


class FloodingDrafter(Drafter):
    """Always has one more draft to send while the session is open."""

    def open(self, session_id: str, committed: Sequence[int], *others: Any, **options: Any) -> None:
        super().open(session_id, committed, *others, **options)
        listener = others[3]
        for number in range(1, 1000):
            listener.send(Draft(len(committed), number, [0], [number], [], Source.DRAFT))


async def test_a_refusal_is_heard_over_the_drafts_that_are_on_their_way() -> None:
    async def refuse(requests: Any, context: Any) -> None:
        await anext(requests)
        await asyncio.sleep(0.002)  # time for drafts to come
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")

    async with (
        serving(ScriptedCloud(refuse)) as address,
        running_edge(address, model=draft_model()) as edge,
        grpc.aio.insecure_channel(edge.address) as channel,
    ):
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        drafted = request(tokens(*range(10, 20)), method=types_pb2.METHOD_BEST_FIRST)
        edge.service.draft_model.drafter = FloodingDrafter(draft_model(), edge.settings)
        codes = [(await refusal(stub.Generate(drafted))).code() for _ in range(30)]
        assert codes == [grpc.StatusCode.PERMISSION_DENIED] * 30
        assert await edge.is_idle()


async def test_a_cloud_that_is_full_says_when_to_come_back(client: Client, cloud: Client) -> None:
    others = [cloud.generate(PROMPT, max_tokens=1500, ignore_eos=True) for _ in range(2)]
    for other in others:
        await anext(other)
    with pytest.raises(ResourceExhausted) as caught:
        await client.complete(PROMPT, method="pearl")
    assert caught.value.retry_after_s == 1.0
    assert "the verifier has all 2 sessions in use" in caught.value.message
    for other in others:
        other.cancel()


async def test_a_chat_that_the_cloud_cannot_render_is_its_error(
    monkeypatch: pytest.MonkeyPatch, client: Client
) -> None:
    from tests.support.services import target_model

    monkeypatch.setattr(target_model().tokenizer, "chat_template", None)
    with pytest.raises(FailedPrecondition, match=r"prompt\.chat: the target's tokenizer has no chat template"):
        await client.complete([{"role": "user", "content": "hi"}], method="pearl")


async def test_an_unknown_token_is_refused_by_the_cloud(client: Client) -> None:
    with pytest.raises(InvalidArgument, match=r"token_ids\[1\] must be in \[0, 2048\)"):
        await client.detokenize([5, 5000])


async def test_a_cloud_that_is_not_there_is_unavailable() -> None:
    async with running_edge("127.0.0.1:9", "127.0.0.1:9") as edge, Client(edge.address) as client:
        for attempt in (client.complete(PROMPT, method="pearl"), client.info(), client.tokenize(PROMPT)):
            with pytest.raises(Unavailable):
                await attempt
        assert await edge.is_idle()


async def test_a_deadline_ends_the_generation_everywhere(
    client: Client, verifier: RunningVerifier, edge: RunningEdge
) -> None:
    generation = client.generate(PROMPT, max_tokens=1500, ignore_eos=True, method="pearl", timeout_s=0.5)
    with pytest.raises(DeadlineExceeded):
        async for _ in generation:
            pass
    assert await verifier.is_idle()
    assert await edge.is_idle()


@pytest.mark.parametrize("method", ["pearl", "off"])
async def test_a_cancelled_generation_ends_everywhere(
    client: Client, verifier: RunningVerifier, edge: RunningEdge, method: str
) -> None:
    generation = client.generate(PROMPT, max_tokens=1500, ignore_eos=True, method=method)
    await anext(generation)
    assert verifier.servicer.num_sessions == 1
    generation.cancel()
    assert await verifier.is_idle()
    assert await edge.is_idle()


async def test_a_client_that_reads_nothing_is_cut_off_and_leaves_nothing() -> None:
    cut_off = asyncio.Event()

    async def flood(requests: Any, context: Any) -> None:
        await context.write(started([5, 6]))
        try:
            while True:
                await context.write(chunk(*[7] * 10_000))
        finally:
            cut_off.set()

    async with (
        serving(ScriptedCloud(flood)) as address,
        running_edge(address, model=draft_model(), stall_timeout_s=0.3) as edge,
        grpc.aio.insecure_channel(edge.address) as channel,
    ):
        call = verifier_pb2_grpc.VerifierServiceStub(channel).Generate(request(method=types_pb2.METHOD_PEARL))
        await call.read()
        await asyncio.wait_for(cut_off.wait(), 10)
        assert await edge.is_idle()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert caught.value.details() == "the client has read nothing for 0.3 s"


async def test_a_call_that_something_on_the_way_cancels_is_unavailable() -> None:
    async def cancel(requests: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.CANCELLED, "enough")

    async with (
        serving(ScriptedCloud(cancel)) as address,
        running_edge(address, model=draft_model()) as edge,
        grpc.aio.insecure_channel(edge.address) as channel,
    ):
        error = await refusal(verifier_pb2_grpc.VerifierServiceStub(channel).Generate(request()))
        assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "enough")
        assert await edge.is_idle()


async def test_a_cloud_that_falls_silent_is_left_before_the_application_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay, "MAX_SILENCE_S", 0.2)
    num_calls = 0

    async def collaborate(requests: Any, context: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        resumed = (await anext(requests)).open.request.resume_choices
        await context.write(started([5, 6]))
        if num_calls == 1:
            await asyncio.Event().wait()
        if not any(choice.token_ids for choice in resumed):
            await context.write(chunk(7))
        await finish(requests, context, 1)

    async with (
        serving(ScriptedCloud(collaborate)) as address,
        running_edge(address, model=draft_model()) as edge,
        Client(edge.address) as client,
    ):
        result = await client.complete([5, 6], max_tokens=1, method="pearl", stall_timeout_s=5)
        assert (result.token_ids, result.num_resumes) == ((7,), 0)
        assert num_calls >= 2  # more on a machine that is silent for longer than that itself
        assert await edge.is_idle()


async def test_a_cloud_that_ends_in_the_middle_is_unavailable() -> None:
    async def leave(requests: Any, context: Any) -> None:
        await asyncio.sleep(0)

    async with (
        serving(ScriptedCloud(leave)) as address,
        running_edge(address, model=draft_model()) as edge,
        grpc.aio.insecure_channel(edge.address) as channel,
    ):
        error = await refusal(verifier_pb2_grpc.VerifierServiceStub(channel).Generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details() == f"{address} ended the stream without finishing the generation"
