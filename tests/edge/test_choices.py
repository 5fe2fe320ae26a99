"""Several texts of one prompt through an edge: each gets drafts, and each is the cloud's own text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from outrider.core.noise import choice_seed
from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from outrider_cli.links.delay_proxy import DelayProxy
from outrider_client.client import Client
from outrider_client.errors import DataLoss, ResourceExhausted, from_rpc_error
from outrider_client.generation import Result
from tests.support.scripted_cloud import ScriptedCloud, chunk, finish, serving, started
from tests.support.services import (
    RunningEdge,
    RunningVerifier,
    draft_model,
    other_target_model,
    running_edge,
    running_verifier,
)
from tests.support.verifier_requests import refusal

TEXT = "class TestParser(unittest.TestCase):\n    def test_"
SAMPLED = {"temperature": 0.9, "seed": 3, "max_tokens": 40}
VARIANTS: dict[str, dict[str, Any]] = {
    "off": {"method": "off"},
    "pearl": {"method": "pearl"},
    "best-first": {"method": "best-first", "rows": "tree"},
    "auto": {"method": "auto"},
}


@pytest.fixture
async def verifier() -> AsyncIterator[RunningVerifier]:
    async with running_verifier() as running:
        yield running


@pytest.fixture
async def stub(edge: RunningEdge) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(edge.address) as channel:
        yield verifier_pb2_grpc.VerifierServiceStub(channel)


@pytest.fixture
async def cloud_stub(verifier: RunningVerifier) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(verifier.address) as channel:
        yield verifier_pb2_grpc.VerifierServiceStub(channel)


def request(n: int, choices: Sequence[tuple[Sequence[int], bool]] = (), **fields: Any) -> verifier_pb2.GenerateRequest:
    """A request for n texts. `choices`: the tokens of each so far, and whether it is finished."""
    made = verifier_pb2.GenerateRequest(
        prompt=verifier_pb2.Prompt(text=TEXT),
        sampling=types_pb2.SamplingParams(**{"temperature": 0.9, "seed": 3, "max_tokens": 40, **fields}),
        speculation=types_pb2.SpeculationParams(method=types_pb2.METHOD_BEST_FIRST, allow_fallback=True),
        n=n,
    )
    for token_ids, is_finished in choices:
        made.resume_choices.add(token_ids=token_ids, is_finished=is_finished)
    return made


def same_texts(one: Result, other: Result) -> None:
    assert len(one.choices) == len(other.choices)
    for here, there in zip(one.choices, other.choices, strict=True):
        for field in ("text", "token_ids", "seed", "finish_reason", "stop_string", "num_output_tokens"):
            assert getattr(here, field) == getattr(there, field), field
        for logprobs in ("logprobs", "prompt_logprobs"):
            ranks = [[each.rank for each in getattr(choice, logprobs)] for choice in (here, there)]
            assert ranks[0] == ranks[1], logprobs


@pytest.mark.parametrize("name", VARIANTS)
async def test_each_of_several_texts_is_the_clouds_and_drafted_for(
    client: Client, cloud: Client, verifier: RunningVerifier, edge: RunningEdge, name: str
) -> None:
    options: dict[str, Any] = SAMPLED | {"n": 3, "stop": ["\n\n"], "logprobs": 1, "prompt_logprobs": 0, "echo": True}
    plain = await cloud.complete(TEXT, **options, method="off")
    here = await client.complete(TEXT, **options, **VARIANTS[name])
    same_texts(here, plain)
    assert len({choice.text for choice in here.choices}) == 3
    assert [choice.seed for choice in here.choices] == [choice_seed(3, index) for index in range(3)]
    assert (here.prompt_token_ids, here.prompt_text) == (plain.prompt_token_ids, plain.prompt_text)
    summaries = [choice.summary for choice in here.choices]
    assert not any(summary.degraded for summary in summaries)
    if name in ("pearl", "best-first"):
        assert sum(summary.num_accepted_tokens for summary in summaries) > 0
        sources = {count.source for summary in summaries for count in summary.accepted_by_source}
        assert sources == {types_pb2.SOURCE_DRAFT}
    assert await verifier.is_idle()
    assert await edge.is_idle()


async def test_each_text_is_drafted_for_with_the_noise_of_its_own_seed(client: Client) -> None:
    options: dict[str, Any] = SAMPLED | {"temperature": 1.5, "method": "speculative", "ignore_eos": True}
    together = (await client.complete(TEXT, **options, n=3)).choices
    for index, choice in enumerate(together):
        alone = await client.complete(TEXT, **(options | {"seed": choice_seed(3, index)}))
        assert choice.token_ids == alone.token_ids
        # With another seed's noise few drafted tokens would be right. On a busy machine drafts may come too late to be
        # verified, but of those that were verified, as many are right.
        share = alone.summary.num_accepted_tokens / alone.summary.num_drafted_tokens
        assert choice.summary.num_accepted_tokens >= 0.5 * share * choice.summary.num_drafted_tokens


async def events_of(call: Any) -> list[tuple[int, str]]:
    return [(response.index, response.WhichOneof("event")) async for response in call]


async def test_the_events_of_each_text_have_its_number_and_what_is_told_of_the_prompt_comes_once(
    stub: Any, cloud_stub: Any
) -> None:
    wanted = request(3, max_tokens=6)
    wanted.report.echo, wanted.report.prompt_logprobs = True, 0
    told = {"there": [each async for each in cloud_stub.Generate(wanted)], "here": []}
    told["here"] = [each async for each in stub.Generate(wanted)]
    for index in range(3):
        own = {where: [each for each in events if each.index == index] for where, events in told.items()}
        kinds = {where: [each.WhichOneof("event") for each in events] for where, events in own.items()}
        assert kinds["here"][0] == "started"
        assert kinds["here"][-1] == "finished"
        assert {kind: kinds["here"].count(kind) for kind in ("started", "finished", "prompt_logprobs")} == {
            kind: kinds["there"].count(kind) for kind in ("started", "finished", "prompt_logprobs")
        }
        begun = {where: events[0].started for where, events in own.items()}
        assert begun["here"].prompt_token_ids == begun["there"].prompt_token_ids
        assert begun["here"].prompt_text == begun["there"].prompt_text
        assert begun["here"].seed == begun["there"].seed
    assert told["here"][0].index == 0


@pytest.mark.parametrize("method", [types_pb2.METHOD_OFF, types_pb2.METHOD_SPECULATIVE])
async def test_an_application_resumes_each_text_where_it_was(
    stub: Any, cloud: Client, edge: RunningEdge, method: int
) -> None:
    whole = [choice.token_ids for choice in (await cloud.complete(TEXT, **SAMPLED, n=4, ignore_eos=True)).choices]  # type: ignore[arg-type]
    # The second one is finished, the third has not begun.
    wanted = request(4, [(whole[0][:7], False), (whole[1], True), ((), False), (whole[3][:20], False)], ignore_eos=True)
    wanted.speculation.method = method  # type: ignore[assignment]
    rests: dict[int, list[int]] = {}
    accepted: dict[int, int] = {}
    async for response in stub.Generate(wanted):
        rests.setdefault(response.index, []).extend(response.chunk.token_ids)
        if response.HasField("finished"):
            accepted[response.index] = response.finished.summary.num_accepted_tokens
            assert response.finished.num_output_tokens == 40
    assert rests == {0: [*whole[0][7:]], 2: [*whole[2]], 3: [*whole[3][20:]]}
    assert all((count > 0) == (method != types_pb2.METHOD_OFF) for count in accepted.values())
    assert await edge.is_idle()


async def test_nothing_is_left_of_texts_that_are_all_finished(stub: Any, cloud_stub: Any) -> None:
    wanted = request(2, [([5], True), ([6], True)])
    assert await events_of(stub.Generate(wanted)) == await events_of(cloud_stub.Generate(wanted)) == []


def without_seed(wanted: verifier_pb2.GenerateRequest) -> verifier_pb2.GenerateRequest:
    wanted.sampling.ClearField("seed")
    return wanted


def resuming_one(wanted: verifier_pb2.GenerateRequest) -> verifier_pb2.GenerateRequest:
    wanted.resume_token_ids.append(5)
    return wanted


BAD = {
    "n below 1": request(-1),
    "none": request(0),
    "more texts than the server gives": request(17),
    "more texts than anybody gives": request(1_000_000_000),
    "more tokens than there is room for": request(16, max_tokens=100_000),
    "a choice without n": request(1, [([5], False)]),
    "too few choices": request(3, [([5], False), ([6], False)]),
    "too many choices": request(2, [([5], False)] * 3),
    "tokens that are of no text": resuming_one(request(2)),
    "an unknown token in the last one": request(3, [((), False), ([5], False), ([2048], False)]),
    "a later one that is too long": request(2, [((), False), ([5] * 5, False)], max_tokens=4),
    "a later one without a seed": without_seed(request(2, [((), False), ([5], False)])),
    "a finished one with an unknown token": request(2, [((), False), ([2048], True)]),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_request_is_refused_in_the_clouds_words_before_anything_is_read(
    stub: Any, cloud_stub: Any, verifier: RunningVerifier, name: str
) -> None:
    there = from_rpc_error(await refusal(cloud_stub.Generate(BAD[name])))
    here = from_rpc_error(await refusal(stub.Generate(BAD[name])))
    assert (type(here), here.message, here.details) == (type(there), there.message, there.details)
    assert verifier.engine.residency.num_queried_tokens == 0


READINGS: dict[str, dict[str, Any]] = {
    "drafted": {"method": "best-first"},
    "plain": {"method": "off"},
    "with log-probabilities": {"method": "best-first", "prompt_logprobs": 0},
}


@pytest.mark.parametrize("name", READINGS)
async def test_the_prompt_is_read_once_but_for_its_last_block(
    client: Client, verifier: RunningVerifier, name: str
) -> None:
    prompt = [len(name), *range(100, 400)]  # four blocks of 64 tokens, and 45 more
    await client.complete(prompt, seed=1, max_tokens=8, n=4, **READINGS[name])
    assert verifier.engine.residency.num_found_tokens == 3 * 256


async def test_without_a_seed_all_texts_have_seeds_of_one(client: Client, cloud: Client) -> None:
    drawn = await client.complete(TEXT, temperature=0.9, max_tokens=8, n=3, method="pearl")
    assert [choice.seed for choice in drawn.choices] == [choice_seed(drawn.seed, index) for index in range(3)]
    again = await cloud.complete(TEXT, temperature=0.9, max_tokens=8, n=3, method="off", seed=drawn.seed)
    same_texts(drawn, again)


async def test_cancelling_ends_all_texts_everywhere(
    client: Client, verifier: RunningVerifier, edge: RunningEdge
) -> None:
    generation = client.generate(TEXT, max_tokens=400, ignore_eos=True, n=3, method="pearl")
    seen = set()
    async for piece in generation:
        seen.add(piece.index)
        if len(seen) == 3:
            break
    assert verifier.servicer.num_sessions == 3
    generation.cancel()
    assert await verifier.is_idle()
    assert await edge.is_idle()


async def test_texts_beyond_the_sessions_of_the_draft_model_go_up_without_drafts(
    verifier: RunningVerifier, cloud: Client
) -> None:
    plain = await cloud.complete(TEXT, **SAMPLED, n=3, method="off")  # type: ignore[arg-type]
    async with (
        running_edge(verifier.address, model=draft_model(), max_num_sessions=2) as edge,
        Client(edge.address) as client,
    ):
        here = await client.complete(TEXT, **SAMPLED, n=3, method="speculative")  # type: ignore[arg-type]
        same_texts(here, plain)
        assert sorted(choice.summary.degraded for choice in here.choices) == [False, False, True]
        assert await edge.is_idle()


def index_of(opening: verifier_pb2.CollaborateOpen) -> int:
    """The text that a call is for."""
    (index,) = (index for index, each in enumerate(opening.request.resume_choices) if not each.is_finished)
    return index


async def test_an_error_of_one_text_ends_the_others_and_is_the_clouds() -> None:
    ended = asyncio.Event()

    async def collaborate(requests: Any, context: Any) -> None:
        index = index_of((await anext(requests)).open)
        await context.write(started([5, 6]))
        await context.write(chunk(7))
        if index == 1:
            await context.abort(grpc.StatusCode.DATA_LOSS, "broken")
        try:
            await asyncio.Event().wait()
        finally:
            if index == 0:
                ended.set()

    async with (
        serving(ScriptedCloud(collaborate)) as address,
        running_edge(address, model=draft_model()) as edge,
        Client(edge.address) as client,
    ):
        with pytest.raises(DataLoss, match="broken"):
            await client.complete(TEXT, max_tokens=8, n=3, method="pearl", resume=False)
        await asyncio.wait_for(ended.wait(), 10)
        assert await edge.is_idle()


async def test_a_second_text_begins_when_the_first_one_has_read_the_prompt() -> None:
    indices: list[int] = []

    async def collaborate(requests: Any, context: Any) -> None:
        opening = (await anext(requests)).open
        index = index_of(opening)
        indices.append(index)
        if len(indices) == 1:
            assert opening.wants_prompt_token_ids
            await context.write(started([5, 6]))
            await context.write(verifier_pb2.CollaborateResponse(waiting=verifier_pb2.Waiting(num_waiting=1)))
            await context.write(verifier_pb2.CollaborateResponse(prompt_logprobs=verifier_pb2.PromptLogprobs()))
            assert indices == [0]
        else:
            assert not opening.wants_prompt_token_ids  # the first one has them
            await context.write(started([5, 6], shows_prompt=False))
        # A draft on its way can hide how a call has ended. Then the edge asks once more, for the end alone.
        if not opening.request.resume_choices[index].token_ids:
            await context.write(chunk(7))
        await finish(requests, context, 1)

    async with (
        serving(ScriptedCloud(collaborate)) as address,
        running_edge(address, model=draft_model()) as edge,
        Client(edge.address) as client,
    ):
        result = await client.complete(TEXT, max_tokens=1, n=3, method="pearl")
        assert [choice.token_ids for choice in result.choices] == [(7,)] * 3
    assert set(indices) == {0, 1, 2}


async def test_a_text_for_which_there_is_no_place_waits_until_another_one_has_ended(cloud: Client) -> None:
    options: dict[str, Any] = SAMPLED | {"n": 2, "max_tokens": 12}
    plain = await cloud.complete(TEXT, **options, method="off")
    async with (
        running_verifier(max_num_sessions=1, model=other_target_model()) as small,
        running_edge(small.address, model=draft_model()) as edge,
        Client(edge.address) as client,
    ):
        here = await client.complete(TEXT, **options, method="speculative", resume=False)
        same_texts(here, plain)


async def test_a_cloud_that_stays_full_refuses_all_texts_in_its_own_words() -> None:
    async def collaborate(requests: Any, context: Any) -> None:
        if index_of((await anext(requests)).open):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "all sessions are in use")
        await context.write(started([5, 6]))
        await context.write(chunk(7))
        await asyncio.Event().wait()

    async with (
        serving(ScriptedCloud(collaborate)) as address,
        running_edge(address, model=draft_model(), resume_timeout_s=0.3) as edge,
        Client(edge.address) as client,
    ):
        with pytest.raises(ResourceExhausted, match="all sessions are in use"):
            await client.complete(TEXT, max_tokens=8, n=2, method="pearl", resume=False)
        assert await edge.is_idle()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["off", "best-first"])
async def test_a_verifier_that_dies_costs_none_of_the_texts(
    verifier: RunningVerifier, cloud: Client, method: str
) -> None:
    options: dict[str, Any] = SAMPLED | {"n": 3, "max_tokens": 120, "ignore_eos": True, "logprobs": 1}
    plain = await cloud.complete(TEXT, **options, method="off")
    async with (
        running_verifier(model=other_target_model()) as second,
        DelayProxy(verifier.address) as proxy,
        running_edge(proxy.address, second.address, model=draft_model()) as edge,
        Client(edge.address) as client,
    ):
        seen: set[int] = set()
        generation = client.generate(TEXT, **options, method=method, resume=False)
        async for piece in generation:
            if len(seen) < 3:
                seen.add(piece.index)
                if len(seen) == 3:  # all of them have begun, at one verifier
                    assert verifier.servicer.num_sessions == 3
                    await proxy.close()
        same_texts(generation.result, plain)
        assert await second.is_idle()
        assert await edge.is_idle()
