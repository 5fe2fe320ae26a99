"""An edge's generations go to the verifier with the least load, and stay there while it works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from outrider.core import load
from outrider.edge.upstream import Upstreams
from outrider.v1 import verifier_pb2
from outrider.wire.errors import ResourceExhausted, Unavailable
from outrider_client.client import Client
from tests.support.scripted_cloud import ScriptedCloud, chunk, finish, serving, started
from tests.support.services import RunningVerifier, draft_model, other_target_model, running_edge, running_verifier

TEXT = "def add(a, b):\n"


@pytest.fixture
async def upstreams() -> AsyncIterator[Upstreams]:
    three = Upstreams(["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"])
    yield three
    await three.close()


async def test_one_that_is_full_stays_known_and_one_that_is_lost_is_asked_again_what_it_is(
    upstreams: Upstreams,
) -> None:
    first = upstreams[0]
    first.learn_info(verifier_pb2.GetInfoResponse())
    upstreams.on_failure(first, ResourceExhausted("full", retry_after_s=7.0))
    assert await first.info(None) == verifier_pb2.GetInfoResponse()
    assert first.state.is_connected
    upstreams.on_failure(first, Unavailable("gone"))
    assert not first.state.is_connected
    with pytest.raises(grpc.aio.AioRpcError):
        await first.info(None)


async def test_a_short_call_goes_to_each_verifier_before_it_fails(upstreams: Upstreams) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await upstreams.ask(lambda stub: stub.GetInfo(verifier_pb2.GetInfoRequest()))
    assert all("UNAVAILABLE" in state.last_error for state in upstreams.states)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[RunningVerifier, RunningVerifier]]:
    async with running_verifier() as one, running_verifier(model=other_target_model()) as other:
        yield one, other


def sessions_of(pair: tuple[RunningVerifier, RunningVerifier]) -> list[int]:
    return [verifier.servicer.num_sessions for verifier in pair]


async def begun(client: Client, exits: AsyncExitStack, **options: Any) -> Any:
    generation = client.generate(TEXT, max_tokens=1500, ignore_eos=True, **options)
    exits.callback(generation.cancel)
    await anext(generation)
    return generation


@pytest.mark.parametrize("method", ["off", "pearl"])
async def test_generations_are_shared_between_two_verifiers_and_stay_where_they_are(
    pair: tuple[RunningVerifier, RunningVerifier], method: str
) -> None:
    async with AsyncExitStack() as exits:
        edge = await exits.enter_async_context(running_edge(*(each.address for each in pair), model=draft_model()))
        client = await exits.enter_async_context(Client(edge.address))
        generations = [await begun(client, exits, method=method) for _ in range(4)]
        assert sessions_of(pair) == [2, 2]
        # The first verifier is now empty. Running generations stay at the other one; new ones go to the first.
        for generation in generations[::2]:
            generation.cancel()
        assert await pair[0].is_idle()
        for generation in generations[1::2]:
            await anext(generation)
        assert sessions_of(pair) == [0, 2]
        for _ in range(2):
            await begun(client, exits, method=method)
        assert sessions_of(pair) == [2, 2]
    for verifier in pair:
        assert await verifier.is_idle()


async def test_a_verifier_that_others_keep_busy_is_left_to_them(
    pair: tuple[RunningVerifier, RunningVerifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "BELIEVED_S", 3600.0)  # however slow the machine is
    async with AsyncExitStack() as exits:
        others = await exits.enter_async_context(Client(pair[0].address))
        for _ in range(3):
            await begun(others, exits, method="off")
        edge = await exits.enter_async_context(running_edge(*(each.address for each in pair), model=draft_model()))
        client = await exits.enter_async_context(Client(edge.address))
        await client.complete(TEXT, max_tokens=1, method="off")  # the first verifier reports its load
        for _ in range(3):
            await begun(client, exits, method="pearl")
        assert sessions_of(pair) == [3, 3]


async def test_all_texts_of_a_request_are_at_the_verifier_that_has_read_the_prompt(
    pair: tuple[RunningVerifier, RunningVerifier],
) -> None:
    async with AsyncExitStack() as exits:
        edge = await exits.enter_async_context(running_edge(*(each.address for each in pair), model=draft_model()))
        client = await exits.enter_async_context(Client(edge.address))
        generation = await begun(client, exits, n=3, method="pearl")
        seen: set[int] = set()
        while len(seen) < 3:
            seen.add((await anext(generation)).index)
        assert sessions_of(pair) == [3, 0]
        await begun(client, exits, method="pearl")
        assert sessions_of(pair) == [3, 1]


async def test_a_verifier_that_has_failed_gets_no_generation_for_a_while() -> None:
    asked: list[str] = []
    fails = asyncio.Event()

    def cloud(name: str) -> ScriptedCloud:
        async def collaborate(requests: Any, context: Any) -> None:
            asked.append(name)
            await anext(requests)
            if name == "first" and not fails.is_set():
                fails.set()
                await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
            await context.write(started([5, 6]))
            await context.write(chunk(7))
            await finish(requests, context, 1)

        return ScriptedCloud(collaborate)

    async with (
        serving(cloud("first")) as first,
        serving(cloud("second")) as second,
        running_edge(first, second, model=draft_model()) as edge,
        Client(edge.address) as client,
    ):
        for _ in range(3):
            await client.complete(TEXT, max_tokens=1, method="pearl")
    assert asked == ["first", "second", "second", "second"]
