"""A gateway's promises under every way to draft: each test shows that drafts do not change them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from outrider.core.methods import METHODS
from outrider.models.loading import build_hf_model
from outrider.security.credentials import credential_book
from outrider.security.gate import Gate
from outrider_cli.local.stack import LocalStack
from outrider_cli.prompts import load_prompts
from outrider_client.client import Client
from tests.support.certificates import credentials_file, entry
from tests.support.gateways import RunningGateway, events_of, running_gateway
from tests.support.services import running_verifier
from tests.support.variants import VARIANTS, options_of
from tests.support.waiting import until

pytestmark = [pytest.mark.suite, pytest.mark.timeout(300)]

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
PROMPT = load_prompts("demo")[0].text
OPTIONS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 16, "seed": 3, "ignore_eos": True}
PENALTIES: dict[str, Any] = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.3}
CONTEXT = 2048
"""The target's context, in tokens."""
LONG = 1500
"""Length of a text, in tokens, that no test waits for."""

WITHOUT_PREDICTION = {
    "off": "which looks nothing up, got 4 characters",
    "spacelike": "which looks into what was generated before and nowhere else, got 4 characters",
}
"""Why a method takes no prediction."""
METHODS = VARIANTS[: len(METHODS)]
every_method = pytest.mark.parametrize("variant", METHODS)
Plain = Callable[..., Awaitable[dict[str, Any]]]

every_variant = pytest.mark.parametrize("variant", VARIANTS)


async def answer(http: httpx.AsyncClient, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, Any]]:
    """Answers without drafts, by request: one is enough for all variants."""
    return {}


@pytest.fixture
def plain(http: httpx.AsyncClient, known: dict[str, dict[str, Any]]) -> Plain:
    async def asked(path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
        key = json.dumps([path, body])
        if key not in known:
            known[key] = await answer(http, path, **body, speculation={"method": "off"})
        return known[key]

    return asked


async def choices(http: httpx.AsyncClient, variant: str, **body: Any) -> list[dict[str, Any]]:
    asked = {**OPTIONS, "return_token_ids": True, "speculation": options_of(variant), **body}
    return list((await answer(http, **asked))["choices"])


# Penalties and biases: a row sees exactly the committed tokens and its own path.


def penalised_argmax(row: torch.Tensor, prompt: Sequence[int], output: Sequence[int], bias: dict[int, float]) -> int:
    """The most probable token after a text, by the definition of vLLM's penalties."""
    row = row.clone()
    for token_id, each in bias.items():
        row[token_id] += each
    for token_id in {*prompt, *output}:
        count = output.count(token_id)
        row[token_id] *= 1 / PENALTIES["repetition_penalty"] if row[token_id] > 0 else PENALTIES["repetition_penalty"]
        row[token_id] -= PENALTIES["frequency_penalty"] * count + PENALTIES["presence_penalty"] * (count > 0)
    return int(row.argmax())


@pytest.fixture(scope="module")
def target() -> Any:
    model, _ = build_hf_model("demo/target", "float32")
    return model


@every_variant
async def test_penalties_and_biases_are_those_of_the_text_before_each_token(
    http: httpx.AsyncClient, plain: Plain, target: Any, variant: str
) -> None:
    asked = {"temperature": 0, "max_tokens": 24}
    (without,) = (await plain(**{**OPTIONS, **asked}, return_token_ids=True))["choices"]
    # A token that occurs without its bias, and one that does not.
    bias = {without["token_ids"][0]: -5.0, 7: 3.0}
    more = {"logit_bias": {str(token_id): each for token_id, each in bias.items()}, **PENALTIES}
    (told,) = await choices(http, variant, **asked, **more)
    prompt, output = told["prompt_token_ids"], told["token_ids"]
    with torch.inference_mode():
        rows = target(torch.tensor([[*prompt, *output]])).logits[0][len(prompt) - 1 : -1]
    assert output == [penalised_argmax(row, prompt, output[:index], bias) for index, row in enumerate(rows)]
    assert output != without["token_ids"]
    # Drawn texts depend at once on what a row knows of its path: a token that was just said is twice as likely.
    drawn = {"temperature": 1.0, "max_tokens": 48, "presence_penalty": -1.5, "frequency_penalty": -0.5}
    (expected,) = (await plain(**{**OPTIONS, **drawn}, return_token_ids=True))["choices"]
    (told,) = await choices(http, variant, **drawn)
    assert told["token_ids"] == expected["token_ids"]


# Usage.


@every_method
async def test_usage_comes_last_and_only_where_it_is_asked_for(http: httpx.AsyncClient, variant: str) -> None:
    body = {**OPTIONS, "stream": True, "speculation": options_of(variant), "return_token_ids": True}
    options = (None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True})
    told = [
        events_of((await http.post(COMPLETIONS, json={**body, "stream_options": each})).text)[:-1] for each in options
    ]
    without, with_usage, always = ([json.loads(event) for event in events] for events in told)
    assert all(event["choices"] and "usage" not in event for event in (*without, *with_usage[:-1]))
    last = with_usage[-1]
    num_prompt = len(with_usage[0]["choices"][0]["prompt_token_ids"])
    assert last["choices"] == []
    assert last["usage"].items() >= {"prompt_tokens": num_prompt, "completion_tokens": 16}.items()
    assert last["usage"]["total_tokens"] == num_prompt + 16
    assert "completion_tokens_details" not in last["usage"], "nothing was predicted"
    num_so_far = 0
    for event in always[:-2]:
        num_so_far += len(event["choices"][0].get("token_ids") or ())
        if "usage" in event:
            assert event["usage"]["completion_tokens"] == num_so_far
    assert num_so_far == 16
    counted = last["metrics"]["speculative_decoding"]
    histogram = counted["acceptance_histogram"]
    assert sum(histogram) == counted["num_spec_steps"]
    kept = sum(number * rounds for number, rounds in enumerate(histogram))
    assert kept == counted["num_accepted_draft_tokens"] <= counted["num_draft_tokens"]
    assert kept < 16
    assert (counted["num_draft_tokens"] == 0) or variant != "off"


@pytest.mark.parametrize("variant", [variant for variant in METHODS if variant not in WITHOUT_PREDICTION])
async def test_a_prediction_is_counted_and_changes_no_text(http: httpx.AsyncClient, plain: Plain, variant: str) -> None:
    text = (await plain(**OPTIONS))["choices"][0]["text"]
    # The prediction is looked up like retrieved tokens.
    speculation = {**options_of(variant), "retrieval": True}
    told = await answer(http, **OPTIONS, speculation=speculation, prediction={"type": "content", "content": text})
    assert told["choices"][0]["text"] == text
    counts = told["usage"]["completion_tokens_details"]
    assert 0 <= counts["accepted_prediction_tokens"] <= 16
    assert sum(counts.values()) >= 16


@pytest.mark.parametrize("variant", WITHOUT_PREDICTION)
async def test_a_prediction_is_refused_by_name_where_nothing_could_look_into_it(
    http: httpx.AsyncClient, variant: str
) -> None:
    asked = {**OPTIONS, "speculation": options_of(variant), "prediction": {"type": "content", "content": "text"}}
    response = await http.post(COMPLETIONS, json=asked)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "prediction", "invalid_value")
    assert error["message"] == f"prediction must be empty with method {variant}, {WITHOUT_PREDICTION[variant]}"


# Cancellation.


async def counted(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    (value,) = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")]
    return float(value)


@pytest.mark.parametrize("stream", [True, False])
@every_method
async def test_a_client_that_goes_ends_the_work(
    http: httpx.AsyncClient, client: Client, variant: str, stream: bool
) -> None:
    output, disconnects = 'outrider_gateway_tokens_total{kind="output"}', "outrider_gateway_client_disconnects_total"
    before = [await counted(http, name) for name in (output, disconnects)]
    body = {**OPTIONS, "max_tokens": LONG, "stream": stream, "speculation": options_of(variant)}

    async def is_at_work() -> bool:
        return (await client.info()).num_sessions > 0

    async def is_over() -> bool:
        return await counted(http, disconnects) > before[1] and not await is_at_work()

    if stream:
        async with http.stream("POST", COMPLETIONS, json=body) as response:
            async for _ in response.aiter_lines():
                break
    else:
        asking = asyncio.create_task(http.post(COMPLETIONS, json=body))
        await until(is_at_work)
        asking.cancel()
    await until(is_over)
    assert await counted(http, output) < before[0] + LONG


# Errors.


@pytest.mark.parametrize("stream", [True, False])
@every_method
async def test_what_is_wrong_with_a_request_is_told_before_an_answer_begins(
    http: httpx.AsyncClient, variant: str, stream: bool
) -> None:
    options = options_of(variant)
    wrong: list[tuple[dict[str, Any], str | None, str]] = [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"speculation": {**options, "max_rows": -1}}, "speculation.max_rows", "invalid_value"),
        ({"surprise": 1}, "surprise", "unsupported_parameter"),
        ({"prompt": [5] * (CONTEXT + 1)}, None, "context_length_exceeded"),
    ]
    for body, param, code in wrong:
        asked = {**OPTIONS, "stream": stream, "speculation": options, **body}
        response = await http.post(COMPLETIONS, json=asked)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error"), error
        assert error["code"] == code
        assert param is None or error["param"] == param
    response = await http.post(COMPLETIONS, json={**OPTIONS, "model": "none", "speculation": options})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


# The rest.


@every_variant
async def test_several_texts_of_a_prompt_differ_and_are_counted_together(
    http: httpx.AsyncClient, plain: Plain, variant: str
) -> None:
    body = {**OPTIONS, "n": 2, "return_token_ids": True}
    expected = await plain(**body)
    told = await answer(http, **body, speculation=options_of(variant))
    assert [each["token_ids"] for each in told["choices"]] == [each["token_ids"] for each in expected["choices"]]
    assert told["choices"][0]["token_ids"] != told["choices"][1]["token_ids"]
    assert (
        told["usage"].items()
        >= {
            "prompt_tokens": len(told["choices"][0]["prompt_token_ids"]),
            "completion_tokens": 32,
        }.items()
    )
    (alone,) = (await plain(**OPTIONS, return_token_ids=True))["choices"]
    assert alone["token_ids"] == told["choices"][0]["token_ids"]


@every_method
async def test_more_tokens_than_there_is_room_for_are_cut_to_the_room(http: httpx.AsyncClient, variant: str) -> None:
    prompt = [5 + index % 50 for index in range(CONTEXT - 12)]
    told = await answer(
        http, **{**OPTIONS, "prompt": prompt, "max_tokens": 10**6}, speculation=options_of(variant), temperature=0
    )
    assert told["choices"][0]["finish_reason"] == "length"
    assert told["usage"]["total_tokens"] == CONTEXT


@every_method
async def test_every_form_of_a_chat_has_the_same_text(http: httpx.AsyncClient, plain: Plain, variant: str) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    common = {"seed": 3, "ignore_eos": True, "speculation": options_of(variant)}
    chat = await http.post(CHAT, json={"messages": messages, "max_tokens": 16, **common})
    response = await answer(http, RESPONSES, input=messages, max_output_tokens=16, **common)
    message = await answer(http, MESSAGES, messages=messages, max_tokens=16, **common)
    alone = await plain(CHAT, messages=messages, max_tokens=16, seed=3, ignore_eos=True)
    expected = alone["choices"][0]["message"]["content"]
    assert chat.json()["choices"][0]["message"]["content"] == expected
    assert response["output"][0]["content"][0]["text"] == expected
    assert message["content"] == [{"type": "text", "text": expected}]
    # A request is named by its session.
    assert chat.json()["id"] == f"chatcmpl-{chat.headers['x-request-id']}"


@pytest.fixture
async def guarded(stack: LocalStack, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway without a token, for a verifier that requires credentials; the stack's other services draft for it."""
    assert stack.speculator is not None
    assert stack.datastore is not None
    entries = [entry(f"{name}-t0ken", "generate", tenant=name, requests_per_minute=1) for name in ("one", "other")]
    file = credentials_file(tmp_path / "credentials", *entries)
    gate = Gate(credential_book(str(file), has_client_certificates=False), "outrider.v1.VerifierService")
    peers = {"speculator": stack.speculator.address, "datastore": stack.datastore.address}
    async with (
        running_verifier(**peers, interceptors=[gate]) as verifier,
        running_gateway(verifier.address) as gateway,
    ):
        yield gateway


@every_method
async def test_the_token_of_a_caller_goes_on_so_that_its_tenants_quota_holds(
    guarded: RunningGateway, plain: Plain, variant: str
) -> None:
    async def asked(**headers: str) -> httpx.Response:
        body = {**OPTIONS, "temperature": 1, "speculation": options_of(variant)}
        return await guarded.http.post(COMPLETIONS, json=body, headers=headers)

    assert (await asked()).status_code == 401
    assert (await asked(authorization="Bearer wr0ng")).status_code == 401
    # Only one of the two verifiers has the defaults of the model's folder.
    text = (await plain(**OPTIONS, temperature=1))["choices"][0]["text"]
    # By OpenAI's header and by Anthropic's.
    for tenant, headers in (("one", {"authorization": "Bearer one-t0ken"}), ("other", {"x-api-key": "other-t0ken"})):
        told = await asked(**headers)
        assert told.json()["choices"][0]["text"] == text
        refused = await asked(**headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        told_limit = f"the limit requests_per_minute of tenant '{tenant}' is reached: 1"
        assert refused.json()["error"]["message"] == told_limit
        assert 1 <= int(refused.headers["retry-after"]) <= 60
