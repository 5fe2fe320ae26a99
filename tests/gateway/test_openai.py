"""OpenAI's own client, asynchronous and blocking, against a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from outrider_client.client import Client
from tests.support.gateways import RunningGateway, running_gateway
from tests.support.services import running_verifier

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

MODEL = "demo/target"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_verifier() as verifier, running_gateway(verifier.address) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{gateway.address}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_a_stream_is_the_text_of_the_verifier(gateway: RunningGateway, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        seed=7,
        max_completion_tokens=20,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    async with Client(gateway.gateway.settings.upstream) as direct:
        expected = await direct.complete([{"role": "user", "content": "hello"}], seed=7, max_tokens=20)
    assert text == expected.text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == expected.num_output_tokens
    assert (await client.models.list()).data[0].id == MODEL


async def test_a_prediction_is_counted_and_changes_nothing(client: openai.AsyncOpenAI) -> None:
    plain = await client.completions.create(model=MODEL, prompt="def add(a, b):\n", seed=3, max_tokens=40)
    told = await client.completions.create(
        model=MODEL,
        prompt="def add(a, b):\n",
        seed=3,
        max_tokens=40,
        extra_body={
            "prediction": {"type": "content", "content": plain.choices[0].text},
            "speculation": {"method": "retrieval"},
        },
    )
    assert told.choices[0].text == plain.choices[0].text
    assert told.usage is not None
    assert told.usage.completion_tokens_details is not None
    assert (told.usage.completion_tokens_details.accepted_prediction_tokens or 0) > 10


async def test_a_wrong_value_is_a_bad_request_with_the_verifiers_words(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as failed:
        await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], temperature=-1
        )
    assert failed.value.param == "temperature"
    assert "temperature must be finite and >= 0, got -1" in failed.value.message
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "hello"}])


async def test_the_blocking_client_works_too(gateway: RunningGateway) -> None:
    def ask() -> str | None:
        with openai.OpenAI(base_url=f"http://{gateway.address}/v1", api_key="none", max_retries=0) as client:
            answered = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=5, n=2, logprobs=True
            )
            assert len(answered.choices) == 2
            return answered.choices[0].message.content

    assert await asyncio.to_thread(ask)
