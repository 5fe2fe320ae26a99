"""Requests that are too long, too many or endless: each is told what is too much, and nobody else has to wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from outrider_gateway import intake
from tests.support.fake_verifier import FakeVerifier
from tests.support.gateways import RunningGateway, running_gateway
from tests.support.raw_http import exchanged, post

COMPLETIONS = "/v1/completions"
CHUNKED = post(COMPLETIONS, "transfer-encoding: chunked")
GET = b"GET /live HTTP/1.1\r\nhost: localhost\r\n"
SHORT = b'{"prompt": "a"}'


@pytest.fixture
async def gateway(verifier: FakeVerifier) -> AsyncIterator[RunningGateway]:
    async with running_gateway(verifier.address) as running:
        yield running


@pytest.mark.parametrize(
    ("begin", "more", "status"),
    [
        (b"GET /", b"a" * 10_000, 414),
        (GET + b"x: ", b"a" * 10_000, 431),
        (GET, b"a" * 10_000, 431),
        (GET, b"a:\r\n" * 1000, 431),
        (CHUNKED + b"2;", b"a" * 10_000, 431),
        (CHUNKED + b"2\r\n{}\r\n0\r\nx: ", b"a" * 10_000, 431),
        (CHUNKED + b"2\r\n{", b"", 0),
    ],
    ids=["target", "value", "name", "fields", "extension", "trailer", "nothing"],
)
async def test_what_has_no_end_is_refused_while_it_comes(
    gateway: RunningGateway, begin: bytes, more: bytes, status: int
) -> None:
    if not more:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await exchanged(gateway.address, begin)
        return
    answer = await exchanged(gateway.address, begin, *[more] * 100)
    assert answer.status == status
    assert answer.error["code"] == "request_too_large"
    assert answer.fields["connection"] == "close"


async def test_a_long_head_that_comes_at_once_is_refused_too(gateway: RunningGateway) -> None:
    for head, status in (
        (GET + b"x: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (GET + b"a: b\r\n" * 300 + b"\r\n", 431),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 414),
        (GET + b"x: " + b"a" * 60_000 + b"\r\n\r\n", 200),
    ):
        assert (await exchanged(gateway.address, head)).status == status


async def test_what_stands_after_a_body_is_no_part_of_the_head(verifier: FakeVerifier, gateway: RunningGateway) -> None:
    verifier.tokens = {"t"}
    token, body = b"authorization: Bearer t\r\n", b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    head = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
    assert (await exchanged(gateway.address, head + token + body + b"\r\n")).status == 200
    assert (await exchanged(gateway.address, head + body + token + b"\r\n")).status == 401


async def test_the_token_is_judged_before_a_large_body_is_read(verifier: FakeVerifier, gateway: RunningGateway) -> None:
    verifier.tokens = {"known"}
    told = await exchanged(gateway.address, post(COMPLETIONS, "content-length: 1000000"))
    assert told.status == 401
    untold = await exchanged(gateway.address, CHUNKED, b"20000\r\n" + b" " * 70_000)
    assert untold.status == 401
    verifier.num_asked = 0
    for _ in range(2):
        head = {"authorization": "Bearer known"}
        answered = await gateway.http.post(COMPLETIONS, json={"prompt": "a", "user": "x" * 100_000}, headers=head)
        assert answered.status_code == 200
    assert verifier.num_asked <= 2, "once for the token, and once for the model's name"


async def test_where_all_hold_too_much_the_largest_give_way_and_a_small_one_is_served(
    verifier: FakeVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_HELD_BYTES", 4 << 20)
    async with running_gateway(verifier.address, max_body_bytes=1 << 19) as gateway:
        # Each counts fourfold.
        begun = post(COMPLETIONS, "content-length: 450000"), b" " * 400_000
        large = [asyncio.create_task(exchanged(gateway.address, *begun)) for _ in range(6)]
        _, waiting = await asyncio.wait(large, timeout=0.5, return_when=asyncio.ALL_COMPLETED)
        refused = [task.result() for task in large if task.done()]
        assert {answer.status for answer in refused} == {503}
        assert {answer.fields["retry-after"] for answer in refused} == {"1"}
        assert 1 <= len(waiting) <= 2
        assert (await gateway.post(COMPLETIONS, prompt="a")).status_code == 200
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


@pytest.mark.parametrize("part", ["[],", '{"a":1},', "[[[]]],"])
async def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(gateway: RunningGateway, part: str) -> None:
    content = f'{{"prompt": [{part * 200_000}1]}}'
    head = {"content-type": "application/json"}
    refused = await gateway.http.post(COMPLETIONS, content=content, headers=head)
    assert refused.status_code == 413
    assert "at most 100000 lists, objects and names" in refused.json()["error"]["message"]


async def test_what_looks_like_parts_within_a_text_is_none(verifier: FakeVerifier, gateway: RunningGateway) -> None:
    text = '{"a": [1], "b\\": {}' * 20_000
    assert (await gateway.post(COMPLETIONS, prompt=text)).status_code == 200
    assert verifier.requests[-1].prompt.text == text


async def test_a_large_chat_goes_on_as_it_is(verifier: FakeVerifier, gateway: RunningGateway) -> None:
    messages = [{"role": "user", "content": f"{number} \U0001f680"} for number in range(10_000)]
    assert (await gateway.post("/v1/chat/completions", messages=messages)).status_code == 200
    sent = verifier.requests[-1].prompt.chat.messages
    assert [message.content for message in sent] == [message["content"] for message in messages]
    told = await gateway.post("/tokenize", messages=messages)
    assert bytes(told.json()["tokens"]).decode() == "".join(message["content"] for message in messages)
    wrong = await gateway.post("/v1/chat/completions", messages=[*messages, {"role": "user", "content": 5}])
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages[10000].content")


async def test_an_error_does_not_repeat_megabytes(gateway: RunningGateway) -> None:
    wrong = await gateway.post("/v1/chat/completions", messages=[{"role": "user", "content": "", "x" * 300_000: 1}])
    assert wrong.status_code == 400
    assert len(wrong.content) < 5000


async def test_requests_that_wait_for_an_answer_before_theirs_are_few(gateway: RunningGateway) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    one = post(COMPLETIONS, f"content-length: {len(body)}") + body
    assert (await exchanged(gateway.address, one * 3)).status == 200
    assert (await exchanged(gateway.address, one * 100)).status in (0, 400)
