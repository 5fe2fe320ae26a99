"""For any JSON in any field, the answer is valid HTTP, with the envelope if it is an error, and never an error of
ours."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider_gateway.dialects.chat import ChatParameters
from outrider_gateway.dialects.completions import CompletionParameters
from outrider_gateway.dialects.messages import MessageChat, MessageParameters
from outrider_gateway.dialects.responses import ResponseParameters
from outrider_gateway.models import DetokenizeParameters, TokenizeParameters
from tests.support.gateways import RunningGateway, running_gateway
from tests.support.services import running_verifier

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATHS = {
    "/v1/chat/completions": (ChatParameters, {**CHAT, "max_tokens": 2}),
    "/v1/responses": (ResponseParameters, {"input": "hi", "max_output_tokens": 2}),
    "/v1/responses/input_tokens": (ResponseParameters, {"input": "hi"}),
    "/v1/messages": (MessageParameters, {**CHAT, "max_tokens": 2}),
    "/v1/messages/count_tokens": (MessageChat, CHAT),
    "/v1/completions": (CompletionParameters, {"prompt": "hi", "max_tokens": 2}),
    "/tokenize": (TokenizeParameters, {"prompt": "hi"}),
    "/detokenize": (DetokenizeParameters, {"tokens": [5]}),
}
KEYS = st.sampled_from(
    ["type", "function", "name", "parameters", "json", "regex", "schema", "json_schema", "role", "content", "text",
     "method", "card", "include_usage", "5", "tools", "strict", "", "input", "input_schema", "id", "call_id", "output",
     "arguments", "tool_use_id", "format"]
)  # fmt: skip
WORDS = st.sampled_from(
    ["", "a", "function", "text", "json_schema", "object", "user", "auto", "required", "off", "\0", "é", "assistant",
     "message", "function_call", "function_call_output", "input_text", "tool_use", "tool_result", "any"]
)  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))


SHAPES = (
    "%s",
    '[{"a": %s}]',
    '{"type": "json_schema", "json_schema": %s}',
    '{"format": {"type": "json_schema", "schema": {"const": %s}}}',
    '[{"type": "function", "name": "a", "parameters": {"const": %s}}]',
    '[{"name": "a", "input_schema": {"const": %s}}]',
    '[{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {"a": %s}}]}]',
)
"""Values that contain another value."""


def nested(depth: int) -> str:
    return "[" * depth + "1" + "]" * depth


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_verifier() as verifier, running_gateway(verifier.address) as running:
        yield running


@settings(max_examples=400)
@given(st.data())
async def test_no_value_of_a_field_is_an_error_of_ours(gateway: RunningGateway, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(PATHS)))
    kind, good = PATHS[path]
    fields = data.draw(st.lists(st.sampled_from(sorted(kind.model_fields)), min_size=1, max_size=2))
    await answered(gateway, path, {**good, **{field: data.draw(JSON) for field in fields}})


@settings(max_examples=1)
@given(st.sampled_from(["temperature"]))
@example("tools")
@example("messages")
@example("metadata")
@example("chat_template_kwargs")
@example("response_format")
@example("input")
@example("system")
@example("text")
@example("tool_choice")
@example("output_config")
async def test_what_is_nested_deeply_is_no_error_of_ours(gateway: RunningGateway, field: str) -> None:
    for path in (path for path, (kind, _) in PATHS.items() if field in {*kind.model_fields, "metadata"}):
        for depth in (100, 400, 900, 960, 985):
            for value in SHAPES:
                await answered(gateway, path, {**PATHS[path][1], field: json.loads(value % nested(depth))})


async def answered(gateway: RunningGateway, path: str, body: dict[str, object]) -> None:
    response = await gateway.post(path, **body)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        assert error["type"] in ("invalid_request_error", "not_found_error")
