"""Statuses become exceptions."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from outrider.v1.verifier_pb2 import GenerateRequest, GenerateResponse
from outrider_client import BlockingClient, Client, OutriderError, errors
from tests.support.fake_verifier import FakeVerifier, Script

FAILURES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]


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
    with BlockingClient("127.0.0.1:1") as client, pytest.raises(errors.Unavailable, match="Connection refused"):
        client.info()
