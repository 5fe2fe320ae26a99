"""A lenient gateway ignores fields without effect, says so, and refuses those that would change the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.chat_templates import HERMES, model_with_template
from tests.support.gateways import RunningGateway, running_gateway
from tests.support.services import running_verifier

pytestmark = pytest.mark.asyncio(loop_scope="module")

Field = dict[str, Any]
COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = {"role": "user", "content": "hello"}
SAID = {"role": "assistant", "content": "Hi", "reasoning_content": "Hm.", "annotations": ["a"]}
ANSWERED = [HELLO, {"role": "assistant", "content": "Hi"}, HELLO]
GOOD: dict[str, Field] = {
    COMPLETIONS: {"prompt": "hello", "max_tokens": 4, "temperature": 0},
    CHAT: {"messages": [HELLO], "max_tokens": 4, "temperature": 0},
    RESPONSES: {"input": "hello", "max_output_tokens": 4, "temperature": 0},
    MESSAGES: {"messages": [HELLO], "max_tokens": 4, "temperature": 0},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lenient() -> AsyncIterator[RunningGateway]:
    async with (
        running_verifier(model=model_with_template(HERMES)) as real,
        running_gateway(real.address, lenient=True) as running,
    ):
        yield running


def said(answer: dict[str, Any]) -> Any:
    """The text of an answer, in whatever format."""
    return answer.get("choices") or answer.get("output", [{}])[0].get("content") or answer["content"]


@pytest.mark.parametrize(
    ("path", "more", "names"),
    [
        (COMPLETIONS, {"seed": -1, "cache_prompt": True}, "seed, cache_prompt"),
        (COMPLETIONS, {"some_sampler": 0.5, "Ein Name": 1}, "some_sampler, other"),
        (CHAT, {"reasoning_effort": "high", "verbosity": "low"}, "reasoning_effort, verbosity"),
        (CHAT, {"thinking": {"type": "adaptive"}, "priority": 3}, "thinking, priority"),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        (RESPONSES, {"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}}, "reasoning, text.verbosity"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (MESSAGES, {"output_config": {"effort": "high"}}, "output_config.effort"),
    ],
)
async def test_what_has_no_effect_is_left_aside_and_named(
    lenient: RunningGateway, path: str, more: Field, names: str
) -> None:
    plain, answered = await lenient.post(path, **GOOD[path]), await lenient.post(path, **GOOD[path], **more)
    assert answered.status_code == 200, answered.text
    assert said(answered.json()) == said(plain.json())
    assert answered.headers["x-outrider-left-aside"] == names
    assert "x-outrider-left-aside" not in plain.headers
    metrics = (await lenient.http.get("/metrics")).text
    first = names.partition(",")[0].removesuffix(".enable_thinking").replace("some_sampler", "other")
    assert f'outrider_gateway_left_aside_total{{parameter="{first}"}}' in metrics


async def test_what_another_server_thought_is_left_out_of_a_chat(lenient: RunningGateway) -> None:
    options = {"max_tokens": 4, "temperature": 0}
    plain = await lenient.post(CHAT, messages=ANSWERED, **options)
    answered = await lenient.post(CHAT, messages=[HELLO, SAID, HELLO], **options)
    assert said(answered.json()) == said(plain.json())
    assert answered.headers["x-outrider-left-aside"] == "messages.annotations, messages.reasoning_content"


@pytest.mark.parametrize(("path", "stop"), [(COMPLETIONS, "stop"), (CHAT, "stop"), (MESSAGES, "stop_sequences")])
async def test_max_tokens_of_minus_one_is_as_many_as_there_is_room_for(
    lenient: RunningGateway, path: str, stop: str
) -> None:
    # Longer than any default; after that any letter ends it.
    more = {"max_tokens": -1, "min_tokens": 40, "temperature": 1, "seed": 7, stop: [" ", "\n", "e", "a", "o", "t"]}
    answered = await lenient.post(path, **{**GOOD[path], **more})
    assert answered.status_code == 200, answered.text
    usage = answered.json()["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) >= 40


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"temprature": 1}, "temprature"),
        (COMPLETIONS, {"grammar": "root ::= 'a'"}, "grammar"),
        (COMPLETIONS, {"seed": -2}, "seed"),
        (COMPLETIONS, {"tools": []}, "tools"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"chat_template": "{{ messages }}"}, "chat_template"),
        (RESPONSES, {"previous_response_id": "r"}, "previous_response_id"),
        (MESSAGES, {"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ],
)
async def test_what_would_change_the_answer_stays_an_error(
    lenient: RunningGateway, path: str, more: Field, field: str
) -> None:
    response = await lenient.post(path, **GOOD[path], **more)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].startswith(f"{field} ")


async def test_the_best_of_as_many_texts_as_are_asked_for_are_all(gateway: RunningGateway) -> None:
    answered = await gateway.post(COMPLETIONS, **GOOD[COMPLETIONS], n=2, best_of=2)
    assert len(answered.json()["choices"]) == 2
    assert (await gateway.post(COMPLETIONS, **GOOD[COMPLETIONS], n=2, best_of=3)).status_code == 400
