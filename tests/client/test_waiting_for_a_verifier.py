"""A generation that begins while verifiers restart waits for one; if there is no verifier at all, that is soon
reported."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import pytest

from outrider.v1.verifier_pb2 import GenerateRequest, GenerateResponse
from outrider.wire.errors import NotServing, to_status
from outrider_client import BlockingClient, Client
from tests.client.both_clients import complete
from tests.support.fake_verifier import FakeVerifier, Script, a_good_generation

Code = grpc.StatusCode
LONGER_S = 2.0
"""Longer than the time for which a call is repeated that no server accepts."""


def refuses_for(verifier: FakeVerifier, refusal_s: float, code: Code, *, promises: bool) -> Script:
    """Refuses at first, and serves later. `promises`: its refusals say so."""
    began = time.monotonic()

    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        if time.monotonic() - began < refusal_s:
            if promises:
                context.abort_with_status(to_status(NotServing("the verifier is draining")))
            context.abort(code, "refused")
        yield from a_good_generation(request, context)

    return script


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_who_is_told_that_a_server_drains_or_loads_waits_for_one(verifier: FakeVerifier, kind: str) -> None:
    verifier.script = refuses_for(verifier, LONGER_S, Code.UNAVAILABLE, promises=True)
    assert (await complete(verifier.address, kind)).text == "a b c d"


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_a_call_that_comes_as_a_server_begins_to_stop_is_made_again(
    verifier: FakeVerifier, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier.script = refuses_for(verifier, 0.2, Code.CANCELLED, promises=False)
    assert (await complete(verifier.address, kind, resume=False)).text == "a b c d"
    began, tokenize = time.monotonic(), FakeVerifier.Tokenize

    def stopping(self: FakeVerifier, request: object, context: grpc.ServicerContext) -> object:
        if time.monotonic() - began < 0.2:
            context.abort(Code.CANCELLED, "stopping")
        return tokenize(self, request, context)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeVerifier, "Tokenize", stopping)
    if kind == "asyncio":
        async with Client(verifier.address) as client:
            assert await client.tokenize("ab") == [97, 98]
    else:
        with BlockingClient(verifier.address) as blocking:
            assert blocking.tokenize("ab") == [97, 98]
