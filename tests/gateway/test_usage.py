"""Usage: the cached tokens of a prompt, by the name that each API has for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.gateways import RunningGateway, running_gateway
from tests.support.services import running_verifier

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 64
"""Tokens that are found together, or not."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_verifier() as verifier, running_gateway(verifier.address) as running:
        yield running


def text_for(path: str) -> str:
    """A long text that differs for each path, so that other requests do not matter."""
    return "\n".join(f"{path[4:]}_{number} = {number * number}" for number in range(60))


def of_openai(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def of_responses(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]


def of_anthropic(usage: dict[str, Any]) -> tuple[int, int]:
    counts = [usage[f"{name}input_tokens"] for name in ("cache_read_", "", "cache_creation_")]
    return counts[0], sum(counts)


@pytest.mark.parametrize(
    ("path", "name", "usage_of"),
    [
        ("/v1/completions", "prompt", of_openai),
        ("/v1/chat/completions", "messages", of_openai),
        ("/v1/responses", "input", of_responses),
        ("/v1/messages", "messages", of_anthropic),
    ],
)
async def test_the_second_request_with_a_prompt_tells_what_the_first_has_left(
    gateway: RunningGateway, path: str, name: str, usage_of: Any
) -> None:
    text: Any = text_for(path)
    body = {name: [{"role": "user", "content": text}] if name == "messages" else text, "max_tokens": 2}
    if path == "/v1/responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    first, second = [usage_of((await gateway.post(path, **body)).json()["usage"]) for _ in range(2)]
    assert first == (0, first[1])
    # All its whole blocks, without its last token, which is run for its logits.
    assert second == ((first[1] - 1) // BLOCK * BLOCK, first[1])
    assert second[0] >= 3 * BLOCK


async def test_several_texts_of_a_prompt_count_it_once(gateway: RunningGateway) -> None:
    body = {"prompt": text_for("/v1/several"), "max_tokens": 2, "n": 3}
    first, second = [(await gateway.post("/v1/completions", **body)).json()["usage"] for _ in range(2)]
    assert of_openai(first)[0] == 0, "one text finds what another has just read: the prompt was read once for all"
    assert 0 < of_openai(second)[0] < of_openai(second)[1]


async def test_llama_cpps_names_tell_read_and_cached_tokens_apart(gateway: RunningGateway) -> None:
    body = {"prompt": text_for("/v1/timings"), "max_tokens": 2, "timings_per_token": True}
    told = [(await gateway.post("/v1/completions", **body)).json() for _ in range(2)]
    for answer in told:
        timings = answer["timings"]
        assert (timings["cache_n"], timings["cache_n"] + timings["prompt_n"]) == of_openai(answer["usage"])
    assert told[1]["timings"]["cache_n"] > told[0]["timings"]["cache_n"]
