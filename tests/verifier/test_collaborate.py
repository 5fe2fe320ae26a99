"""Drafts from outside: whatever they are, the text is the target's, and good ones make it come in fewer rounds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest

from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from tests.services import RunningVerifier, running_verifier
from tests.verifier.test_bad_input import handshake

NUM_TOKENS = 48


@pytest.fixture
async def verifier() -> AsyncIterator[RunningVerifier]:
    async with running_verifier() as running:
        yield running


@pytest.fixture
async def stub(verifier: RunningVerifier) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(verifier.address) as channel:
        yield verifier_pb2_grpc.VerifierServiceStub(channel)


def request(method: int) -> verifier_pb2.GenerateRequest:
    return verifier_pb2.GenerateRequest(
        prompt=verifier_pb2.Prompt(text="class TestParser(unittest.TestCase):\n    def test_"),
        sampling=types_pb2.SamplingParams(temperature=0.7, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True),
        speculation=types_pb2.SpeculationParams(method=method),
    )


async def plain_text(stub: Any) -> list[int]:
    token_ids: list[int] = []
    async for response in stub.Generate(request(types_pb2.METHOD_OFF)):
        token_ids += response.chunk.token_ids
    return token_ids


async def collaborate(
    stub: Any, verifier: RunningVerifier, draft: Callable[[int, list[int]], types_pb2.Draft | None]
) -> tuple[list[int], verifier_pb2.Finished]:
    """Generates with drafts that are made from (prompt length, output so far), one after each event."""
    call = stub.Collaborate()
    opening = verifier_pb2.CollaborateOpen(handshake=handshake(verifier), request=request(types_pb2.METHOD_SPECULATIVE))
    await call.write(verifier_pb2.CollaborateRequest(open=opening))
    output: list[int] = []
    num_prompt_tokens = 0
    async for response in call:
        match response.WhichOneof("event"):
            case "finished":
                return output, response.finished
            case "started":
                num_prompt_tokens = response.started.num_prompt_tokens
            case "chunk":
                output += response.chunk.token_ids
        message = draft(num_prompt_tokens, output)
        if message is not None and len(output) < NUM_TOKENS:
            await call.write(verifier_pb2.CollaborateRequest(draft=message))
    raise AssertionError("the stream ended without Finished")


async def test_perfect_drafts_give_the_same_text_in_fewer_rounds(stub: Any, verifier: RunningVerifier) -> None:
    text = await plain_text(stub)
    num_sent = 0

    def perfect(num_prompt_tokens: int, output: list[int]) -> types_pb2.Draft:
        nonlocal num_sent
        rest = text[len(output) : len(output) + 8]
        num_sent += 8
        return types_pb2.Draft(
            base_len=num_prompt_tokens + len(output),
            first_node_id=num_sent - 7,
            parent_offsets=[0] + [1] * (len(rest) - 1),
            token_ids=rest,
            source=types_pb2.SOURCE_DRAFT,
        )

    output, finished = await collaborate(stub, verifier, perfect)
    assert output == text
    assert finished.summary.num_rounds <= NUM_TOKENS // 9 + 2
    assert await verifier.is_idle()


async def test_garbage_drafts_give_the_same_text(stub: Any, verifier: RunningVerifier) -> None:
    text = await plain_text(stub)
    rng = random.Random(5)

    def garbage(num_prompt_tokens: int, output: list[int]) -> types_pb2.Draft:
        size = rng.randrange(40)
        return types_pb2.Draft(
            base_len=rng.choice([-1, 0, 3, num_prompt_tokens, num_prompt_tokens + len(output), 2**31 - 1]),
            first_node_id=rng.choice([-5, 0, 1, 7, 2**31 - 1]),
            parent_offsets=[rng.choice([0, 1, 2, 50, 2**32 - 1]) for _ in range(rng.randrange(40))],
            token_ids=[rng.randrange(-10, 4000) for _ in range(size)],
            costs=[rng.choice([0, 3, 2**32 - 1]) for _ in range(rng.randrange(40))],
            source=rng.choice([0, 2, 3, 99]),
        )

    output, finished = await collaborate(stub, verifier, garbage)
    assert output == text
    assert finished.reason == verifier_pb2.FINISH_REASON_LENGTH
    assert await verifier.is_idle()


async def test_a_caller_that_half_closes_gets_the_rest_without_drafts(stub: Any, verifier: RunningVerifier) -> None:
    opening = verifier_pb2.CollaborateOpen(handshake=handshake(verifier), request=request(types_pb2.METHOD_PEARL))
    responses = [r async for r in stub.Collaborate(iter([verifier_pb2.CollaborateRequest(open=opening)]))]
    output = [token_id for response in responses for token_id in response.chunk.token_ids]
    assert output == await plain_text(stub)
    assert responses[-1].finished.summary.degraded
    assert responses[-1].finished.summary.num_empty_rounds == responses[-1].finished.summary.num_rounds


async def test_drafts_for_a_generation_that_has_ended_are_ignored(stub: Any, verifier: RunningVerifier) -> None:
    engine = verifier.engine
    await plain_text(stub)
    from outrider.core.params import Source
    from outrider.core.tree import Draft

    engine.draft("gone", Draft(5, 1, [0], [7], [], Source.DRAFT))
    engine.attach("gone")
    engine.detach("gone")
    engine.pause("gone", True)
    assert len(await plain_text(stub)) == NUM_TOKENS


async def test_many_generations_share_forwards_and_each_has_its_own_text(stub: Any, verifier: RunningVerifier) -> None:
    alone = await plain_text(stub)
    texts = await asyncio.gather(*(plain_text(stub) for _ in range(8)))
    assert texts == [alone] * 8


async def test_generations_with_and_without_chains_share_forwards_and_keep_their_own_texts(
    stub: Any, verifier: RunningVerifier
) -> None:
    text = await plain_text(stub)

    def mixed(num_prompt_tokens: int, output: list[int]) -> types_pb2.Draft:
        """A chain whose end is wrong, its length different each time."""
        rest = [*text[len(output) : len(output) + 1 + len(output) % 5], 7]
        return types_pb2.Draft(
            base_len=num_prompt_tokens + len(output),
            first_node_id=1 + 10 * len(output),
            parent_offsets=[0] + [1] * (len(rest) - 1),
            token_ids=rest,
            source=types_pb2.SOURCE_DRAFT,
        )

    async def drafted() -> list[int]:
        return (await collaborate(stub, verifier, mixed))[0]

    texts = await asyncio.gather(*(job() for _ in range(4) for job in (drafted, lambda: plain_text(stub))))
    assert texts == [text] * 8


async def test_a_caller_that_drafts_without_end_keeps_nobody_from_decoding(
    stub: Any, verifier: RunningVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_waiting: list[int] = []
    post = verifier.engine.draft

    def counting(*arguments: Any) -> None:
        num_waiting.append(verifier.engine._inbox.qsize())
        post(*arguments)

    monkeypatch.setattr(verifier.engine, "draft", counting)
    first = verifier_pb2.CollaborateOpen(handshake=handshake(verifier), request=request(types_pb2.METHOD_PEARL))
    first.request.sampling.max_tokens = 1500
    draft = types_pb2.Draft(base_len=1, first_node_id=1, parent_offsets=[0] * 4096, token_ids=[5] * 4096)
    flood = verifier_pb2.CollaborateRequest(draft=draft).SerializeToString()

    async def messages() -> AsyncIterator[bytes]:
        yield verifier_pb2.CollaborateRequest(open=first).SerializeToString()
        while True:
            yield flood

    async with grpc.aio.insecure_channel(verifier.address) as channel:
        collaborate: Any = channel.stream_stream("/outrider.v1.VerifierService/Collaborate")
        call = collaborate(messages())
        await call.read()
        for _ in range(3):
            assert len(await plain_text(stub)) == NUM_TOKENS
        call.cancel()
    assert len(num_waiting) > 3
    assert max(num_waiting) < 8, "it is read from no faster than its drafts are taken in"
    assert await verifier.is_idle()


async def test_a_draft_longer_than_a_tree_is_refused_by_name(stub: Any, verifier: RunningVerifier) -> None:
    long = types_pb2.Draft(base_len=1, first_node_id=1, parent_offsets=[0] * 4097, token_ids=[5])
    row = types_pb2.SparseRow(token_ids=range(1025), weights=[1] * 1025)
    wide = types_pb2.Draft(base_len=1, first_node_id=1, parent_offsets=[0], token_ids=[5], q_rows=[row])
    for draft, words in ((long, "draft.parent_offsets must be at most 4096 long"), (wide, "draft.q_rows must be at")):
        opening = verifier_pb2.CollaborateOpen(handshake=handshake(verifier), request=request(types_pb2.METHOD_PEARL))
        opening.request.sampling.max_tokens = 1500
        requests = [verifier_pb2.CollaborateRequest(open=opening), verifier_pb2.CollaborateRequest(draft=draft)]
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            async for _ in stub.Collaborate(iter(requests)):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await verifier.is_idle()


async def test_what_comes_in_for_one_session_ends_no_other(
    stub: Any, verifier: RunningVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("outrider.verifier.job.StreamNodes.add", fail)
    first = verifier_pb2.CollaborateOpen(handshake=handshake(verifier), request=request(types_pb2.METHOD_PEARL))
    first.request.sampling.max_tokens = 1500
    call = stub.Collaborate()
    await call.write(verifier_pb2.CollaborateRequest(open=first))
    await call.read()
    other = asyncio.create_task(plain_text(stub))
    await call.write(verifier_pb2.CollaborateRequest(draft=types_pb2.Draft(base_len=1, first_node_id=1)))
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    assert (await call.details()).startswith("the verifier lost this session")
    assert len(await other) == NUM_TOKENS
    assert await verifier.is_idle()
