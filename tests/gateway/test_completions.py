"""Completions and chats over HTTP say what the verifier says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from outrider.core.reports import TokenLogprobs
from outrider_client.client import Client
from outrider_client.generation import Result
from outrider_gateway.logprobs import completion_logprobs
from tests.support.fake_verifier import FakeVerifier
from tests.support.gateways import RunningGateway, events_of, running_gateway
from tests.support.services import running_verifier

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "def add(a, b):\n"
HELLO = [{"role": "user", "content": "hello"}]
OPTIONS: dict[str, Any] = {"max_tokens": 12, "seed": 7}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_verifier() as verifier, running_gateway(verifier.address) as running:
        yield running


async def directly(gateway: RunningGateway, prompt: Any, **options: Any) -> Result:
    async with Client(gateway.gateway.settings.upstream) as client:
        return await client.complete(prompt, **options)


async def streamed(gateway: RunningGateway, path: str, **body: Any) -> list[dict[str, Any]]:
    response = await gateway.post(path, stream=True, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert (response.headers["cache-control"], response.headers["x-accel-buffering"]) == ("private, no-cache", "no")
    *events, done = events_of(response.text)
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


async def test_a_completion_is_the_text_of_the_verifier_whole_and_streamed(gateway: RunningGateway) -> None:
    expected = await directly(gateway, PROMPT, **OPTIONS)
    response = await gateway.post(COMPLETIONS, prompt=PROMPT, **OPTIONS)
    whole = response.json()
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason.value)
    assert whole["id"] == f"cmpl-{response.headers['x-request-id']}"
    assert whole["usage"] == {
        "prompt_tokens": expected.num_prompt_tokens,
        "completion_tokens": expected.num_output_tokens,
        "total_tokens": expected.num_prompt_tokens + expected.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert whole["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    events = await streamed(gateway, COMPLETIONS, prompt=PROMPT, **OPTIONS)
    assert text_of(events) == expected.text
    assert events[-1]["choices"][0]["finish_reason"] == expected.finish_reason.value
    assert not any("usage" in event for event in events)


async def test_a_chat_begins_with_the_role_and_ends_with_the_reason(gateway: RunningGateway) -> None:
    expected = await directly(gateway, HELLO, **OPTIONS)
    whole = (await gateway.post(CHAT, messages=HELLO, **OPTIONS)).json()
    message = whole["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", expected.text)
    events = await streamed(gateway, CHAT, messages=HELLO, **OPTIONS)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == expected.text
    assert events[-1]["choices"][0]["finish_reason"] == expected.finish_reason.value
    assert len({event["id"] for event in events}) == 1


async def test_usage_comes_last_without_choices_and_only_if_asked_for(gateway: RunningGateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = await streamed(gateway, CHAT, messages=HELLO, stream_options=options, **OPTIONS)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert "speculative_decoding" in last["metrics"]
    counts = [event["usage"]["completion_tokens"] for event in events if "usage" in event]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    for asked in ({}, {"stream_options": {"include_usage": True}}):
        events = await streamed(gateway, CHAT, messages=HELLO, **asked, **OPTIONS)
        assert not any("usage" in event for event in events if event["choices"])
        assert [event["choices"] for event in events].count([]) == len(asked)


async def test_several_prompts_and_texts_are_numbered_prompt_by_prompt(gateway: RunningGateway) -> None:
    prompts = [PROMPT, "class A", "import"]
    alone = [await directly(gateway, prompt, n=2, **OPTIONS) for prompt in prompts]
    expected = [choice.text for result in alone for choice in result.choices]
    whole = (await gateway.post(COMPLETIONS, prompt=prompts, n=2, **OPTIONS)).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert whole["usage"]["prompt_tokens"] == sum(result.num_prompt_tokens for result in alone)
    num_tokens = sum(choice.num_output_tokens for result in alone for choice in result.choices)
    assert whole["usage"]["completion_tokens"] == num_tokens
    events = await streamed(gateway, COMPLETIONS, prompt=prompts, n=2, **OPTIONS)
    assert [text_of(events, index) for index in range(6)] == expected
    ends = [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(ends) == list(range(6))


async def test_a_prompt_may_be_token_ids(gateway: RunningGateway) -> None:
    token_ids = (await gateway.post("/tokenize", prompt=PROMPT)).json()["tokens"]
    assert (await gateway.post("/detokenize", tokens=token_ids)).json() == {"prompt": PROMPT}
    both = (await gateway.post(COMPLETIONS, prompt=[token_ids, token_ids], **OPTIONS)).json()
    one = (await gateway.post(COMPLETIONS, prompt=token_ids, **OPTIONS)).json()
    plain = (await gateway.post(COMPLETIONS, prompt=PROMPT, **OPTIONS)).json()
    texts = [choice["text"] for answer in (both, one, plain) for choice in answer["choices"]]
    assert len(texts) == 4
    assert len(set(texts)) == 1


async def test_log_probabilities_and_offsets_are_parallel_to_the_text(gateway: RunningGateway) -> None:
    body = {"prompt": PROMPT, "logprobs": 2, "echo": True, "return_token_ids": True, **OPTIONS}
    (choice,) = (await gateway.post(COMPLETIONS, **body)).json()["choices"]
    told = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert len(told["tokens"]) == len(choice["prompt_token_ids"]) + len(choice["token_ids"])
    assert told["token_logprobs"][0] is None
    assert all(value <= 0 for value in told["token_logprobs"][1:])
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    pieces = await streamed(gateway, COMPLETIONS, **{**body, "echo": False, "return_token_ids": False})
    streamed_tokens = [token for event in pieces for each in event["choices"] if each["logprobs"]
                       for token in each["logprobs"]["tokens"]]  # fmt: skip
    assert streamed_tokens == told["tokens"][len(choice["prompt_token_ids"]) :]


async def test_parts_of_characters_have_log_probabilities_of_their_own(gateway: RunningGateway) -> None:
    body = {"prompt": "Crème brûlée 🍮 数字", "max_tokens": 1, "seed": 7, "echo": True, "logprobs": 5}
    told = (await gateway.post(COMPLETIONS, **body)).json()["choices"][0]["logprobs"]
    assert [token for token in told["tokens"] if token.startswith("bytes:\\x")]
    places = list(zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True))[1:]
    assert all(len(top) == 5 for _, _, top in places)
    assert all(top[token] == value for token, value, top in places if token in top)


async def test_tokens_that_are_written_alike_are_told_apart_by_their_ids() -> None:
    known = {1: b"a", 2: b"a", 3: b"", 4: b"", 5: b"\xf0\x9f", 6: b" \xf0"}
    told = TokenLogprobs(-1.0, 2, ((1, -0.5), (2, -1.0), (3, -2.0), (4, -3.0), (5, -4.0), (6, -5.0)))
    found = completion_logprobs([2], [told], [0], known, 6)
    top = {"token_id:1": -0.5, "a": -1.0, "": -2.0, "token_id:4": -3.0, "bytes:\\xf0\\x9f": -4.0, "bytes: \\xf0": -5.0}
    assert (found["tokens"], found["top_logprobs"]) == (["a"], [top])


@pytest.mark.parametrize("more", [{}, {"include_stop_str_in_output": True}, {"skip_special_tokens": False}])
async def test_a_stop_string_may_be_a_special_token_that_is_no_part_of_the_text(
    gateway: RunningGateway, more: dict[str, Any]
) -> None:
    end = "<|endoftext|>"
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "logit_bias": {"0": 100}, "ignore_eos": True, **more}
    for stop in (end, f"{end}{end}"):
        (choice,) = (await gateway.post(COMPLETIONS, **body, stop=[stop])).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert choice["text"] == (stop if "include_stop_str_in_output" in more else "")
    events = await streamed(gateway, COMPLETIONS, **body, stop=[end])
    assert events[-1]["choices"][0]["stop_reason"] == end
    # A stop string does not match a part of a special token's spelling.
    (choice,) = (await gateway.post(COMPLETIONS, **{**body, "skip_special_tokens": True}, stop=["text"])).json()[
        "choices"
    ]
    assert choice["finish_reason"] == "length"


async def test_an_echo_is_part_of_each_text_whole_and_streamed(gateway: RunningGateway) -> None:
    body = {"prompt": "def né", "logprobs": 1, "echo": True, "n": 2, "max_tokens": 3, "seed": 7}
    whole = (await gateway.post(COMPLETIONS, **body)).json()["choices"]
    events = await streamed(gateway, COMPLETIONS, **body)
    for choice in whole:
        assert choice["text"].startswith("def né")
        pieces = [each["logprobs"] for event in events for each in event["choices"] if each["index"] == choice["index"]]
        assert text_of(events, choice["index"]) == choice["text"]
        told = choice["logprobs"]
        assert len({len(each) for each in told.values()}) == 1
        joined = {name: [one for piece in pieces if piece for one in piece[name]] for name in told}
        assert (joined["tokens"], joined["text_offset"]) == (told["tokens"], told["text_offset"])
        assert joined["token_logprobs"] == pytest.approx(told["token_logprobs"], abs=1e-4)


async def test_a_prompt_alone_is_told_where_nothing_is_to_be_generated(gateway: RunningGateway) -> None:
    body = {"prompt": [PROMPT, "né"], "logprobs": 1, "echo": True, "seed": 7}
    longer = (await gateway.post(COMPLETIONS, **body, max_tokens=1)).json()["choices"]
    alone = (await gateway.post(COMPLETIONS, **body, max_tokens=0)).json()
    assert [choice["text"] for choice in alone["choices"]] == [PROMPT, "né"]
    assert alone["usage"]["completion_tokens"] == 0
    for choice, other in zip(alone["choices"], longer, strict=True):
        assert choice["finish_reason"] == "length"
        told = {name: values[:-1] for name, values in other["logprobs"].items()}
        assert (told["tokens"], told["text_offset"]) == (
            choice["logprobs"]["tokens"],
            choice["logprobs"]["text_offset"],
        )
        assert told["token_logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    events = await streamed(gateway, COMPLETIONS, **body, max_tokens=0)
    assert [text_of(events, index) for index in range(2)] == [PROMPT, "né"]
    assert (await gateway.post(COMPLETIONS, prompt=PROMPT, max_tokens=0)).status_code == 400


async def test_log_probabilities_of_a_chat_have_the_bytes_of_each_token(gateway: RunningGateway) -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 3, **OPTIONS}
    (choice,) = (await gateway.post(CHAT, **body)).json()["choices"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == choice["message"]["content"]
    assert all(len(each["top_logprobs"]) == 3 for each in content)
    events = await streamed(gateway, CHAT, **body)
    pieces = [each["logprobs"]["content"] for event in events for each in event["choices"] if each["logprobs"]]
    assert [item for piece in pieces for item in piece] == content


async def test_reports_of_speculation_tile_the_text(gateway: RunningGateway) -> None:
    speculation = {"method": "retrieval", "rows": "tree", "sources": ["recycled", "pool"]}
    body = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "speculation": speculation,
            "speculation_report": ["sources", "rounds", "trees"]}  # fmt: skip
    events = await streamed(gateway, COMPLETIONS, **body)
    told = [choice["speculation"] for event in events for choice in event["choices"] if "speculation" in choice]
    text, ends = text_of(events), [end for each in told for end in each["text_ends"]]
    assert ends == sorted(ends)
    assert ends[-1] == len(text)
    for each in told:
        tree, kept = each["tree"], each["round"]["num_accepted"]
        assert len(tree["parents"]) == len(tree["token_ids"]) == len(tree["texts"]) == len(tree["probabilities"])
        assert all(parent < node for node, parent in enumerate(tree["parents"]))
        parent = -1
        for token_id in each["token_ids"][:kept]:
            nodes = enumerate(zip(tree["parents"], tree["token_ids"], strict=True))
            (parent,) = (node for node, where in nodes if where == (parent, token_id))
    summary = events[-1]["speculation"]
    assert summary["num_accepted_tokens"] == sum(each["round"]["num_accepted"] for each in told) > 0
    sources = [source for each in told for source in each["sources"]]
    assert sum(summary["accepted_by_source"].values()) == sum(source != "target" for source in sources)
    assert events[-1]["timings"]["draft_n_accepted"] == summary["num_accepted_tokens"]
    whole = (await gateway.post(COMPLETIONS, **body)).json()
    assert whole["choices"][0]["speculation"]["text_ends"] == ends


async def test_a_schema_holds_the_text(gateway: RunningGateway) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["yes", "no"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    (choice,) = (await gateway.post(CHAT, messages=HELLO, response_format=format)).json()["choices"]
    assert json.loads(choice["message"]["content"])["a"] in ("yes", "no")
    assert choice["finish_reason"] == "stop"
    (chosen,) = (await gateway.post(COMPLETIONS, prompt="a", structured_outputs={"choice": ["x", "y"]})).json()[
        "choices"
    ]
    assert chosen["text"] in ("x", "y")


async def test_more_tokens_than_there_is_room_for_are_a_wish(gateway: RunningGateway) -> None:
    token_ids = [5] * 2040
    whole = (await gateway.post(COMPLETIONS, prompt=token_ids, max_tokens=5000, ignore_eos=True)).json()
    assert whole["usage"]["completion_tokens"] <= 8
    assert whole["choices"][0]["finish_reason"] == "length"
    full = await gateway.post(COMPLETIONS, prompt=[5] * 3000)
    assert (full.status_code, full.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_the_model_has_its_name_and_more(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier.address, served_model_name="mine,ours") as gateway:
        head = {"authorization": "Bearer"}
        listed = (await gateway.http.get("/v1/models", headers=head)).json()["data"]
        assert [each["id"] for each in listed] == ["fake", "mine", "ours"]
        assert listed[0]["max_model_len"] == 2048
        assert (await gateway.http.get("/v1/models/mine")).json()["id"] == "mine"
        assert (await gateway.http.get("/v1/models/other")).status_code == 404
        assert (await gateway.post(COMPLETIONS, prompt="a", model="ours")).json()["model"] == "ours"
        assert (await gateway.http.get("/health")).status_code == 200
        assert verifier.requests[-1].sampling.max_tokens == 16


async def test_a_path_is_known_by_its_last_part_too(verifier: FakeVerifier) -> None:
    verifier.model_id = "/models/of/mine/small"
    async with running_gateway(verifier.address) as gateway:
        listed = (await gateway.http.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == ["/models/of/mine/small"]
        for name in ("small", "/models/of/mine/small"):
            assert (await gateway.http.get(f"/v1/models/{name}")).json()["id"] == name
            assert (await gateway.post(COMPLETIONS, prompt="a", model=name)).json()["model"] == name
        assert (await gateway.post(COMPLETIONS, prompt="a", model="mine/small")).status_code == 404


async def test_the_reason_of_a_stop_is_what_the_request_has_named(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier.address) as gateway:
        for stop_token_ids, reason in (([0], 0), ([9], None), (None, None)):
            body = {"prompt": "a", "stop_token_ids": stop_token_ids}
            (choice,) = (await gateway.post(COMPLETIONS, **body)).json()["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
            assert (await streamed(gateway, COMPLETIONS, **body))[-1]["choices"][0]["stop_reason"] == reason


async def test_log_probabilities_of_the_prompt_are_those_of_the_verifier(gateway: RunningGateway) -> None:
    expected = await directly(gateway, PROMPT, prompt_logprobs=1, echo=True, **OPTIONS)
    body = {"prompt": PROMPT, "prompt_logprobs": 1, "return_token_ids": True, **OPTIONS}
    (choice,) = (await gateway.post(COMPLETIONS, **body)).json()["choices"]
    assert choice["prompt_token_ids"] == list(expected.prompt_token_ids)
    assert choice["token_ids"] == list(expected.token_ids)
    nothing, *told = choice["prompt_logprobs"]
    assert nothing is None
    for token_id, each, found in zip(expected.prompt_token_ids[1:], expected.prompt_logprobs, told, strict=True):
        assert found[str(token_id)]["logprob"] == each.logprob
        assert found[str(token_id)]["rank"] == each.rank
        assert str(each.top[0][0]) in found
    chat = (await gateway.post(CHAT, messages=HELLO, prompt_logprobs=0, **OPTIONS)).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


async def test_token_ids_come_with_the_pieces_that_they_are(gateway: RunningGateway) -> None:
    expected = await directly(gateway, HELLO, echo=True, **OPTIONS)
    events = await streamed(gateway, CHAT, messages=HELLO, return_token_ids=True, **OPTIONS)
    assert events[0]["prompt_token_ids"] == list(expected.prompt_token_ids)
    choices = [choice for event in events for choice in event["choices"]]
    assert [token_id for each in choices for token_id in each.get("token_ids", ())] == list(expected.token_ids)
    assert text_of(events) == expected.text


async def test_each_of_several_chats_ends_with_its_own_reason(gateway: RunningGateway) -> None:
    expected = await directly(gateway, HELLO, n=3, **OPTIONS)
    events = await streamed(gateway, CHAT, messages=HELLO, n=3, **OPTIONS)
    assert [text_of(events, index) for index in range(3)] == [choice.text for choice in expected.choices]
    ends = {
        each["index"]: each["finish_reason"] for event in events for each in event["choices"] if each["finish_reason"]
    }
    assert [ends[index] for index in range(3)] == [choice.finish_reason.value for choice in expected.choices]


async def test_the_echo_is_the_beginning_of_a_stream(gateway: RunningGateway) -> None:
    events = await streamed(gateway, COMPLETIONS, prompt=[PROMPT, "class A"], echo=True, **OPTIONS)
    alone = [await directly(gateway, prompt, **OPTIONS) for prompt in (PROMPT, "class A")]
    assert [text_of(events, index) for index in range(2)] == [PROMPT + alone[0].text, "class A" + alone[1].text]
