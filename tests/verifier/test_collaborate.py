"""Drafts from outside: the text is always the target's, and good drafts make it come in fewer rounds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from outrider.core.noise import choice_seed
from outrider.core.params import Source
from outrider.core.tree import Draft
from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from outrider.verifier.session import VerifySession
from tests.support.services import RunningVerifier, running_verifier
from tests.support.verifier_requests import handshake

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


class Messages:
    """A caller's messages. gRPC itself writes them: a caller that writes while a call ends gets an error instead of the
    last events."""

    def __init__(self, opening: verifier_pb2.CollaborateOpen) -> None:
        self._queue: asyncio.Queue[verifier_pb2.CollaborateRequest] = asyncio.Queue()
        self.num_bytes: list[int] = []
        self.put(verifier_pb2.CollaborateRequest(open=opening))

    def put(self, message: verifier_pb2.CollaborateRequest) -> None:
        self._queue.put_nowait(message)
        self.num_bytes.append(message.ByteSize())

    async def all(self) -> AsyncIterator[verifier_pb2.CollaborateRequest]:
        while True:
            yield await self._queue.get()


async def collaborate(
    stub: Any, verifier: RunningVerifier, draft: Callable[[int, list[int]], types_pb2.Draft | None]
) -> tuple[list[int], verifier_pb2.Finished]:
    """Generates with drafts that are made from (prompt length, output so far), one after each event."""
    opening = verifier_pb2.CollaborateOpen(handshake=handshake(verifier), request=request(types_pb2.METHOD_SPECULATIVE))
    messages = Messages(opening)
    output: list[int] = []
    num_prompt_tokens = num_bytes_heard = 0
    async for response in stub.Collaborate(messages.all()):
        match response.WhichOneof("event"):
            case "finished":
                assert response.finished.summary.num_bytes_sent == num_bytes_heard
                # The last drafts may come too late to be counted.
                num_read = response.finished.summary.num_bytes_received
                assert messages.num_bytes[0] < num_read <= sum(messages.num_bytes)
                return output, response.finished
            case "started":
                num_prompt_tokens = response.started.num_prompt_tokens
            case "chunk":
                output += response.chunk.token_ids
        num_bytes_heard += response.ByteSize()
        message = draft(num_prompt_tokens, output)
        if message is not None and len(output) < NUM_TOKENS:
            messages.put(verifier_pb2.CollaborateRequest(draft=message))
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


async def test_a_draft_that_crosses_the_end_hides_nothing(stub: Any, verifier: RunningVerifier) -> None:
    call = stub.Collaborate()
    opening = verifier_pb2.CollaborateOpen(handshake=handshake(verifier), request=request(types_pb2.METHOD_SPECULATIVE))
    await call.write(verifier_pb2.CollaborateRequest(open=opening))
    while (await call.read()).WhichOneof("event") != "finished":
        pass
    await call.write(verifier_pb2.CollaborateRequest(draft=types_pb2.Draft(token_ids=[5], parent_offsets=[0])))
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert await verifier.is_idle()


async def test_a_caller_that_never_half_closes_is_not_waited_for_for_long(stub: Any, verifier: RunningVerifier) -> None:
    call = stub.Collaborate()
    opening = verifier_pb2.CollaborateOpen(handshake=handshake(verifier), request=request(types_pb2.METHOD_SPECULATIVE))
    await call.write(verifier_pb2.CollaborateRequest(open=opening))
    async with asyncio.timeout(20.0):
        while await call.read() is not grpc.aio.EOF:
            pass
    assert await call.code() is grpc.StatusCode.OK


async def test_a_caller_that_half_closes_gets_the_rest_without_drafts(stub: Any, verifier: RunningVerifier) -> None:
    opening = verifier_pb2.CollaborateOpen(handshake=handshake(verifier), request=request(types_pb2.METHOD_PEARL))
    responses = [r async for r in stub.Collaborate(iter([verifier_pb2.CollaborateRequest(open=opening)]))]
    output = [token_id for response in responses for token_id in response.chunk.token_ids]
    assert output == await plain_text(stub)
    assert responses[-1].finished.summary.degraded
    [missing] = responses[-1].finished.summary.missing_peers
    assert (missing.peer, missing.absence) == (verifier_pb2.PEER_EDGE, verifier_pb2.ABSENCE_LOST)
    assert responses[-1].finished.summary.num_empty_rounds == responses[-1].finished.summary.num_rounds


async def test_drafts_for_a_generation_that_has_ended_are_ignored(stub: Any, verifier: RunningVerifier) -> None:
    engine = verifier.engine
    await plain_text(stub)
    late = Draft(5, 1, [0], [7], [], Source.DRAFT)
    engine.post("gone", lambda session: session.add_draft(late, 0.0))
    engine.post("gone", VerifySession.attach)
    engine.post("gone", VerifySession.detach)
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
        """A chain whose end is wrong, with a different length each time."""
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


async def steered(stub: Any, verifier: RunningVerifier, method: int, forward_us: int) -> list[Any]:
    """All events of a generation whose caller answers each commit with a wrong token, and claims this forward time."""
    opening = verifier_pb2.CollaborateOpen(
        handshake=handshake(verifier), request=request(method), wants_prompt_token_ids=True
    )
    messages = Messages(opening)
    events: list[Any] = []
    length = 0
    async for response in stub.Collaborate(messages.all()):
        events.append(response)
        length += response.started.num_prompt_tokens + len(response.chunk.token_ids)
        if response.WhichOneof("event") in ("started", "chunk"):
            draft = types_pb2.Draft(base_len=length, first_node_id=length, parent_offsets=[0], token_ids=[1])
            message = verifier_pb2.CollaborateRequest(draft=draft, forward_us=forward_us, retrieval_us=7)
            messages.put(message)
        if response.WhichOneof("event") == "finished":
            break  # a message that is written while a call ends spoils its status
    return events


async def test_the_caller_hears_first_how_to_draft(stub: Any, verifier: RunningVerifier) -> None:
    events = await steered(stub, verifier, types_pb2.METHOD_AUTO, 1000)
    assert [event.WhichOneof("event") for event in events[:2]] == ["started", "steering"]
    told = events[1].steering.speculation
    assert (told.method, told.rows) == (types_pb2.METHOD_BEST_FIRST, types_pb2.ROWS_TREE)
    assert told.HasField("num_speculative_tokens")
    assert told.HasField("lookahead")


async def test_the_caller_hears_what_the_prompt_is_if_it_asks(stub: Any, verifier: RunningVerifier) -> None:
    prompt = request(types_pb2.METHOD_PEARL).prompt
    expected = list((await stub.Tokenize(verifier_pb2.TokenizeRequest(prompt=prompt))).token_ids)
    asked = (await steered(stub, verifier, types_pb2.METHOD_PEARL, 1000))[0].started
    assert list(asked.prompt_token_ids) == expected
    opening = verifier_pb2.CollaborateOpen(handshake=handshake(verifier), request=request(types_pb2.METHOD_PEARL))
    unasked = await stub.Collaborate(iter([verifier_pb2.CollaborateRequest(open=opening)])).read()
    assert not unasked.started.prompt_token_ids
    responses = [response async for response in stub.Generate(request(types_pb2.METHOD_OFF))]
    assert not responses[0].started.prompt_token_ids


def one_of_two(index: int) -> verifier_pb2.GenerateRequest:
    """The request of a caller that drafts for this choice of two."""
    several = request(types_pb2.METHOD_PEARL)
    several.n = 2
    several.resume_choices.extend(verifier_pb2.ResumedChoice(is_finished=number != index) for number in range(2))
    return several


@pytest.mark.parametrize("index", [0, 1])
async def test_a_caller_drafts_for_the_one_of_several_texts_that_is_not_finished(
    stub: Any, verifier: RunningVerifier, index: int
) -> None:
    plain = request(types_pb2.METHOD_OFF)
    plain.n = 2
    whole = [
        token_id
        async for response in stub.Generate(plain)
        for token_id in response.chunk.token_ids
        if response.index == index
    ]
    opening = verifier_pb2.CollaborateOpen(handshake=handshake(verifier), request=one_of_two(index))
    call = stub.Collaborate(iter([verifier_pb2.CollaborateRequest(open=opening)]))
    responses = [response async for response in call]
    assert responses[0].started.seed == choice_seed(11, index)
    assert [token_id for response in responses for token_id in response.chunk.token_ids] == whole
    assert await verifier.is_idle()


async def test_a_caller_does_not_draft_for_several_texts_in_one_call(stub: Any, verifier: RunningVerifier) -> None:
    several = one_of_two(0)
    del several.resume_choices[:]
    opening = verifier_pb2.CollaborateOpen(handshake=handshake(verifier), request=several)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Collaborate(iter([verifier_pb2.CollaborateRequest(open=opening)])).read()
    rule = "all finished but one, for which this caller drafts"
    assert caught.value.details() == f"resume_choices must be {rule}, got 2"


async def test_what_a_draft_has_cost_is_no_round_trip(stub: Any, verifier: RunningVerifier) -> None:
    """The caller claims 50 ms for each draft, far more than it takes, so no time is left for the network."""
    quick = await steered(stub, verifier, types_pb2.METHOD_SPECULATIVE, 0)
    slow = await steered(stub, verifier, types_pb2.METHOD_SPECULATIVE, 50_000)
    times = slow[-1].finished.summary.times_p50
    assert (times.draft_forward_ms, times.draft_retrieval_ms) == (50, 0.007)
    assert times.draft_latency_ms > 0
    measured = [
        event.steering
        for event in quick[2:]
        if event.WhichOneof("event") == "steering" and event.steering.round_trip_us
    ]
    assert measured[0].forward_us > 0
    assert measured[0].round_trip_us > 1
    last = [event.steering for event in slow if event.WhichOneof("event") == "steering"][-1]
    # At most half a millisecond: smaller changes are not sent, and the quick caller may have been near.
    assert last.round_trip_us <= 501


async def test_a_caller_is_waited_for_as_a_speculator_is(stub: Any, verifier: RunningVerifier) -> None:
    """Draft, then verify; only drafts that the target waits for have a latency."""
    summary = (await steered(stub, verifier, types_pb2.METHOD_SPECULATIVE, 100))[-1].finished.summary
    assert summary.num_drafted_tokens > 0
    assert summary.times_p50.draft_latency_ms > 0
    assert not summary.degraded


@pytest.mark.parametrize("field", ["forward_us", "retrieval_us"])
async def test_an_opening_has_cost_nothing(stub: Any, verifier: RunningVerifier, field: str) -> None:
    opening = verifier_pb2.CollaborateOpen(handshake=handshake(verifier), request=request(types_pb2.METHOD_PEARL))
    message = verifier_pb2.CollaborateRequest(open=opening, **{field: 5})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Collaborate(iter([message])).read()
    assert caught.value.details() == f"{field} must be unset in a message without a draft, got 5"


async def test_a_caller_that_drafts_without_end_keeps_nobody_from_decoding(
    stub: Any, verifier: RunningVerifier
) -> None:
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


async def read_to_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_what_comes_in_for_one_session_ends_no_other(
    stub: Any, verifier: RunningVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("outrider.core.tree.StreamNodes.add", fail)
    first = verifier_pb2.CollaborateOpen(handshake=handshake(verifier), request=request(types_pb2.METHOD_PEARL))
    first.request.sampling.max_tokens = 1500
    call = stub.Collaborate()
    await call.write(verifier_pb2.CollaborateRequest(open=first))
    await call.read()
    other = asyncio.create_task(plain_text(stub))
    await call.write(verifier_pb2.CollaborateRequest(draft=types_pb2.Draft(base_len=1, first_node_id=1)))
    with pytest.raises(grpc.aio.AioRpcError, match="the verifier lost this session"):
        await read_to_end(call)
    assert len(await other) == NUM_TOKENS
    assert await verifier.is_idle()
