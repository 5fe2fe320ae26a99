"""Fields that clients always send and that have no effect here: each is accepted, and the text is as without it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gateways import RunningGateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

Field = dict[str, Any]
COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = {"role": "user", "content": "hello"}
GOOD: dict[str, Field] = {
    COMPLETIONS: {"prompt": "hello", "max_tokens": 4, "seed": 7},
    CHAT: {"messages": [HELLO], "max_tokens": 4, "seed": 7},
    RESPONSES: {"input": "hello", "max_output_tokens": 4, "seed": 7},
    MESSAGES: {"messages": [HELLO], "max_tokens": 4, "seed": 7},
}
NOTE = {"cache_control": {"type": "ephemeral"}}
PARTS = [{"type": "text", "text": "hello", **NOTE}]

EVERYWHERE: list[Field] = [
    {"user": "me", "metadata": {"for": "a test"}, "store": True, "service_tier": "auto"},
    {"safety_identifier": "me", "prompt_cache_key": "k", "prompt_cache_retention": "24h", "request_id": "r"},
]
OF_CHATS: list[Field] = [
    {"parallel_tool_calls": True},
    {"parallel_tool_calls": False, "tools": []},
    {"tool_choice": "auto"},
    {"tool_choice": "none", "tools": []},
]
HARMLESS: dict[str, list[Field]] = {
    COMPLETIONS: [
        {"best_of": 1, "suffix": None, "echo": False, "logprobs": None, "logit_bias": {}, "stop": []},
        {"use_beam_search": False, "frequency_penalty": None, "nonsense": None},
        {"top_k": -1, "repetition_penalty": 1.0},
    ],
    CHAT: [
        *OF_CHATS,
        {"functions": [], "function_call": "none"},
        {"reasoning_effort": "none", "verbosity": "medium", "modalities": ["text"], "thinking": {"type": "disabled"}},
        {"logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}, "audio": None},
        {"messages": [{**HELLO, **NOTE}]},
        {"messages": [{"role": "user", "content": PARTS}]},
    ],
    RESPONSES: [
        *OF_CHATS,
        {"reasoning": {}},
        {"reasoning": {"effort": None, "summary": None}},
        {"reasoning": {"effort": "none", "summary": "auto"}},
        {"include": ["reasoning.encrypted_content"], "top_logprobs": 0, "max_tool_calls": 5},
        {"previous_response_id": None, "conversation": None, "truncation": "disabled", "background": False},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "stream_options": {"include_obfuscation": False}},
        {"context_management": [], "client_metadata": {"a": "b"}},
    ],
    MESSAGES: [
        {"thinking": None},
        {"thinking": {"type": "disabled", "display": None}},
        {"tool_choice": {"type": "auto"}, "tools": []},
        {"tool_choice": {"type": "none"}},
        {"metadata": {"user_id": "me"}, "service_tier": "standard_only", "inference_geo": "us", **NOTE},
        {"mcp_servers": [], "betas": [], "container": None, "context_management": {"edits": []}},
        {"output_config": {"effort": None, "format": None}, "stop_sequences": [], "speed": "standard"},
        {"messages": [{"role": "user", "content": PARTS}]},
    ],
}


async def text_of(gateway: RunningGateway, path: str, body: Field) -> Any:
    response = await gateway.post(path, **body)
    assert response.status_code == 200, response.text
    told = response.json()
    match path:
        case "/v1/completions":
            return told["choices"][0]["text"]
        case "/v1/chat/completions":
            return told["choices"][0]["message"]["content"]
        case "/v1/responses":
            return told["output"][0]["content"][0]["text"]
    return told["content"][0]["text"]


@pytest.mark.parametrize(
    ("path", "more"), [(path, more) for path in HARMLESS for more in (*EVERYWHERE, *HARMLESS[path])]
)
async def test_a_field_that_asks_for_nothing_changes_nothing(gateway: RunningGateway, path: str, more: Field) -> None:
    assert await text_of(gateway, path, GOOD[path] | more) == await text_of(gateway, path, GOOD[path])


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        (RESPONSES, {"reasoning": {"effort": "high", "summary": None}}, "reasoning"),
        (RESPONSES, {"reasoning": {"summary": "auto"}}, "reasoning"),
        (CHAT, {"verbosity": "high"}, "verbosity"),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, "thinking"),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        (MESSAGES, {"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ],
)
async def test_the_same_field_is_an_error_where_it_asks_for_something(
    gateway: RunningGateway, path: str, more: Field, field: str
) -> None:
    response = await gateway.post(path, **GOOD[path], **more)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].startswith(f"{field} ")


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_developer_speaks_as_the_system_does(gateway: RunningGateway, path: str) -> None:
    name, length = ("input", "max_output_tokens") if path == RESPONSES else ("messages", "max_tokens")
    texts = [
        await text_of(gateway, path, GOOD[path] | {length: 16, name: [{"role": role, "content": "Be brief."}, HELLO]})
        for role in ("developer", "system", "user")
    ]
    assert texts[0] == texts[1] != texts[2]
