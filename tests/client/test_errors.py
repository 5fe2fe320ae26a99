"""Statuses become exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from outrider.v1.verifier_pb2 import GenerateRequest, GenerateResponse
from outrider_client import BlockingClient, Client, OutriderError, errors
from tests.support.fake_verifier import FakeVerifier, Script, until_cancelled

FAILURES = [code for code in grpc.StatusCode if code not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)]


def failing(code: grpc.StatusCode, message: str, *details: Message) -> Script:
    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        packed = [any_pb2.Any() for _ in details]
        for holder, detail in zip(packed, details, strict=True):
            holder.Pack(detail)
        status = status_pb2.Status(code=code.value[0], message=message, details=packed)
        context.abort_with_status(rpc_status.to_status(status))
        yield GenerateResponse()

    return script


@pytest.mark.parametrize("code", FAILURES, ids=lambda code: code.name)
def test_every_status_has_its_exception(verifier: FakeVerifier, code: grpc.StatusCode) -> None:
    verifier.script = failing(code, "because")
    with BlockingClient(verifier.address) as client, pytest.raises(OutriderError, match="because") as caught:
        client.complete("hello")
    assert caught.value.code is code
    assert type(caught.value).__name__.lower() == code.name.replace("_", "").lower()


async def test_a_call_that_the_server_cancels_is_unavailable(verifier: FakeVerifier) -> None:
    verifier.script = failing(grpc.StatusCode.CANCELLED, "too many")
    with BlockingClient(verifier.address) as blocking, pytest.raises(errors.Unavailable, match="too many"):
        blocking.complete("hello")
    async with Client(verifier.address) as client:
        with pytest.raises(errors.Unavailable, match="too many"):
            await client.complete("hello")


async def test_both_clients_raise_the_same(verifier: FakeVerifier) -> None:
    verifier.script = failing(grpc.StatusCode.NOT_FOUND, "nothing of that name")
    async with Client(verifier.address) as client:
        with pytest.raises(errors.NotFound, match="nothing of that name"):
            await client.complete("hello")


def test_an_invalid_argument_names_the_field(verifier: FakeVerifier) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="must be in (0, 1]")
    detail = error_details_pb2.BadRequest(field_violations=[violation])
    verifier.script = failing(grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p must be in (0, 1], got 2", detail)
    with BlockingClient(verifier.address) as client, pytest.raises(errors.InvalidArgument) as caught:
        client.complete("hello", top_p=2)
    assert caught.value.field == "sampling.top_p"
    assert caught.value.details == (detail,)


def test_a_full_server_says_when_to_come_back(verifier: FakeVerifier) -> None:
    detail = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000))
    verifier.script = failing(grpc.StatusCode.RESOURCE_EXHAUSTED, "64 of 64 sessions", detail)
    with BlockingClient(verifier.address) as client, pytest.raises(errors.ResourceExhausted) as caught:
        client.complete("hello")
    assert caught.value.retry_after_s == 1.5


def test_details_are_optional(verifier: FakeVerifier) -> None:
    verifier.script = failing(grpc.StatusCode.INVALID_ARGUMENT, "prompt must be set")
    with BlockingClient(verifier.address) as client, pytest.raises(errors.InvalidArgument) as caught:
        client.complete("hello")
    assert caught.value.field is None


def test_nobody_listening_is_unavailable() -> None:
    with (
        BlockingClient("127.0.0.1:1") as client,
        pytest.raises(errors.Unavailable, match=r"^cannot reach a verifier at 127.0.0.1:1 \(connection refused\)$"),
    ):
        client.info()


def test_a_request_that_is_too_large_is_told_in_megabytes_and_not_tried_again(verifier: FakeVerifier) -> None:
    words = "SERVER: Received message larger than max (9000011 vs. 4194304)"
    verifier.script = failing(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
    with BlockingClient(verifier.address) as client, pytest.raises(errors.InvalidArgument) as caught:
        client.complete("hello")
    assert caught.value.message == "the request has 9.0 MB, the server takes 4.2 MB"
    assert len(verifier.requests) <= 1
    with BlockingClient(verifier.address) as client, pytest.raises(errors.InvalidArgument) as caught:
        client.complete("x" * 17_000_000)
    assert caught.value.message == "the request has 17.0 MB, 16.8 MB can be sent"


async def test_a_deadline_that_is_over_is_told_in_words(verifier: FakeVerifier) -> None:
    verifier.script = until_cancelled(verifier)
    async with Client(verifier.address) as client:
        with pytest.raises(errors.DeadlineExceeded, match=r"^the time of the call \(timeout_s\) is over$"):
            await client.complete("hello", timeout_s=0.3)


@pytest.mark.parametrize(
    ("prompt", "rule"),
    [
        (None, "prompt must be text, token ids, or messages with role and content, got NoneType"),
        (5, "prompt must be text, token ids, or messages with role and content, got int"),
        ([None], "prompt must be text, token ids, or messages with role and content"),
        ("\udcff", "prompt must be text that UTF-8 can hold"),
    ],
)
def test_what_is_no_prompt_is_an_error_that_says_so(verifier: FakeVerifier, prompt: Any, rule: str) -> None:
    with BlockingClient(verifier.address) as client, pytest.raises((TypeError, ValueError)) as caught:
        client.complete(prompt)
    assert str(caught.value) == rule
