"""Texts of a model whose tokenizer strips the first space of everything it decodes: a text is what follows its
prompt."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from outrider_client.client import Client
from tests.support.gateways import RunningGateway, events_of, running_gateway
from tests.support.services import running_verifier
from tests.support.tokenizers import model_like_llama_2, sentencepiece_like

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RIVER = sentencepiece_like().convert_tokens_to_ids("\u2581river")
BODY: dict[str, Any] = {"prompt": "river", "max_tokens": 3, "temperature": 0, "logit_bias": {str(RIVER): 100}}
"""Makes the model say " river" three times."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_verifier(model=model_like_llama_2()) as real, running_gateway(real.address) as running:
        yield running


async def choice(gateway: RunningGateway, path: str, **body: Any) -> dict[str, Any]:
    """The only text of an answer, which is the same when it is streamed."""
    answered = await gateway.post(path, **body)
    assert answered.status_code == 200, answered.text
    (whole,) = answered.json()["choices"]
    *events, _ = events_of((await gateway.post(path, **body, stream=True)).text)
    pieces = [json.loads(event)["choices"][0] for event in events]
    if path == CHAT:
        assert "".join(piece["delta"].get("content", "") for piece in pieces) == whole["message"]["content"]
    else:
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert pieces[-1]["finish_reason"] == whole["finish_reason"]
    return dict(whole)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, " river river river"),
        ({"prompt": "river\n"}, " river river river"),  # the line break is a single byte
        ({"prompt": [1]}, "river river river"),  # no text precedes it
        ({"echo": True}, "river river river river"),
        ({"stop": [" river"]}, ""),
        ({"stop": ["r r"]}, " rive"),
        ({"logit_bias": {}, "structured_outputs": {"choice": [" river"]}, "max_tokens": 9}, " river"),
        ({"logit_bias": {}, "structured_outputs": {"regex": " (river|stone)\\."}, "max_tokens": 9}, None),
        ({"logit_bias": {}, "structured_outputs": {"choice": [" river"]}, "max_tokens": 9, "prompt": [1]}, " river"),
    ],
)
async def test_a_completion_begins_with_its_first_space(
    gateway: RunningGateway, more: dict[str, Any], text: str | None
) -> None:
    found = (await choice(gateway, COMPLETIONS, **{**BODY, **more}))["text"]
    assert found in ((" river.", " stone.") if text is None else (text,))


async def test_offsets_are_places_in_the_text_that_is_told(gateway: RunningGateway) -> None:
    for echo in (False, True):
        found = await choice(gateway, COMPLETIONS, **BODY, logprobs=0, echo=echo)
        told = found["logprobs"]
        ends = [*told["text_offset"][1:], len(found["text"])]
        texts = [found["text"][begin:end] for begin, end in zip(told["text_offset"], ends, strict=True)]
        assert texts[-3:] == [" river"] * 3
        assert "".join(texts) == found["text"]


async def test_a_chat_goes_on_where_its_last_message_ends(gateway: RunningGateway) -> None:
    fields = {name: BODY[name] for name in ("max_tokens", "temperature", "logit_bias")}
    messages = [{"role": "user", "content": "s"}, {"role": "assistant", "content": "river"}]
    continued = await choice(gateway, CHAT, messages=messages[:1], **fields)
    assert continued["message"]["content"] == " river river river"


async def test_a_generation_that_is_resumed_goes_on_with_its_space(gateway: RunningGateway) -> None:
    async with Client(gateway.gateway.settings.upstream) as client:
        for resumed in ([], [RIVER]):
            result = await client.complete(
                "river", max_tokens=3, temperature=0, logit_bias={RIVER: 100.0}, resume_token_ids=resumed
            )
            assert result.text == " river" * (3 - len(resumed))
