"""OpenAI's Responses API: the text is the verifier's, and items, events and errors are as its clients expect them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from outrider.v1 import types_pb2
from outrider_client.client import Client
from tests.support.fake_verifier import FakeVerifier, breaking_off, saying, until_cancelled
from tests.support.gateways import CALL, ZONES, RunningGateway, named_events_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESPONSES = "/v1/responses"
NOW = {
    "type": "function",
    "name": "now",
    "parameters": ZONES,
}
OPTIONS: dict[str, Any] = {"max_output_tokens": 12, "seed": 7}


async def streamed(gateway: RunningGateway, **body: Any) -> list[dict[str, Any]]:
    response = await gateway.post(RESPONSES, stream=True, **body)
    assert response.status_code == 200, response.text
    events = named_events_of(response.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_chance(response: dict[str, Any]) -> dict[str, Any]:
    """A response without the fields that differ in each."""
    return {name: value for name, value in response.items() if name not in ("id", "created_at", "completed_at")}


async def test_a_response_is_the_text_of_the_verifier(gateway: RunningGateway) -> None:
    async with Client(gateway.gateway.settings.upstream) as client:
        expected = await client.complete([{"role": "user", "content": "hello"}], max_tokens=12, seed=7)
    answered = await gateway.post(RESPONSES, input="hello", **OPTIONS)
    whole = answered.json()
    assert whole["id"] == f"resp_{answered.headers['x-request-id']}"
    (item,) = whole["output"]
    assert item["content"] == [{"type": "output_text", "text": expected.text, "annotations": [], "logprobs": []}]
    assert (whole["status"], item["status"]) == ("incomplete", "incomplete")
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["usage"]["input_tokens"] == expected.num_prompt_tokens
    assert whole["usage"]["output_tokens"] == 12
    assert whole["usage"]["total_tokens"] == expected.num_prompt_tokens + 12
    assert "speculative_decoding" in whole["metrics"]
    *events, last = await streamed(gateway, input="hello", **OPTIONS)
    assert "".join(event["delta"] for event in events if "delta" in event) == expected.text
    assert last["type"] == "response.incomplete"
    assert last["response"]["output"][0]["content"] == item["content"]
    assert next(event for event in events if event["type"].endswith("item.done"))["item"]["status"] == "incomplete"


async def test_the_events_of_a_text_come_in_openais_order(verifier: FakeVerifier, scripted: RunningGateway) -> None:
    verifier.script = saying("a b", "", " c")
    events = await streamed(scripted, input="hello", metadata={"for": "a test"})
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["delta"] for event in events if "delta" in event] == ["a b", " c"]
    assert events[6]["text"] == events[7]["part"]["text"] == "a b c"
    assert {event["item_id"] for event in events if "item_id" in event} == {"msg_s-1_0"}
    assert [event["response"]["status"] for event in events[:2]] == ["in_progress", "in_progress"]
    last = events[-1]["response"]
    assert (last["status"], last["metadata"], last["store"]) == ("completed", {"for": "a test"}, False)
    whole = (await scripted.post(RESPONSES, input="hello", metadata={"for": "a test"})).json()
    assert without_chance(whole) == without_chance(last)


@pytest.mark.parametrize("size", [1, 5, 1000])
async def test_text_and_calls_are_items_in_their_order_however_they_come(
    verifier: FakeVerifier, scripted: RunningGateway, size: int
) -> None:
    text = f"Let me see.{CALL}{CALL}That was it."
    verifier.script = saying(*(text[start : start + size] for start in range(0, len(text), size)))
    *events, last = await streamed(scripted, input="hello", tools=[NOW])
    output = last["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call", "message"]
    assert [item["content"][0]["text"] for item in output if "content" in item] == ["Let me see.", "That was it."]
    calls = [item for item in output if item["type"] == "function_call"]
    assert all((call["name"], call["arguments"]) == ("now", '{"zone": "CET"}') for call in calls)
    assert len({call["call_id"] for call in calls}) == len({item["id"] for item in output}) - 2 == 2
    assert [event["item"] for event in events if event["type"].endswith("item.done")] == output
    of_first = [event["type"].removeprefix("response.") for event in events if event.get("output_index") == 1]
    num_deltas = len(of_first) - 3
    assert num_deltas >= (4 if size < 1000 else 1)
    names = [*["function_call_arguments.delta"] * num_deltas, "function_call_arguments.done"]
    assert of_first == ["output_item.added", *names, "output_item.done"]
    deltas = [event["delta"] for event in events if event.get("output_index") == 1 and "delta" in event]
    assert "".join(deltas) == '{"zone": "CET"}'


async def test_a_call_that_is_cut_off_is_an_incomplete_item(verifier: FakeVerifier, scripted: RunningGateway) -> None:
    verifier.script = saying('<tool_call>{"name": "now", "arguments": {"zo', 'ne": "C', is_cut=True)
    *events, last = await streamed(scripted, input="hello", tools=[NOW])
    whole = (await scripted.post(RESPONSES, input="hello", tools=[NOW])).json()
    for response in (last["response"], whole):
        (item,) = response["output"]
        assert (item["status"], item["arguments"]) == ("incomplete", '{"zone": "C')
        assert response["status"] == "incomplete"
    assert [event["delta"] for event in events if "delta" in event] == ['{"zo', 'ne": "C']


async def test_a_response_that_a_stop_string_ended_within_a_call_is_incomplete(
    verifier: FakeVerifier, scripted: RunningGateway
) -> None:
    verifier.script = saying('<tool_call>{"name": "now", "arguments": {"zone": "C', stop_string="E")
    events = await streamed(scripted, input="hello", tools=[NOW], stop=["E"])
    whole = (await scripted.post(RESPONSES, input="hello", tools=[NOW], stop=["E"])).json()
    assert events[-1]["type"] == "response.incomplete"
    for response in (events[-1]["response"], whole):
        assert [item["status"] for item in response["output"]] == ["incomplete"]
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "stop"})


async def test_a_text_of_no_tokens_is_an_empty_message(verifier: FakeVerifier, scripted: RunningGateway) -> None:
    verifier.script = saying()
    whole = (await scripted.post(RESPONSES, input="hello")).json()
    assert [item["content"][0]["text"] for item in whole["output"]] == [""]


async def test_items_of_the_input_become_a_chat(verifier: FakeVerifier, scripted: RunningGateway) -> None:
    answered = (await scripted.post(RESPONSES, input="hello", tools=[NOW])).json()["output"]
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "What "}, {"type": "input_text", "text": "time?"}]},
        *answered,
        {"type": "function_call", "call_id": "c-1", "name": "now", "arguments": '{"zone": "CET"}', "status": None},
        {"type": "function_call", "call_id": "c-2", "name": "now", "arguments": '{"zone": "UTC"}'},
        {"type": "function_call_output", "call_id": "c-1", "output": "12:00"},
        {"type": "function_call_output", "call_id": "c-2", "output": [{"type": "input_text", "text": "11:00"}]},
    ]
    response = await scripted.post(RESPONSES, input=items, instructions="You are a clock.", tools=[NOW])
    assert response.status_code == 200, response.text
    said = verifier.requests[-1].prompt.chat.messages
    assert [(message.role, message.content) for message in said] == [
        ("system", "You are a clock."),
        ("developer", "Be brief."),
        ("user", "What time?"),
        ("assistant", "a b c d"),
        ("tool", "12:00"),
        ("tool", "11:00"),
    ]
    assert [(call.id, call.arguments) for call in said[3].tool_calls] == [
        ("c-1", '{"zone": "CET"}'),
        ("c-2", '{"zone": "UTC"}'),
    ]
    assert [message.tool_call_id for message in said[4:]] == ["c-1", "c-2"]


async def test_parameters_reach_the_verifier_by_their_other_names(
    verifier: FakeVerifier, scripted: RunningGateway
) -> None:
    schema = {"type": "object"}
    response = await scripted.post(
        RESPONSES,
        input="hello",
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.25,
        seed=3,
        stop="x",
        speculation={"method": "pearl"},
        text={"format": {"type": "json_schema", "name": "any", "schema": schema, "strict": True}},
    )
    assert response.status_code == 200, response.text
    asked = verifier.requests[-1]
    sampling = asked.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (9, 0.5, 0.25, 3)
    assert list(asked.sampling.stop) == ["x"]
    assert asked.speculation.method == types_pb2.METHOD_PEARL
    assert json.loads(asked.structured_outputs.json) == schema
    assert response.json()["text"]["format"]["name"] == "any"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "", "content": "b"}]}, "input[1].role"),
        ({"input": [{"role": "user", "content": "a", "mood": "bad"}]}, "input[0].mood"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[]"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"n": 2}, "n"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 50}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [NOW, {"type": "function"}]}, "tools[1].name"),
        ({"tools": [{**NOW, "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{**NOW, "parameters": {"type": "strange"}, "strict": True}]}, "tools[0].parameters"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "then"}}, "tool_choice.name"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "b"}}}}, "text.format.schema"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_an_error_names_the_field_as_the_caller_wrote_it(
    gateway: RunningGateway, body: dict[str, Any], param: str
) -> None:
    response = await gateway.post(RESPONSES, **{"input": "hello", "max_output_tokens": 5, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]


async def test_a_prediction_is_counted_and_changes_nothing(gateway: RunningGateway) -> None:
    plain = (await gateway.post(RESPONSES, input="hello", **{**OPTIONS, "max_output_tokens": 30})).json()
    text = plain["output"][0]["content"][0]["text"]
    more = {"prediction": {"type": "content", "content": text}, "speculation": {"method": "retrieval"}}
    told = (await gateway.post(RESPONSES, input="hello", **{**OPTIONS, "max_output_tokens": 30}, **more)).json()
    assert told["output"][0]["content"][0]["text"] == text
    assert told["usage"]["output_tokens_details"]["accepted_prediction_tokens"] > 5


async def test_logprobs_stand_beside_the_pieces_and_the_text(gateway: RunningGateway) -> None:
    asked = {"input": "hello", "include": ["message.output_text.logprobs"], "top_logprobs": 2, **OPTIONS}
    (item,) = (await gateway.post(RESPONSES, **asked)).json()["output"]
    told = item["content"][0]["logprobs"]
    assert len(told) == 12
    assert all(each["logprob"] <= 0 and len(each["top_logprobs"]) == 2 for each in told)
    assert b"".join(bytes(each["bytes"]) for each in told).decode() == item["content"][0]["text"]
    events = await streamed(gateway, **asked)
    assert [one for event in events if "delta" in event for one in event["logprobs"]] == told


async def test_an_error_behind_the_first_text_is_told_and_fails_the_response(
    verifier: FakeVerifier, scripted: RunningGateway
) -> None:
    verifier.script = breaking_off
    *_, error, last = await streamed(scripted, input="hello")
    assert (error["type"], error["message"], error["code"]) == ("error", "why", "internal_error")
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "why"}


async def test_a_client_that_goes_ends_the_generation(verifier: FakeVerifier, scripted: RunningGateway) -> None:
    verifier.script = until_cancelled(verifier)
    async with scripted.http.stream("POST", RESPONSES, json={"input": "hello", "stream": True}) as response:
        async for line in response.aiter_lines():
            if "output_text.delta" in line:
                break
        assert not verifier.ended.is_set()
    assert await asyncio.to_thread(verifier.ended.wait, 10)


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{gateway.address}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_openais_client_reads_responses_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "demo/target", "input": "hello", "max_output_tokens": 12, "extra_body": {"seed": 7}}
    whole = await client.responses.create(**options)
    assert whole.output_text
    pieces = [event async for event in await client.responses.create(stream=True, **options)]
    assert "".join(event.delta for event in pieces if event.type == "response.output_text.delta") == whole.output_text
    options["extra_body"]["stop"] = [whole.output_text[-3:]]
    async with client.responses.stream(**options) as stream:
        snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert final.output_text == snapshots[-1] == whole.output_text[:-3]
    assert final.usage is not None
    with pytest.raises(openai.BadRequestError, match="nothing is stored here"):
        await client.responses.create(previous_response_id="resp_1", **options)


async def test_openais_client_has_its_tools_called_and_answers_them(client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "demo/target", "tools": [NOW], "extra_body": {"seed": 7}, "max_output_tokens": 200}
    options["parallel_tool_calls"] = False
    first = await client.responses.create(input="What time is it?", tool_choice="required", **options)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert call.name == "now"
    assert json.loads(call.arguments)["zone"] in ("CET", "UTC")
    counted = await client.responses.input_tokens.count(model="demo/target", input="What time is it?", tools=[NOW])
    assert first.usage is not None
    assert counted.input_tokens == first.usage.input_tokens
    async with client.responses.stream(input="What time is it?", tool_choice="required", **options) as stream:
        names = {event.type async for event in stream}
        final = await stream.get_final_response()
    assert "response.function_call_arguments.delta" in names
    assert [item.arguments for item in final.output if item.type == "function_call"] == [call.arguments]
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
    items: list[Any] = [{"role": "user", "content": "What time is it?"}, *first.output, answer]
    second = await client.responses.create(input=items, tool_choice="none", **{**options, "max_output_tokens": 8})
    assert second.output[0].type == "message"


class Person(BaseModel):
    """The model that a structured text is parsed into."""

    name: str
    is_old: bool


async def test_openais_client_parses_a_schema(client: openai.AsyncOpenAI) -> None:
    parsed = await client.responses.parse(
        model="demo/target", input="Who?", text_format=Person, max_output_tokens=200, extra_body={"seed": 7}
    )
    assert isinstance(parsed.output_parsed, Person)
