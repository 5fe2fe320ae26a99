"""While a prompt is read, the engine itself reports its progress to the caller, so an engine that hangs is noticed."""

from __future__ import annotations

import asyncio
import threading

import pytest
from grpc.aio import insecure_channel

from outrider.v1.verifier_pb2 import Reading
from outrider.v1.verifier_pb2_grpc import VerifierServiceStub
from outrider.verifier import generation
from outrider_client.client import Client
from outrider_client.errors import Unavailable
from outrider_client.requests import generate_request
from tests.support.services import RunningVerifier, draft_model, running_edge, running_verifier
from tests.support.waiting import until

pytestmark = pytest.mark.slow


def prompt(first: int) -> list[int]:
    """A long prompt that shares its beginning with no other: all tests share the pool of one model."""
    return [first, *range(100, 1900)]


@pytest.fixture(autouse=True)
def _news_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "NEWS_S", 0.02)


async def readings_of(address: str, prompt: list[int]) -> list[Reading]:
    """The progress reports while a prompt is read. No other event may come between them."""
    async with insecure_channel(address) as channel:
        request = generate_request(prompt, {"max_tokens": 4, "temperature": 0})
        events = [event async for event in VerifierServiceStub(channel).Generate(request)]
    names = [event.WhichOneof("event") for event in events]
    told = names.count("reading")
    assert names[: told + 1] == ["started", *["reading"] * told]
    return [event.reading for event in events if event.HasField("reading")]


async def test_a_caller_is_told_how_much_of_its_prompt_is_read() -> None:
    async with running_verifier(prefill_chunk=16) as verifier:
        told = await readings_of(verifier.address, prompt(9))
        assert len(told) > 2
        assert [each.num_read_tokens for each in told] == sorted(each.num_read_tokens for each in told)
        assert {each.num_tokens for each in told} == {len(prompt(9))}
        assert told[-1].num_read_tokens < len(prompt(9))
        # The keys and values are there now.
        assert len(await readings_of(verifier.address, prompt(9))) <= 1


async def test_an_edge_passes_on_how_much_is_read() -> None:
    async with (
        running_verifier(prefill_chunk=16) as verifier,
        running_edge(verifier.address, model=draft_model()) as edge,
    ):
        assert len(await readings_of(edge.address, prompt(10))) > 2


@pytest.mark.parametrize("others", [0, 1], ids=["reading", "waiting"])
async def test_an_engine_that_hangs_tells_nothing(others: int) -> None:
    async with running_verifier(prefill_chunk=16, max_num_sessions=1, max_num_queued=2) as verifier:
        goes_on = threading.Event()
        async with Client(verifier.address) as client:
            running = client.generate("def f(", max_tokens=900, ignore_eos=True) if others else None
            if running is not None:
                await anext(running)
            asked = asyncio.create_task(
                client.complete(prompt(11 + others), max_tokens=4, stall_timeout_s=0.5, resume=False)
            )
            await until(lambda: verifier.engine.num_sessions == others + 1)
            hang(verifier, goes_on)
            try:
                with pytest.raises(Unavailable, match="has told nothing of the generation for"):
                    await asked
            finally:
                goes_on.set()
            if running is not None:
                await running.aclose()


def hang(verifier: RunningVerifier, until_set: threading.Event) -> None:
    """Makes the engine's thread wait in the middle of its work."""
    (session_id, *_) = verifier.engine.sessions
    verifier.engine.post(session_id, lambda _: until_set.wait(30))
