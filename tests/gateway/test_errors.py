"""Errors over HTTP: OpenAI's envelope for everything, the request's own names, a status that clients understand."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from outrider.v1.verifier_pb2 import GenerateRequest, GenerateResponse
from tests.support.fake_verifier import FakeVerifier, Script, chunk, started
from tests.support.gateways import RunningGateway, events_of, running_gateway
from tests.support.services import running_verifier

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def gateway(verifier: FakeVerifier) -> AsyncIterator[RunningGateway]:
    async with running_gateway(verifier.address) as running:
        yield running


def failing(code: grpc.StatusCode, *details: Any, after: int = 0) -> Script:
    """Refuses, or fails after some chunks."""

    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        if after:
            yield started()
        for _ in range(after):
            yield chunk(5, text="a")
        packed = []
        for detail in details:
            packed.append(Packed())
            packed[-1].Pack(detail)
        number = code_pb2.Code.Value(code.name)
        context.abort_with_status(rpc_status.to_status(status_pb2.Status(code=number, message="why", details=packed)))

    return script


@pytest.mark.parametrize(
    ("code", "status", "named"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_value"),
        (grpc.StatusCode.FAILED_PRECONDITION, 400, "failed_precondition"),
        (grpc.StatusCode.OUT_OF_RANGE, 400, "context_length_exceeded"),
        (grpc.StatusCode.UNAUTHENTICATED, 401, "invalid_api_key"),
        (grpc.StatusCode.PERMISSION_DENIED, 403, "permission_denied"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 504, "timeout"),
        (grpc.StatusCode.UNIMPLEMENTED, 501, "unimplemented"),
        (grpc.StatusCode.DATA_LOSS, 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_before_the_text_is_a_status_of_http(
    verifier: FakeVerifier, gateway: RunningGateway, code: grpc.StatusCode, status: int, named: str, stream: bool
) -> None:
    verifier.script = failing(code)
    response = await gateway.post(CHAT, messages=HELLO, stream=stream)
    assert response.status_code == status
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["message"], error["code"]) == ("why", named)


async def test_a_full_server_says_when_to_come_again(verifier: FakeVerifier, gateway: RunningGateway) -> None:
    wait = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=6, nanos=1))
    verifier.script = failing(grpc.StatusCode.RESOURCE_EXHAUSTED, wait)
    response = await gateway.post(CHAT, messages=HELLO)
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert response.json()["error"]["type"] == "rate_limit_error"


async def test_an_error_behind_the_first_text_is_an_event(verifier: FakeVerifier, gateway: RunningGateway) -> None:
    verifier.script = failing(grpc.StatusCode.DATA_LOSS, after=1)
    response = await gateway.post(CHAT, messages=HELLO, stream=True)
    assert response.status_code == 200
    *_, last, done = events_of(response.text)
    assert json.loads(last)["error"]["message"] == "why"
    assert done == "[DONE]"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real() -> AsyncIterator[RunningGateway]:
    async with running_verifier() as verifier, running_gateway(verifier.address) as running:
        yield running


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", "hot", "temperature"),
        ("temperature", -1, "temperature"),
        ("temperature", True, "temperature"),
        ("top_p", 2.0, "top_p"),
        ("max_tokens", True, "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("max_tokens", 2**40, "max_tokens"),
        ("max_completion_tokens", 0, "max_completion_tokens"),
        ("seed", -1, "seed"),
        ("n", 0, "n"),
        ("n", 1000, "n"),
        ("stop", ["x"] * 10_000, "stop"),
        ("stop", [""], "stop[0]"),
        ("logit_bias", {"a": 1}, "logit_bias"),
        ("logit_bias", {"5": "x"}, "logit_bias[5]"),
        ("top_logprobs", 3, "top_logprobs"),
        ("messages", [], "messages"),
        ("messages", [{"role": "user"}], "messages[0].content"),
        ("messages", [*HELLO, {"role": "user", "content": [{"type": "image_url"}]}], "messages[1].content[0].type"),
        ("tools", [{"type": "function", "function": {}}], "tools[0].function.name"),
        ("tool_choice", "required", "tool_choice"),
        ("response_format", {"type": "xml"}, "response_format.type"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}},
            "response_format.json_schema.schema",
        ),
        ("structured_outputs", {"regex": "("}, "structured_outputs.regex"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("stream_options", {"include_usages": True}, "stream_options.include_usages"),
        ("speculation", {"method": "hope"}, "speculation.method"),
        ("speculation", {"methud": "off"}, "speculation.methud"),
        ("speculation", {"method": "off", "retrieval": True}, "speculation.retrieval"),
        ("speculation", {"method": "auto", "retrieval_remote": True}, "speculation.retrieval_remote"),
        ("speculation", {"num_speculative_tokens": 10**6}, "speculation.num_speculative_tokens"),
        ("speculation_report", ["all"], "speculation_report[0]"),
        ("reasoning_effort", "high", "reasoning_effort"),
        ("best_of", 2, "best_of"),
        ("best_of", True, "best_of"),
        ("use_beam_search", 0, "use_beam_search"),
        ("tempurature", 1, "tempurature"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_wrong_field_is_named_as_the_request_has_it(
    real: RunningGateway, field: str, value: object, param: str
) -> None:
    response = await real.post(CHAT, **{"messages": HELLO, field: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "must be JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"temperature": NaN}', "expected value at line 1 column 17"),
        (b'{"prompt": "\xff"}', "invalid unicode code point"),
        (b'{"prompt": "\\ud800"}', "hex escape"),
        (b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "recursion limit"),
        (b'{"' + b"x" * 2000 + b'": 1}', "names of at most 1024 characters"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_that_is_no_json_is_told_so(real: RunningGateway, body: bytes, says: str) -> None:
    response = await real.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_an_infinite_number_is_none(real: RunningGateway) -> None:
    response = await real.http.post(
        "/v1/completions",
        content=b'{"prompt": "a", "temperature": 1e999}',
        headers={"content-type": "application/json"},
    )
    assert response.json()["error"]["param"] == "temperature"


@pytest.mark.asyncio(loop_scope="module")
async def test_an_unknown_path_and_a_wrong_method_have_the_envelope_too(real: RunningGateway) -> None:
    slip = await real.post("/chat/completions", messages=HELLO)
    assert slip.status_code == 404
    assert "did you mean /v1/chat/completions?" in slip.json()["error"]["message"]
    wrong = await real.http.get(CHAT)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/json; charset=utf-16",
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_page_may_send_without_asking_first_is_no_request(real: RunningGateway, kind: str | None) -> None:
    head = {} if kind is None else {"content-type": kind}
    response = await real.http.post("/v1/completions", content=b'{"prompt": "a"}', headers=head)
    assert response.status_code == 415
    assert "content-type must" in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=UTF-8", "Application/JSON", "application/vnd.x+json"])
@pytest.mark.asyncio(loop_scope="module")
async def test_json_is_taken_by_all_of_its_names(real: RunningGateway, kind: str) -> None:
    body = b'{"prompt": "a", "max_tokens": 1}'
    assert (await real.http.post("/v1/completions", content=body, headers={"content-type": kind})).status_code == 200


async def test_a_body_over_the_limit_is_413_before_it_is_read(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier.address, max_body_bytes=2000) as gateway:
        told = await gateway.post("/v1/completions", prompt="x" * 3000)

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(4):
                yield b" " * 1000

        head = {"content-type": "application/json"}
        untold = await gateway.http.post("/v1/completions", content=pieces(), headers=head)
    for response in (told, untold):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
    assert verifier.requests == []


async def test_a_call_that_needs_the_models_format_says_which_flag(gateway: RunningGateway) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    response = await gateway.post(CHAT, messages=HELLO, tools=[tool], tool_choice="required")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tool_choice"
    message = response.json()["error"]["message"]
    assert "--tool-call-format (or OUTRIDER_GATEWAY_TOOL_CALL_FORMAT) hermes" in message


async def test_calls_that_no_schema_can_hold_are_not_required(verifier: FakeVerifier, gateway: RunningGateway) -> None:
    verifier.chat_template = "{{ '<tool_call><function=' + name }}"
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    response = await gateway.post(CHAT, messages=HELLO, tools=[tool], tool_choice="required")
    message = response.json()["error"]["message"]
    assert message.startswith("tool_choice 'required' needs calls that a schema can hold")
    assert message.endswith("this model writes qwen3_coder")
