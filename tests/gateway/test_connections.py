"""Clients that go, read slowly or never finish a request: their work ends, and nobody else's does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from outrider.v1.verifier_pb2 import GenerateRequest, GenerateResponse
from outrider_gateway import bodies, connections, run, streams
from outrider_gateway.intake import Intake
from tests.support.fake_verifier import FakeVerifier, chunk, finished, saying, started, until_cancelled
from tests.support.gateways import RunningGateway, events_of, running_gateway
from tests.support.waiting import until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def test_a_flood_of_bad_requests_is_a_line_a_minute() -> None:
    now = 1000.0
    handler = run.TroubleLog(lambda: now)
    bad = logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, "Invalid HTTP request received.", (), None)
    other = logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, "Unsupported upgrade request.", (), None)
    with capture_logs() as lines:
        for _ in range(1000):
            handler.emit(bad)
        handler.emit(other)
        now += run.TROUBLE_PERIOD_S
        handler.emit(bad)
        handler.emit(bad)
    told = [(line["reason"], line["num_left_out"]) for line in lines]
    assert told == [(bad.msg, 0), (other.msg, 0), (bad.msg, 999)]


async def test_what_is_no_http_is_logged_by_that(gateway: RunningGateway) -> None:
    host, _, port = gateway.address.rpartition(":")
    with capture_logs() as lines:
        for _ in range(5):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"nonsense\r\n\r\n")
            assert b"400 Bad Request" in await reader.read()
            writer.close()
    assert [line["event"] for line in lines if line["event"].startswith("http.")] == ["http.trouble"]


@pytest.fixture
async def gateway(verifier: FakeVerifier) -> AsyncIterator[RunningGateway]:
    async with running_gateway(verifier.address) as running:
        yield running


def silent(fake: FakeVerifier) -> Any:
    """Sends nothing until the caller is gone."""

    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        fake.ended.wait(30)
        yield from ()

    return script


async def asked(gateway: RunningGateway, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent a completion request."""
    host, _, port = gateway.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps({"prompt": "a", **body}).encode()
    fields = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + content)
    return reader, writer


async def gone(fake: FakeVerifier, gateway: RunningGateway) -> None:
    assert await asyncio.to_thread(fake.ended.wait, 10)
    await until(lambda: gateway.gateway.metrics.num_disconnects == 1)
    await until(lambda: gateway.gateway.metrics.num_running == gateway.gateway.metrics.num_streams == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_in_mid_text_ends_the_generation(
    verifier: FakeVerifier, gateway: RunningGateway, stream: bool
) -> None:
    verifier.script = until_cancelled(verifier)
    reader, writer = await asked(gateway, {"stream": stream})
    if stream:
        await reader.readuntil(b"a b")
    else:
        await until(lambda: gateway.gateway.metrics.num_running)
    assert not verifier.ended.is_set()
    writer.close()
    await gone(verifier, gateway)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_before_the_first_token_ends_the_generation(
    verifier: FakeVerifier, gateway: RunningGateway, stream: bool
) -> None:
    verifier.script = silent(verifier)
    _, writer = await asked(gateway, {"stream": stream})
    await until(lambda: verifier.requests)
    writer.close()
    await gone(verifier, gateway)


async def test_a_client_that_reads_nothing_is_cut_off(verifier: FakeVerifier) -> None:
    def endless(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        yield started()
        while not verifier.ended.is_set():
            yield chunk(5, text="x" * 10_000)

    verifier.script = endless
    async with running_gateway(verifier.address, stall_timeout_s=0.2) as gateway:
        _, writer = await asked(gateway, {"stream": True})
        await gone(verifier, gateway)
        writer.close()


async def test_a_silent_stream_says_that_it_lives(
    verifier: FakeVerifier, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PING_S", 0.0)
    monkeypatch.setattr(streams, "TICK_S", 0.01)
    verifier.script = until_cancelled(verifier)
    reader, writer = await asked(gateway, {"stream": True})
    await reader.readuntil(b": ping\n\n")
    writer.close()
    await gone(verifier, gateway)


async def test_a_body_that_does_not_come_is_408(gateway: RunningGateway) -> None:
    async def never() -> bodies.Message:
        return await asyncio.Future()

    async def admit() -> None:
        pass

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(bodies.ApiError) as failed:
        await bodies.read_body(scope, never, Intake(1000).hold(), 1000, admit, timeout_s=0.01)
    assert failed.value.status == 408


async def test_a_head_that_does_not_come_closes_the_connection(
    verifier: FakeVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.05)
    async with running_gateway(verifier.address) as gateway:
        host, _, port = gateway.address.rpartition(":")
        for begun in (b"", b"GET / HTTP/1.1\r\nhost: x\r\n"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(begun)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()


async def test_what_is_no_http_has_the_envelope_too(gateway: RunningGateway) -> None:
    host, _, port = gateway.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x16\x03\x01 hello\r\n\r\n")
    answered = await reader.read()
    assert answered.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answered.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"
    writer.close()


async def test_the_bearer_of_the_caller_goes_on_and_the_gateways_own_does_not(
    verifier: FakeVerifier, tmp_path: Any
) -> None:
    seen: list[str | None] = []
    lock = threading.Lock()

    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        with lock:
            seen.append(dict(context.invocation_metadata()).get("authorization"))  # type: ignore[arg-type]
        yield started()
        yield finished(0)

    verifier.script = script
    own = tmp_path / "token"
    own.write_text("our-own")
    async with running_gateway(verifier.address, peer_token_file=str(own)) as gateway:
        heads = [{}, {"authorization": "Bearer"}, {"authorization": "Bearer theirs"}, {"x-api-key": "key"}]
        for head in heads:
            answered = await gateway.http.post(CHAT, json={"messages": HELLO}, headers=head)
            assert answered.status_code == 200
        refused = await gateway.http.post(CHAT, json={"messages": HELLO}, headers={"authorization": "Basic abc"})
    assert seen == [None, None, "Bearer theirs", "Bearer key"]
    assert refused.status_code == 401


async def test_a_tool_call_is_told_as_it_is_written(verifier: FakeVerifier, gateway: RunningGateway) -> None:
    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        yield started()
        yield chunk(5, text="Let me see. <tool_")
        yield chunk(6, text='call>{"name": "now", "argum')
        yield chunk(7, text='ents": {"zone": "C')
        yield chunk(8, text='ET"}')
        yield chunk(9, text="}</tool_call>")
        yield finished(5)

    verifier.script = script
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    body = {"messages": HELLO, "tools": [tool]}
    (choice,) = (await gateway.post(CHAT, **body)).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Let me see. ")
    assert call["function"] == {"name": "now", "arguments": '{"zone": "CET"}'}
    assert call["id"].startswith("call_")
    *events, _ = events_of((await gateway.post(CHAT, **body, stream=True)).text)
    deltas = [json.loads(event)["choices"][0] for event in events]
    assert "".join(each["delta"].get("content") or "" for each in deltas) == "Let me see. "
    (begun,), (grown,) = [each["delta"]["tool_calls"] for each in deltas if "tool_calls" in each["delta"]]
    assert begun.pop("id").startswith("call_")
    assert begun == {"index": 0, "type": "function", "function": {"name": "now", "arguments": '{"zone": "C'}}
    assert grown == {"index": 0, "function": {"arguments": 'ET"}'}}
    assert deltas[-1]["finish_reason"] == "tool_calls"
    assert not verifier.requests[-1].skip_special_tokens


@pytest.mark.parametrize("is_before", [True, False])
async def test_a_call_has_the_id_that_a_model_gave_it_before_its_arguments_whether_streamed_or_whole(
    verifier: FakeVerifier, gateway: RunningGateway, is_before: bool
) -> None:
    before, behind = ('"id": "c-1", ', "") if is_before else ("", ', "id": "c-1"')
    text = f'<tool_call>{{{before}"name": "now", "arguments": {{"zone": "CET"}}{behind}}}</tool_call>'
    verifier.script = saying(text)
    body = {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "now", "parameters": {}}}]}
    (choice,) = (await gateway.post(CHAT, **body)).json()["choices"]
    *events, _ = events_of((await gateway.post(CHAT, **body, stream=True)).text)
    told = [call for event in events for call in json.loads(event)["choices"][0]["delta"].get("tool_calls", ())]
    for call in (choice["message"]["tool_calls"][0], told[0]):
        assert call["id"] == "c-1" if is_before else call["id"].startswith("call_")
    assert choice["message"]["content"] is None, "an id behind the arguments is no text"


async def test_a_tool_call_that_is_cut_off_is_told_as_far_as_it_came(
    verifier: FakeVerifier, gateway: RunningGateway
) -> None:
    verifier.script = saying('<tool_call>{"name": "now", "arguments": {"zone": "C', is_cut=True)
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    body = {"messages": HELLO, "tools": [tool]}
    (choice,) = (await gateway.post(CHAT, **body)).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"zone": "C'}
    *events, _ = events_of((await gateway.post(CHAT, **body, stream=True)).text)
    _, told, end = [json.loads(event)["choices"][0] for event in events]
    assert told["delta"]["tool_calls"][0]["function"] == choice["message"]["tool_calls"][0]["function"]
    assert end["finish_reason"] == "length"


MISTRALS = "{{ '[TOOL_CALLS] ' + calls | tojson }}"


@pytest.mark.parametrize(("flag", "marker"), [("auto", "[TOOL_CALLS]"), ("hermes", "<tool_call>")])
async def test_the_chat_template_tells_how_calls_are_written_unless_the_flag_does(
    verifier: FakeVerifier, flag: str, marker: str
) -> None:
    verifier.chat_template = MISTRALS
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    async with running_gateway(verifier.address, tool_call_format=flag) as gateway:
        answered = await gateway.post(CHAT, messages=HELLO, tools=[tool], tool_choice="required")
    assert answered.status_code == 200
    assert marker in verifier.requests[-1].structured_outputs.grammar


ONE_CALL = '<tool_call>{"name": "now", "arguments": {"zone": "CET"}}'


@pytest.mark.parametrize(
    ("text", "stop_string", "reason"),
    [
        ('<tool_call>{"name": "now", "arguments": {"zone": "C', "ET", "stop"),
        ('<tool_call>{"name": "now", "arguments": {"zone": "C', None, "stop"),
        (f'{ONE_CALL}</tool_call><tool_call>{{"name": "now", "arguments": {{"zone"', ":", "stop"),
        (ONE_CALL, "</tool_call>", "tool_calls"),
        (f"{ONE_CALL}</tool_call> That is ", "all", "tool_calls"),
    ],
)
async def test_a_text_ends_by_its_calls_only_if_all_of_them_are_whole(
    verifier: FakeVerifier, gateway: RunningGateway, text: str, stop_string: str | None, reason: str
) -> None:
    verifier.script = saying(text[:50], text[50:], stop_string=stop_string)
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    body = {"messages": HELLO, "tools": [tool]}
    (choice,) = (await gateway.post(CHAT, **body)).json()["choices"]
    *events, _ = events_of((await gateway.post(CHAT, **body, stream=True)).text)
    for end in (choice, json.loads(events[-1])["choices"][0]):
        assert (end["finish_reason"], end["stop_reason"]) == (reason, stop_string)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"


async def test_counts_are_those_of_what_was_answered(gateway: RunningGateway) -> None:
    await gateway.post(CHAT, messages=HELLO)
    await gateway.post(CHAT, messages=[])
    text = (await gateway.http.get("/metrics")).text
    assert 'outrider_gateway_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'outrider_gateway_requests_total{route="/v1/chat/completions",status="400"} 1.0' in text
    assert 'outrider_gateway_tokens_total{kind="output"} 4.0' in text
    assert "vllm:spec_decode_num_drafts_total" in text


async def test_a_request_waits_until_a_verifier_takes_it(verifier: FakeVerifier, gateway: RunningGateway) -> None:
    def counts() -> tuple[int, int]:
        return gateway.gateway.metrics.num_waiting, gateway.gateway.metrics.num_running

    verifier.script = silent(verifier)
    _, writer = await asked(gateway, {})
    await until(lambda: counts() == (1, 0))
    text = (await gateway.http.get("/metrics")).text
    assert "vllm:num_requests_waiting 1.0" in text
    writer.close()
    await until(lambda: counts() == (0, 0))


async def test_a_page_of_an_allowed_origin_may_call(verifier: FakeVerifier) -> None:
    async with running_gateway(verifier.address, allow_origin="https://a.example") as gateway:
        for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            for path, status in (("/v1/models", 200), ("/nothing", 404)):
                answered = await gateway.http.get(path, headers={"origin": origin})
                assert answered.headers.get("access-control-allow-origin") == allowed
                assert answered.status_code == (status if allowed else 403)


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit, match=r"^error: --listen: cannot bind 127.0.0.1:\d+: Address already in use$"):
            run._bind(f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.slow
async def test_an_upstream_that_is_away_is_503_with_the_time_to_wait() -> None:
    async with running_gateway("127.0.0.1:1") as gateway:
        for answered in (await gateway.http.get("/health"), await gateway.post(CHAT, messages=HELLO)):
            assert answered.status_code == 503
            assert int(answered.headers["retry-after"]) >= 1
    assert answered.json()["error"]["code"] == "unavailable"
