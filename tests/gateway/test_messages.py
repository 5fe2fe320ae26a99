"""Anthropic's Messages API: the text is the verifier's; blocks, events and errors are as its clients expect them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic_core import from_json

from outrider_client.client import Client
from outrider_gateway import streams
from tests.support.fake_verifier import FakeVerifier, breaking_off, saying, until_cancelled
from tests.support.gateways import CALL, ZONES, RunningGateway, named_events_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = {"role": "user", "content": "hello"}
NOW = {
    "name": "now",
    "input_schema": ZONES,
}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://a.example"}}
NOTHING_CACHED = {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
OPTIONS: dict[str, Any] = {"max_tokens": 12, "seed": 7}


async def streamed(gateway: RunningGateway, **body: Any) -> list[dict[str, Any]]:
    response = await gateway.post(MESSAGES, stream=True, max_tokens=body.pop("max_tokens", 50), **body)
    assert response.status_code == 200, response.text
    return named_events_of(response.text)


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a client assembles from events."""
    content: list[dict[str, Any]] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(content)
                content.append(
                    {**event["content_block"], **({"input": ""} if "input" in event["content_block"] else {})}
                )
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                content[event["index"]]["text"] += event["delta"]["text"]
            case "content_block_delta":
                content[event["index"]]["input"] += event["delta"]["partial_json"]
            case "content_block_stop":
                assert event["index"] == len(content) - 1
                if "input" in content[-1]:
                    # As Anthropic's own client does it.
                    content[-1]["input"] = from_json(content[-1]["input"], allow_partial=True)
    return content


async def test_a_message_is_the_text_of_the_verifier(gateway: RunningGateway) -> None:
    chat = [{"role": "system", "content": "Be brief."}, HELLO]
    async with Client(gateway.gateway.settings.upstream) as client:
        expected = await client.complete(chat, max_tokens=12, seed=7)
    asked = {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}], **OPTIONS}
    answered = await gateway.post(MESSAGES, messages=[HELLO], **asked)
    whole = answered.json()
    assert whole.pop("metrics").keys() == {"speculative_decoding"}
    assert whole == {
        "id": f"msg_{answered.headers['x-request-id']}",
        "type": "message",
        "role": "assistant",
        "model": "demo/target",
        "content": [{"type": "text", "text": expected.text}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {"input_tokens": expected.num_prompt_tokens, "output_tokens": 12, **NOTHING_CACHED},
    }
    assert answered.headers["request-id"] == answered.headers["x-request-id"]
    assert assembled(await streamed(gateway, messages=[HELLO], **asked)) == whole["content"]
    count = await gateway.post(COUNT, messages=[HELLO], system="Be brief.")
    assert count.json() == {"input_tokens": expected.num_prompt_tokens}


async def test_the_events_of_a_text_come_in_anthropics_order(verifier: FakeVerifier, scripted: RunningGateway) -> None:
    verifier.script = saying("a b", "", " c")
    start, *events = await streamed(scripted, messages=[HELLO])
    assert start["type"] == "message_start"
    assert (start["message"]["content"], start["message"]["stop_reason"]) == ([], None)
    assert start["message"]["usage"] == {"input_tokens": 3, "output_tokens": 0}
    assert events[-2].pop("metrics")
    assert events == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a b"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": " c"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"input_tokens": 3, "output_tokens": 3, **NOTHING_CACHED},
        },
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize("size", [1, 5, 1000])
async def test_text_and_calls_are_blocks_in_their_order_however_they_come(
    verifier: FakeVerifier, scripted: RunningGateway, size: int
) -> None:
    text = f"Let me see.{CALL}That was it."
    verifier.script = saying(*(text[start : start + size] for start in range(0, len(text), size)))
    whole = (await scripted.post(MESSAGES, messages=[HELLO], tools=[NOW], max_tokens=50)).json()
    events = await streamed(scripted, messages=[HELLO], tools=[NOW])
    for content in (whole["content"], assembled(events)):
        assert content[1].pop("id").startswith("call_")
        assert content == [
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "name": "now", "input": {"zone": "CET"}},
            {"type": "text", "text": "That was it."},
        ]
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_the_input_of_a_call_comes_as_it_is_written(verifier: FakeVerifier, scripted: RunningGateway) -> None:
    verifier.script = saying('<tool_call>{"name": "now", "arguments": {', '"zone": "C', 'ET"}', "}</tool_call>")
    _, begun, *events = await streamed(scripted, messages=[HELLO], tools=[NOW])
    assert (begun["content_block"]["name"], begun["content_block"]["input"]) == ("now", {})
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert pieces == ["{", '"zone": "C', 'ET"}']


@pytest.mark.parametrize(
    ("arguments", "told"),
    [('{"zone": "CET", "day": "Mon', {"zone": "CET"}), ("{", {}), ('{"zone": "\\ud83d", "day": 1', {})],
)
async def test_a_call_that_is_cut_off_is_a_block_with_what_can_be_read_of_it(
    verifier: FakeVerifier, scripted: RunningGateway, arguments: str, told: dict[str, Any]
) -> None:
    verifier.script = saying('<tool_call>{"name": "now", "arguments": ', arguments, is_cut=True)
    whole = (await scripted.post(MESSAGES, messages=[HELLO], tools=[NOW], max_tokens=2)).json()
    assert [(block["type"], block["name"], block["input"]) for block in whole["content"]] == [("tool_use", "now", told)]
    assert whole["stop_reason"] == "max_tokens"


async def test_a_stop_sequence_within_a_call_is_the_reason_of_the_end(
    verifier: FakeVerifier, scripted: RunningGateway
) -> None:
    verifier.script = saying('<tool_call>{"name": "now", "arguments": {"zone": "C', stop_string="E")
    whole = (await scripted.post(MESSAGES, messages=[HELLO], tools=[NOW], max_tokens=9, stop_sequences=["E"])).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "E")


async def test_half_of_a_surrogate_pair_in_an_argument_is_told_as_a_question_mark(
    verifier: FakeVerifier, scripted: RunningGateway
) -> None:
    verifier.script = saying('<tool_call>{"name": "now", "arguments": {"zone": "\\ud83d"}}</tool_call>')
    whole = (await scripted.post(MESSAGES, messages=[HELLO], tools=[NOW], max_tokens=2)).json()
    assert whole["content"][0]["input"] == {"zone": "?"}


async def test_the_reason_of_the_end_is_told(gateway: RunningGateway) -> None:
    text = (await gateway.post(MESSAGES, messages=[HELLO], **OPTIONS)).json()["content"][0]["text"]
    cut = (await gateway.post(MESSAGES, messages=[HELLO], stop_sequences=[text[-3:], "zzz"], **OPTIONS)).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", text[-3:])
    assert cut["content"][0]["text"] == text[:-3]


async def test_the_end_of_the_context_is_told_apart_from_max_tokens(
    verifier: FakeVerifier, scripted: RunningGateway
) -> None:
    verifier.script = saying("a", "b", is_cut=True)
    for max_tokens, reason in ((2, "max_tokens"), (3, "model_context_window_exceeded")):
        whole = (await scripted.post(MESSAGES, messages=[HELLO], max_tokens=max_tokens)).json()
        assert whole["stop_reason"] == reason


async def test_blocks_become_a_chat(verifier: FakeVerifier, scripted: RunningGateway) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "time?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "c-1", "name": "now", "input": {"zone": "CET"}},
                {"type": "tool_use", "id": "c-2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c-1", "content": "12:00", "cache_control": None},
                {"type": "tool_result", "tool_use_id": "c-2", "content": [{"type": "text", "text": "no zone"}],
                 "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]  # fmt: skip
    response = await scripted.post(
        MESSAGES, messages=messages, system="You are a clock.", tools=[NOW], max_tokens=5, metadata={"user_id": "me"}
    )
    assert response.status_code == 200, response.text
    chat = verifier.requests[-1].prompt.chat
    assert [(message.role, message.content) for message in chat.messages] == [
        ("system", "You are a clock."),
        ("user", "What time?"),
        ("assistant", "Let me see."),
        ("tool", "12:00"),
        ("tool", "Error: no zone"),
        ("user", "And?"),
    ]
    assert [(call.id, json.loads(call.arguments)) for call in chat.messages[2].tool_calls] == [
        ("c-1", {"zone": "CET"}),
        ("c-2", {}),
    ]
    assert [message.tool_call_id for message in chat.messages[3:]] == ["c-1", "c-2", ""]
    assert json.loads(chat.tools[0].parameters) == NOW["input_schema"]
    assert not chat.continue_final_message


async def test_parameters_reach_the_verifier_by_their_other_names(
    verifier: FakeVerifier, scripted: RunningGateway
) -> None:
    schema = {"type": "object"}
    response = await scripted.post(
        MESSAGES,
        messages=[HELLO],
        max_tokens=9,
        stop_sequences=["x"],
        temperature=0.5,
        top_k=3,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert response.status_code == 200, response.text
    sampling = verifier.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (9, 0.5, 3)
    assert list(sampling.stop) == ["x"]
    assert json.loads(verifier.requests[-1].structured_outputs.json) == schema


async def test_an_answer_goes_on_with_what_is_put_into_its_mouth(gateway: RunningGateway) -> None:
    begun = [HELLO, {"role": "assistant", "content": "The answer is"}]
    async with Client(gateway.gateway.settings.upstream) as client:
        expected = await client.complete(begun, max_tokens=12, seed=7, continue_final_message=True)
    whole = (await gateway.post(MESSAGES, messages=begun, **OPTIONS)).json()
    assert whole["content"] == [{"type": "text", "text": expected.text}]


@pytest.mark.parametrize("kind", ["auto", "any", "tool", "none"])
async def test_a_choice_of_tools_is_kept(gateway: RunningGateway, kind: str) -> None:
    choice: dict[str, Any] = {"type": kind, **({"name": "now"} if kind == "tool" else {})}
    if kind in ("any", "tool"):
        choice["disable_parallel_tool_use"] = True
    asked = {"messages": [HELLO], "tools": [NOW], "tool_choice": choice, "seed": 7}
    whole = (
        await gateway.post(MESSAGES, **asked, max_tokens=200 if "disable_parallel_tool_use" in choice else 8)
    ).json()
    if kind in ("any", "tool"):
        assert whole["stop_reason"] == "tool_use"
        (block,) = [block for block in whole["content"] if block["type"] == "tool_use"]
        assert (block["name"], block["input"]["zone"] in ("CET", "UTC")) == ("now", True)
    counts = [(await gateway.post(COUNT, messages=[HELLO], **more)).json() for more in ({}, {"tools": [NOW]})]
    assert counts[0] != counts[1]
    usage = whole["usage"]
    num_input_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert num_input_tokens == counts[kind != "none"]["input_tokens"]


def of_one_block(role: str, **block: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [HELLO, {"role": "tool", "content": "a"}]}, "messages[1].role"),
        ({"messages": [HELLO, {"role": "user", "content": [IMAGE]}]}, "messages[1].content[0].type"),
        (of_one_block("user", type="text"), "messages[0].content[0].text"),
        (of_one_block("user", type="text", text="a", mood="bad"), "messages[0].content[0].mood"),
        (of_one_block("user", type="tool_result"), "messages[0].content[0].tool_use_id"),
        (of_one_block("user", type="tool_result", tool_use_id="1", content=[IMAGE]),
         "messages[0].content[0].content[0].type"),
        (of_one_block("user", type="tool_use", id="1", name="now", input={}), "messages[0].content[0].type"),
        (of_one_block("assistant", type="thinking", thinking="hm"), "messages[0].content[0].type"),
        (of_one_block("assistant", type="tool_use", id="1", name="", input={}), "messages[0].content[0].name"),
        (of_one_block("assistant", type="tool_use", id="1", name="a", input=[]), "messages[0].content[0].input"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": 5}, "system"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop": ["a"]}, "stop"),
        ({"temperature": -1}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "a"}}}},
         "output_config.format.schema"),
        ({"container": "c"}, "container"),
        ({"tools": [{"type": "web_search_20250305", "name": "a"}]}, "tools[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [NOW, {"input_schema": {}}]}, "tools[1].name"),
        ({"tools": [{**NOW, "input_schema": {"type": "a"}, "strict": True}]}, "tools[0].input_schema"),
        ({"tools": [NOW], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tools": [NOW], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [NOW], "tool_choice": {"type": "tool", "name": "then"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_names_the_field_as_the_caller_wrote_it(
    gateway: RunningGateway, body: dict[str, Any], named: str, stream: bool
) -> None:
    response = await gateway.post(MESSAGES, **{"messages": [HELLO], "max_tokens": 5, "stream": stream, **body})
    assert response.status_code == 400, response.text
    told = response.json()
    assert told["error"]["type"] == "invalid_request_error"
    assert told["error"]["message"].startswith(f"{named} ")
    assert told["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]


async def test_one_call_at_a_time_needs_to_know_how_calls_are_written(scripted: RunningGateway) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    response = await scripted.post(MESSAGES, messages=[HELLO], tools=[NOW], tool_choice=choice, max_tokens=5)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith("tool_choice.disable_parallel_tool_use needs to know how this model writes calls")
    assert "--tool-call-format" in message


async def test_every_error_has_anthropics_envelope(scripted: RunningGateway) -> None:
    for method, path, status, kind in (
        ("GET", MESSAGES, 405, "invalid_request_error"),
        ("GET", f"{MESSAGES}/batches", 404, "not_found_error"),
        ("POST", MESSAGES, 400, "invalid_request_error"),
        ("POST", COUNT, 400, "invalid_request_error"),
    ):
        head, body = {"content-type": "application/json"}, b"{" if method == "POST" else None
        response = await scripted.http.request(method, path, content=body, headers=head)
        assert response.status_code == status
        told = response.json()
        assert (told["type"], told["error"]["type"]) == ("error", kind)
    unknown = await scripted.post(COUNT, model="claude", messages=[HELLO])
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    body = {"messages": [HELLO], "max_tokens": 5}
    refused = await scripted.http.post(MESSAGES, json=body, headers={"authorization": "Basic abc"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


async def test_an_error_behind_the_first_text_is_an_event(verifier: FakeVerifier, scripted: RunningGateway) -> None:
    verifier.script = breaking_off
    *_, last = await streamed(scripted, messages=[HELLO])
    assert last == {"type": "error", "error": {"type": "api_error", "message": "why"}, "request_id": "s-1"}


async def test_silence_is_filled_with_pings_until_the_client_goes(
    verifier: FakeVerifier, scripted: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PING_S", 0.0)
    monkeypatch.setattr(streams, "TICK_S", 0.01)
    verifier.script = until_cancelled(verifier)
    body = {"messages": [HELLO], "max_tokens": 5, "stream": True}
    async with scripted.http.stream("POST", MESSAGES, json=body) as response:
        async for line in response.aiter_lines():
            if line == 'data: {"type":"ping"}':
                break
            assert line != ": ping"
        assert not verifier.ended.is_set()
    assert await asyncio.to_thread(verifier.ended.wait, 10)


@pytest.mark.slow
async def test_anthropics_client_reads_messages_whole_and_streamed(gateway: RunningGateway) -> None:
    anthropic = pytest.importorskip("anthropic")
    options: Any = {"model": "demo/target", "messages": [HELLO], "max_tokens": 12, "extra_body": {"seed": 7}}
    async with anthropic.AsyncAnthropic(base_url=f"http://{gateway.address}", api_key="none", max_retries=0) as client:
        whole = await client.messages.create(**options)
        async with client.messages.stream(**options) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == whole.content[0].text == final.content[0].text
        assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 12)
        options |= {
            "tools": [NOW],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "max_tokens": 200,
        }
        called = await client.messages.create(**options)
        async with client.messages.stream(**options) as stream:
            final = await stream.get_final_message()
        (block,) = called.content
        assert block.input["zone"] in ("CET", "UTC")
        assert [each.input for each in final.content] == [block.input]
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "12:00"}
        turns = [HELLO, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        assert (await client.messages.create(**{**options, "messages": turns})).stop_reason == "tool_use"
        counted = await client.messages.count_tokens(model="demo/target", messages=[HELLO], tools=[NOW])
        assert counted.input_tokens == called.usage.input_tokens + called.usage.cache_read_input_tokens
        with pytest.raises(anthropic.BadRequestError, match="what a model thinks is part of its text"):
            await client.messages.create(**options, thinking={"type": "enabled", "budget_tokens": 2048})
