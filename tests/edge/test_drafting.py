"""How the edge drafts: when it begins, what it is told, and when it does without a cloud or a draft model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from outrider.edge.draft_model import DraftModel
from outrider.edge.settings import EdgeSettings
from outrider.models.loading import LoadedModel
from outrider.v1 import types_pb2, verifier_pb2
from outrider_client.client import Client
from outrider_client.generation import Result
from outrider_client.requests import Prompt
from tests.support.scripted_cloud import Collaborate, ScriptedCloud, chunk, finish, finished, serving, started, steering
from tests.support.services import RunningVerifier, draft_model, running_edge
from tests.support.waiting import until

PROMPT = list(range(10, 20))
TEXT = "def add(a, b):\n"


async def first_draft(requests: AsyncIterator[verifier_pb2.CollaborateRequest], base_len: int) -> types_pb2.Draft:
    """The first draft with this base; drafts before it are late."""
    async for request in requests:
        if request.draft.base_len == base_len:
            assert request.forward_us > 0
            return request.draft
    raise AssertionError("the edge has half-closed")


async def rest(requests: AsyncIterator[verifier_pb2.CollaborateRequest]) -> list[verifier_pb2.CollaborateRequest]:
    """The requests until the edge half-closes."""
    return [request async for request in requests]


async def generate(collaborate: Collaborate, prompt: Prompt, method: str = "pearl") -> Result:
    async with (
        serving(ScriptedCloud(collaborate)) as address,
        running_edge(address, model=draft_model()) as edge,
        Client(edge.address) as client,
    ):
        result = await client.complete(prompt, temperature=0, seed=1, max_tokens=4, method=method)
        assert await edge.is_idle()
        return result


@pytest.mark.parametrize("method", ["pearl", "auto"])
async def test_token_ids_are_drafted_for_before_the_cloud_has_said_anything(method: str) -> None:
    async def collaborate(requests: Any, context: Any) -> None:
        opening = (await anext(requests)).open
        assert not opening.wants_prompt_token_ids
        assert opening.request.sampling.seed == 1
        await first_draft(requests, len(PROMPT))
        await context.write(started(PROMPT, shows_prompt=False))
        await finish(requests, context, 0)

    await generate(collaborate, PROMPT, method)


async def test_text_is_drafted_for_once_the_cloud_has_said_what_it_reads() -> None:
    async def collaborate(requests: Any, context: Any) -> None:
        opening = (await anext(requests)).open
        assert opening.wants_prompt_token_ids
        assert opening.request.prompt.text == TEXT
        await context.write(started(PROMPT))
        await context.write(steering(types_pb2.METHOD_SPECULATIVE, 4))
        draft = await first_draft(requests, len(PROMPT))
        assert len(draft.token_ids) == 4
        await context.write(chunk(7, 8))
        await first_draft(requests, len(PROMPT) + 2)
        await finish(requests, context, 2)

    result = await generate(collaborate, TEXT)
    assert (result.token_ids, result.text) == ((7, 8), "xx")


async def test_the_clouds_steering_pauses_and_changes_the_method() -> None:
    async def collaborate(requests: Any, context: Any) -> None:
        await anext(requests)
        await context.write(started(PROMPT))
        await context.write(steering(types_pb2.METHOD_SPECULATIVE, 4))
        await first_draft(requests, len(PROMPT))
        await context.write(steering(types_pb2.METHOD_OFF))
        await context.write(chunk(7))
        await context.write(chunk(8))
        slow = {"forward_us": 2_000_000, "round_trip_us": 400}  # the target can wait for a whole draft
        await context.write(steering(types_pb2.METHOD_SPECULATIVE, 6, **slow))
        late = [request.draft async for request in requests_until(requests, len(PROMPT) + 2)]
        assert len(late) == 1  # nothing was drafted meanwhile
        assert len(late[0].token_ids) == 6
        await finish(requests, context, 2)

    await generate(collaborate, TEXT)


async def requests_until(
    requests: AsyncIterator[verifier_pb2.CollaborateRequest], base_len: int
) -> AsyncIterator[verifier_pb2.CollaborateRequest]:
    async for request in requests:
        yield request
        if request.draft.base_len == base_len:
            return


BAD_WORDS = {
    "a method that is not chosen": [steering(types_pb2.METHOD_AUTO)],
    "a method without a draft model": [steering(types_pb2.METHOD_SPACELIKE)],
    "a parameter out of range": [steering(types_pb2.METHOD_PEARL, 1000)],
    "an unknown token": [steering(types_pb2.METHOD_PEARL), chunk(5000)],
}


@pytest.mark.parametrize("name", BAD_WORDS)
async def test_what_makes_no_sense_ends_the_drafting_and_not_the_generation(name: str) -> None:
    async def collaborate(requests: Any, context: Any) -> None:
        await anext(requests)
        await context.write(started(PROMPT))
        for word in BAD_WORDS[name]:
            await context.write(word)
        await rest(requests)
        await context.write(steering(types_pb2.METHOD_PEARL))
        await context.write(chunk(7))
        await finish(requests, context, 1)

    assert (await generate(collaborate, TEXT)).token_ids[-1] == 7


async def test_a_prompt_without_tokens_ends_the_drafting_and_not_the_generation() -> None:
    async def collaborate(requests: Any, context: Any) -> None:
        await anext(requests)
        await context.write(started(PROMPT, shows_prompt=False))
        await context.write(steering(types_pb2.METHOD_PEARL))
        await rest(requests)
        await finish(requests, context, 0)

    await generate(collaborate, TEXT)


async def test_a_prompt_beyond_the_draft_models_context_is_not_drafted_for(
    verifier: RunningVerifier, cloud: Client
) -> None:
    short = replace(draft_model(), max_context_len=5)
    plain = await cloud.complete(TEXT, seed=2, max_tokens=24, ignore_eos=True, method="off")
    async with running_edge(verifier.address, model=short) as edge, Client(edge.address) as client:
        result = await client.complete(TEXT, seed=2, max_tokens=24, ignore_eos=True, method="pearl")
        assert await edge.is_idle()
    assert result.token_ids == plain.token_ids
    assert result.summary.degraded


@pytest.mark.parametrize("method", ["pearl", "auto", "card", "best-first"])
async def test_the_first_token_does_not_wait_for_the_draft_model(
    verifier: RunningVerifier, cloud: Client, method: str
) -> None:
    plain = await cloud.complete(TEXT, seed=2, max_tokens=24, ignore_eos=True, method="off")
    async with running_edge(verifier.address) as edge, Client(edge.address) as client:
        result = await client.complete(TEXT, seed=2, max_tokens=24, ignore_eos=True, method=method)
        assert result.token_ids == plain.token_ids
        assert result.summary.degraded
        assert result.summary.num_rounds > 0
        num = result.summary.num_rounds
        words = f"the edge's draft model was still starting, or shutting down, for {num} of {num} rounds "
        words += "(the draft model is loading)"
        assert result.missing_peers == (words,)
        info = await client.info()
        assert (info.speculator.connected, info.speculator.last_error) == (False, "the draft model is loading")


async def loaded(client: Client) -> verifier_pb2.PeerInfo:
    """What the edge reports of its draft model once it has loaded or failed."""

    async def ended() -> verifier_pb2.PeerInfo | None:
        speculator = (await client.info()).speculator
        return None if "loading" in speculator.last_error else speculator

    speculator = await until(ended)
    assert isinstance(speculator, verifier_pb2.PeerInfo)
    return speculator


async def test_a_draft_model_that_cannot_be_loaded_is_said_and_done_without(verifier: RunningVerifier) -> None:
    async with running_edge(verifier.address, settings_model="demo/nope") as edge, Client(edge.address) as client:
        await edge.service.load()
        assert "--model demo/nope: there is no demo model" in (await loaded(client)).last_error
        result = await client.complete(TEXT, max_tokens=8, ignore_eos=True, method="pearl")
        assert result.summary.degraded
        assert "the edge's draft model could not be used" in result.missing_peers[0]


async def test_a_draft_model_that_loads_is_used(verifier: RunningVerifier) -> None:
    async with running_edge(verifier.address) as edge, Client(edge.address) as client:
        await edge.service.load()
        assert (await loaded(client)).connected
        result = await client.complete(TEXT, max_tokens=24, ignore_eos=True, method="speculative")
        assert result.summary.num_drafted_tokens > 0
        assert not result.summary.degraded


async def test_a_draft_model_of_another_tokenizer_is_not_used(verifier: RunningVerifier) -> None:
    stranger = replace(draft_model(), tokenizer_hash="00ff")
    async with running_edge(verifier.address, model=stranger) as edge, Client(edge.address) as client:
        result = await client.complete(TEXT, max_tokens=24, ignore_eos=True, method="pearl")
        assert result.summary.num_drafted_tokens == 0
        assert result.summary.degraded
        speculator = (await client.info()).speculator
        assert not speculator.connected
        assert verifier.model.tokenizer_hash in speculator.last_error
        assert "00ff" in speculator.last_error


async def test_a_cloud_that_refuses_the_drafter_generates_without_it_and_is_asked_again_what_it_is() -> None:
    async def refuse(requests: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another tokenizer now")

    async def plain(request: verifier_pb2.GenerateRequest, context: Any) -> None:
        assert request.speculation.allow_fallback
        await context.write(verifier_pb2.GenerateResponse(started=started([5]).started))
        await context.write(verifier_pb2.GenerateResponse(chunk=chunk(7).chunk))
        await context.write(verifier_pb2.GenerateResponse(finished=finished(1).finished))

    cloud = ScriptedCloud(refuse, plain)
    async with (
        serving(cloud) as address,
        running_edge(address, model=draft_model()) as edge,
        Client(edge.address) as client,
    ):
        for num_infos in (1, 2):
            result = await client.complete(TEXT, max_tokens=1, method="pearl")
            assert result.token_ids == (7,)
            assert result.summary.degraded
            assert cloud.num_infos == num_infos
        assert await edge.is_idle()


async def test_a_generation_too_many_goes_up_without_drafts(verifier: RunningVerifier) -> None:
    async with (
        running_edge(verifier.address, model=draft_model(), max_num_sessions=1) as edge,
        Client(edge.address) as client,
    ):
        first = client.generate(TEXT, max_tokens=1500, ignore_eos=True, method="pearl")
        await anext(first)
        second = await client.complete(TEXT, max_tokens=8, ignore_eos=True, method="pearl")
        assert second.summary.num_drafted_tokens == 0
        assert second.summary.degraded
        first.cancel()
        assert await edge.is_idle()
        third = await client.complete(TEXT, max_tokens=8, ignore_eos=True, method="speculative")
        assert not third.summary.degraded


async def test_a_generation_too_many_goes_up_without_drafts_before_the_first_one_drafts() -> None:
    has_opened, may_end = asyncio.Event(), asyncio.Event()

    async def collaborate(requests: Any, context: Any) -> None:
        if not has_opened.is_set():
            has_opened.set()
            await may_end.wait()  # without a prompt the edge cannot draft
        await context.write(started(PROMPT))
        await finish(requests, context, 0)

    async def plain(request: verifier_pb2.GenerateRequest, context: Any) -> None:
        await context.write(verifier_pb2.GenerateResponse(started=started(PROMPT).started))
        await context.write(verifier_pb2.GenerateResponse(finished=finished(0).finished))

    async with (
        serving(ScriptedCloud(collaborate, plain)) as address,
        running_edge(address, model=draft_model(), max_num_sessions=1) as edge,
        Client(edge.address) as client,
    ):
        first = asyncio.create_task(client.complete(TEXT, max_tokens=4, method="pearl"))
        await has_opened.wait()
        assert (await client.complete(TEXT, max_tokens=4, method="pearl")).summary.degraded
        may_end.set()
        assert not (await first).summary.degraded
        assert not (await client.complete(TEXT, max_tokens=4, method="pearl")).summary.degraded
        assert await edge.is_idle()


async def test_a_draft_model_that_is_closed_while_it_loads_leaves_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    is_loading, may_end = threading.Event(), threading.Event()

    def load(settings: EdgeSettings) -> LoadedModel:
        is_loading.set()
        may_end.wait()
        return draft_model()

    monkeypatch.setattr("outrider.models.loading.load_for", load)
    before = set(threading.enumerate())
    model = DraftModel(EdgeSettings(upstream="127.0.0.1:9", model="demo/draft"))
    model.start()
    await until(is_loading.is_set)
    await model.close()
    may_end.set()
    await until(lambda: not [thread for thread in threading.enumerate() if thread not in before])


def test_torch_is_not_imported_before_the_port_is_served() -> None:
    code = "import sys, outrider.edge.service; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
