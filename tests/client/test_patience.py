"""A server that reports its progress may take its time; a silent one may not."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from outrider.v1.types_pb2 import ModelInfo, SamplingParams
from outrider.v1.verifier_pb2 import GenerateRequest, GenerateResponse, Reading, Waiting
from outrider_client.errors import Unavailable
from tests.client.both_clients import complete
from tests.support.fake_verifier import FakeVerifier, a_good_generation, chunk, finished, started

UNKNOWN = GenerateResponse.FromString(b"\x9a\x06\x00")
"""An event of a future server: field 99."""


def slowly(context: grpc.ServicerContext, event: GenerateResponse) -> Iterator[GenerateResponse]:
    """Repeats the event for more than twice as long as the clients of these tests are patient."""
    gone = threading.Event()
    context.add_callback(gone.set)
    for _ in range(10):
        gone.wait(0.05)
        yield event


def reading(num_read_tokens: int) -> GenerateResponse:
    return GenerateResponse(reading=Reading(num_read_tokens=num_read_tokens, num_tokens=100))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
@pytest.mark.parametrize("event", [reading(64), UNKNOWN], ids=["reading", "unknown"])
async def test_who_is_told_of_the_reading_waits_for_it(
    verifier: FakeVerifier, kind: str, event: GenerateResponse
) -> None:
    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        first, *others = a_good_generation(request, context)
        yield first
        yield from slowly(context, event)
        yield from others

    verifier.script = script
    result = await complete(verifier.address, kind, stall_timeout_s=0.2)
    assert (result.text, result.num_resumes, len(verifier.requests)) == ("a b c d", 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_a_resumed_text_is_waited_for_as_a_new_one_is(verifier: FakeVerifier, kind: str) -> None:
    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        if len(verifier.requests) == 1:
            yield started()
            yield chunk(5, text="a")
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield from slowly(context, GenerateResponse(waiting=Waiting(num_waiting=1)))
        yield started()
        yield from slowly(context, reading(64))
        if len(verifier.requests) == 2:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone again")
        yield chunk(6, text=" b")
        yield finished(2)

    verifier.script = script
    result = await complete(verifier.address, kind, stall_timeout_s=0.5, resume_timeout_s=0.2)
    assert (result.text, result.token_ids, result.num_resumes) == ("a b", (5, 6), 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_who_falls_silent_in_the_middle_of_the_reading_is_left(verifier: FakeVerifier, kind: str) -> None:
    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        gone = threading.Event()
        context.add_callback(gone.set)
        yield started()
        yield reading(64)
        gone.wait(30)

    verifier.script = script
    with pytest.raises(Unavailable, match=r"has told nothing of the generation for 0\.2"):
        await complete(verifier.address, kind, stall_timeout_s=0.2)
    assert len(verifier.requests) == 4


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_a_text_goes_on_with_the_sampling_that_it_was_begun_with(verifier: FakeVerifier, kind: str) -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, max_tokens=50)

    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        first = started("model")
        if len(verifier.requests) == 1:
            first.started.model.MergeFrom(ModelInfo(default_sampling=defaults))
        yield first
        yield chunk(5, text="a")
        if len(verifier.requests) == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield finished(2)

    verifier.script = script
    await complete(verifier.address, kind, top_k=0)
    first, second = verifier.requests
    assert first.sampling == SamplingParams(top_k=0)
    second.sampling.ClearField("seed")
    assert second.sampling == SamplingParams(
        temperature=0.6, top_k=0, top_p=1, min_p=0, repetition_penalty=1, max_tokens=50
    )
    assert second.clamp_max_tokens
