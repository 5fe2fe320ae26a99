"""Wherever a real verifier's generation is cut, its text is the same as in a single call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from outrider.v1 import verifier_pb2
from outrider_client import BlockingClient, Client, FinishReason
from outrider_client.generation import Chunk, Result
from outrider_client.requests import GenerateOptions
from tests.client.both_clients import PROMPT, complete
from tests.client.cutting_verifier import cutting
from tests.support.services import RunningVerifier, running_verifier


@pytest.fixture
async def real() -> AsyncIterator[RunningVerifier]:
    async with running_verifier() as running:
        yield running


async def hot_generation(
    real: RunningVerifier, is_good: Callable[[list[Chunk]], bool]
) -> tuple[GenerateOptions, list[Chunk], Result]:
    """So hot that the text is bytes rather than characters, and its chunks make a good test."""
    async with Client(real.address) as client:
        for seed in range(100):
            options = GenerateOptions(temperature=5.0, seed=seed, max_tokens=16, ignore_eos=True)
            generation = client.generate(PROMPT, **options)
            chunks = [piece async for piece in generation]
            if is_good(chunks):
                return options, chunks, generation.result
    raise AssertionError("no seed is good")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_wherever_a_call_is_cut_the_text_is_the_same(real: RunningVerifier, kind: str) -> None:
    options, chunks, whole = await hot_generation(real, lambda chunks: any(not piece.text for piece in chunks[:-1]))
    async with cutting(real.address) as front:
        for cut in range(1, len(chunks) + 2, 1 if kind == "asyncio" else 5):
            front.cut(cut)
            resumed = await complete(front.address, kind, **options)
            assert (resumed.text, resumed.token_ids) == (whole.text, whole.token_ids), cut
            assert resumed.finish_reason is FinishReason.LENGTH
            assert resumed.num_output_tokens == whole.num_output_tokens
            assert resumed.num_resumes == len(front.requests) - 1 == 1
    assert await real.is_idle()


async def test_the_rest_of_a_text_comes_once_however_often_its_end_is_cut(real: RunningVerifier) -> None:
    options, chunks, whole = await hot_generation(real, lambda chunks: not chunks[-1].token_ids)
    end = len(chunks)
    for cuts in (
        (end,),
        (end + 1,),
        (end + 1, 2),
        (end, 1),
        (3, end - 1),
    ):  # before the rest, after it, and after it again
        async with cutting(real.address, *cuts) as front:
            resumed = await complete(front.address, "asyncio", **options)
            assert (resumed.text, resumed.token_ids) == (whole.text, whole.token_ids), cuts


async def test_a_generation_that_was_cut_before_its_stop_token_still_stops_there(real: RunningVerifier) -> None:
    options = GenerateOptions(temperature=0.7, seed=5, max_tokens=60, ignore_eos=True)
    async with Client(real.address) as client:
        plain = await client.complete(PROMPT, **options)
        stop = next(token for token in plain.token_ids[10:] if token not in plain.token_ids[:10])
        options["stop_token_ids"] = [stop]
        whole = await client.complete(PROMPT, **options)
        # A caller that counted the stop token as output gets the same result.
        again = await client.complete(PROMPT, resume_token_ids=[*whole.token_ids, stop], **options)
    assert whole.stop_token_id == stop
    assert (again.token_ids, again.stop_token_id) == ((), stop)
    async with cutting(real.address, len(whole.token_ids) + 1) as front:
        resumed = await complete(front.address, "asyncio", **options)
    assert list(front.requests[1].resume_token_ids) == list(whole.token_ids)
    assert (resumed.token_ids, resumed.text, resumed.stop_token_id) == (whole.token_ids, whole.text, stop)
    assert (resumed.finish_reason, resumed.num_output_tokens) == (FinishReason.STOP, whole.num_output_tokens)


async def test_a_generation_without_a_seed_keeps_the_one_that_the_server_drew(real: RunningVerifier) -> None:
    options = GenerateOptions(temperature=1.0, max_tokens=30, ignore_eos=True)
    async with cutting(real.address, 1, 9, 5) as front:  # the first call gives only its seed
        resumed = await complete(front.address, "asyncio", **options)
    assert resumed.num_resumes == 3
    whole = await complete(real.address, "asyncio", **options, seed=resumed.seed)
    assert whole.token_ids == resumed.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_a_stopped_server_s_generations_go_on_at_its_replica(real: RunningVerifier, kind: str) -> None:
    options = GenerateOptions(temperature=0.7, seed=8, max_tokens=200, ignore_eos=True)
    whole = await complete(real.address, "asyncio", **options)
    async with running_verifier() as dying:
        addresses = [dying.address, real.address]
        if kind == "asyncio":
            async with Client(addresses) as client, client.generate(PROMPT, **options) as generation:
                await anext(generation)
                await dying.server.stop(0)
                async for _ in generation:
                    pass
                result = generation.result
        else:
            with BlockingClient(addresses) as blocking, blocking.generate(PROMPT, **options) as twin:
                await asyncio.to_thread(next, twin)
                await dying.server.stop(0)
                await asyncio.to_thread(list, twin)
                result = twin.result
    assert (result.token_ids, result.text, result.num_resumes) == (whole.token_ids, whole.text, 1)
    assert await real.is_idle()


async def test_as_many_resumed_tokens_as_there_may_be_end_at_once(real: RunningVerifier) -> None:
    async with Client(real.address) as client:
        whole = await client.complete(PROMPT, seed=3, max_tokens=16, ignore_eos=True)
        again = await client.complete(PROMPT, seed=3, max_tokens=16, ignore_eos=True, resume_token_ids=whole.token_ids)
    assert (again.token_ids, again.finish_reason) == ((), FinishReason.LENGTH)
    assert again.num_output_tokens == len(whole.token_ids)
    assert again.summary.num_rounds == 0
    assert isinstance(again.summary, verifier_pb2.SpeculationSummary)
    assert await real.is_idle()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_wherever_several_texts_are_cut_each_goes_on_from_what_it_had_come_to(
    real: RunningVerifier, kind: str
) -> None:
    options = GenerateOptions(
        temperature=0.9, seed=3, max_tokens=14, n=3, stop=["\n\n"], logprobs=1, prompt_logprobs=0, echo=True
    )
    async with Client(real.address) as client:
        generation = client.generate(PROMPT, **options)
        num_messages = len([piece async for piece in generation]) + 8  # Started and Finished of each, and the prompt
        whole = generation.result
    assert len({choice.text for choice in whole.choices}) == 3
    async with cutting(real.address) as front:
        for cut in range(1, num_messages, 3 if kind == "asyncio" else 11):
            front.cut(cut)
            resumed = await complete(front.address, kind, **options)
            for one, other in zip(resumed.choices, whole.choices, strict=True):
                for field in ("text", "token_ids", "finish_reason", "stop_string", "seed", "num_output_tokens"):
                    assert getattr(one, field) == getattr(other, field), (cut, field)
                assert [each.rank for each in one.logprobs] == [each.rank for each in other.logprobs], cut
            assert [each.rank for each in resumed.prompt_logprobs] == [each.rank for each in whole.prompt_logprobs]
            assert resumed.prompt_token_ids == whole.prompt_token_ids
    assert await real.is_idle()
