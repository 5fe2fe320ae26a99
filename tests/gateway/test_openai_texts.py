"""OpenAI's asynchronous Python client: all of its common calls, with real services behind the gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel, Field

from outrider_client.client import Client
from tests.support.gateways import RunningGateway, running_services

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

MODEL = "demo/target"
PROMPT = "def add(a, b):\n"
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
PEARL = {"speculation": {"method": "pearl"}}
CITY = {"type": "string", "enum": ["Rome", "Oslo"]}
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": CITY},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class Answer(BaseModel):
    """The text that the model is made to say."""

    verdict: Literal["yes", "no"]
    points: int = Field(ge=0, le=9)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_services() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{gateway.address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def direct(gateway: RunningGateway) -> AsyncIterator[Client]:
    async with Client(gateway.gateway.settings.upstream) as client:
        yield client


async def test_a_completion_drafted_by_a_speculator_is_the_text_without_one(
    client: openai.AsyncOpenAI, direct: Client
) -> None:
    expected = await direct.complete(PROMPT, method="off", seed=5, max_tokens=40)
    whole = await client.completions.create(model=MODEL, prompt=PROMPT, seed=5, max_tokens=40, extra_body=PEARL)
    assert whole.choices[0].text == expected.text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == expected.num_output_tokens
    assert whole.model_extra is not None
    assert whole.model_extra["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    stream = await client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        seed=5,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=PEARL,
    )
    *chunks, last = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert last.choices == []
    assert last.usage == whole.usage


async def test_every_sampling_parameter_of_the_client_reaches_the_verifier(
    client: openai.AsyncOpenAI, direct: Client
) -> None:
    given: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 9, "max_tokens": 30}
    given |= {"presence_penalty": 0.4, "frequency_penalty": 0.3}
    expected = await direct.complete(PROMPT, logit_bias={300: 2.0}, **given)
    told = await client.completions.create(model=MODEL, prompt=PROMPT, logit_bias={"300": 2}, **given)
    assert told.choices[0].text == expected.text
    more = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.2, "min_tokens": 5, "bad_words": ["return"]}
    expected = await direct.complete(PROMPT, **given, **more)
    told = await client.completions.create(model=MODEL, prompt=PROMPT, extra_body=more, **given)
    assert told.choices[0].text == expected.text


async def test_stop_strings_and_reasons(client: openai.AsyncOpenAI, direct: Client) -> None:
    text = (await direct.complete(PROMPT, seed=5, max_tokens=40)).text
    stop = text[12:15]
    told = await client.completions.create(
        model=MODEL, prompt=PROMPT, seed=5, max_tokens=40, stop=["not in it", stop], extra_body=PEARL
    )
    choice = told.choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    assert choice.model_extra is not None
    assert choice.model_extra["stop_reason"] == stop


async def test_log_probabilities_of_a_completion_and_of_a_chat(client: openai.AsyncOpenAI) -> None:
    completion = await client.completions.create(
        model=MODEL, prompt=PROMPT, seed=5, max_tokens=12, logprobs=3, extra_body=PEARL
    )
    told = completion.choices[0].logprobs
    assert told is not None
    assert "".join(told.tokens or []) == completion.choices[0].text
    assert [len(each) for each in told.top_logprobs or []] == [3] * 12
    chat = await client.chat.completions.create(
        model=MODEL, messages=HELLO, seed=5, max_tokens=12, logprobs=True, top_logprobs=2, extra_body=PEARL
    )
    said = chat.choices[0].logprobs
    assert said is not None
    assert said.content is not None
    joined = b"".join(bytes(token.bytes or []) for token in said.content)
    assert joined.decode() == chat.choices[0].message.content
    assert all(len(token.top_logprobs) == 2 for token in said.content)


async def test_several_texts_are_those_of_the_verifier(client: openai.AsyncOpenAI, direct: Client) -> None:
    expected = (await direct.complete(PROMPT, seed=5, max_tokens=10, n=3)).choices
    told = await client.completions.create(model=MODEL, prompt=PROMPT, seed=5, max_tokens=10, n=3, extra_body=PEARL)
    assert [choice.text for choice in told.choices] == [each.text for each in expected]
    assert len({choice.text for choice in told.choices}) == 3
    alone = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
    assert told.usage is not None
    assert alone.usage is not None
    assert (told.usage.prompt_tokens, told.usage.completion_tokens) == (alone.usage.prompt_tokens, 30)


async def test_a_schema_is_parsed_into_the_model_of_the_caller(client: openai.AsyncOpenAI) -> None:
    parsed = await client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Answer, seed=2, extra_body=PEARL
    )
    answer = parsed.choices[0].message.parsed
    assert isinstance(answer, Answer)
    assert json.loads(parsed.choices[0].message.content or "") == answer.model_dump()
    async with client.chat.completions.stream(
        model=MODEL, messages=HELLO, response_format=Answer, seed=2, extra_body=PEARL
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == answer


async def test_a_tool_that_must_be_called_is_called_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": [TOOL], "seed": 4, "extra_body": PEARL}
    given["parallel_tool_calls"] = False
    whole = await client.chat.completions.create(tool_choice="required", **given)
    assert whole.choices[0].finish_reason == "tool_calls"
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in CITY["enum"]
    async with client.chat.completions.stream(tool_choice="required", **given) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or []
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    assert final.choices[0].finish_reason == "tool_calls"
    assert streamed.function.parsed_arguments == json.loads(call.function.arguments)


async def test_a_named_tool_is_called_and_its_answer_goes_on_in_the_chat(client: openai.AsyncOpenAI) -> None:
    named = await client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        seed=4,
    )
    message = named.choices[0].message
    (call,) = message.tool_calls or []
    answered: ChatCompletionMessageParam = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    asked: Any = message.model_dump(exclude_none=True)
    told = await client.chat.completions.create(
        model=MODEL, messages=[*HELLO, asked, answered], tools=[TOOL], tool_choice="none", seed=4, max_tokens=8
    )
    assert told.choices[0].message.tool_calls is None
    alone = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
    assert told.usage is not None
    assert alone.usage is not None
    assert told.usage.prompt_tokens > alone.usage.prompt_tokens + 20


async def test_a_prediction_is_counted_and_changes_nothing(client: openai.AsyncOpenAI) -> None:
    plain = await client.completions.create(model=MODEL, prompt=PROMPT, seed=3, max_tokens=40)
    told = await client.completions.create(
        model=MODEL,
        prompt=PROMPT,
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


async def test_a_raw_response_has_the_id_of_the_session(client: openai.AsyncOpenAI) -> None:
    raw = await client.completions.with_raw_response.create(model=MODEL, prompt=PROMPT, max_tokens=2)
    assert raw.parse().id == f"cmpl-{raw.headers['x-request-id']}"
    assert raw.parse()._request_id == raw.headers["x-request-id"]


async def test_models_are_listed_and_told(client: openai.AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert await client.models.retrieve(model.id) == model
