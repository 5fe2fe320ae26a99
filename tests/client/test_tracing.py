"""The client's span: one for a generation, however many calls it takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.v1.verifier_pb2 import GenerateRequest, GenerateResponse
from outrider_client import Client
from outrider_client.errors import InvalidArgument
from tests.support.fake_verifier import FakeVerifier, a_good_generation, chunk, finished, started


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What the application has recorded."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


async def complete(verifier: FakeVerifier, **options: Any) -> None:
    async with Client(verifier.address) as client:
        await client.complete("a secret prompt", **options)


async def test_a_generation_that_is_resumed_is_one_span_with_an_event(
    spans: InMemorySpanExporter, verifier: FakeVerifier
) -> None:
    said = []

    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        said.append(dict(context.invocation_metadata())["traceparent"])
        yield started("demo/target")
        yield chunk(5, text="a secret text")
        if len(said) == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the secret prompt broke it")
        yield finished(7)

    verifier.script = script
    await complete(verifier)
    [span] = spans.get_finished_spans()
    assert len(said) == 2
    assert {each.split("-")[2] for each in said} == {f"{span.context.span_id:016x}"}, "both calls are parts of it"
    assert [event.name for event in span.events] == ["outrider.call_failed"]
    assert span.status.is_unset
    assert span.attributes is not None
    assert span.attributes["gen_ai.usage.output_tokens"] == 7
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert span.attributes["gen_ai.request.model"] == "demo/target"
    assert "secret" not in span.to_json()


async def test_a_generation_that_fails_says_with_what(spans: InMemorySpanExporter, verifier: FakeVerifier) -> None:
    verifier.script = lambda request, context: context.abort(grpc.StatusCode.INVALID_ARGUMENT, "prompt must be set")
    with pytest.raises(InvalidArgument):
        await complete(verifier)
    [span] = spans.get_finished_spans()
    assert not span.status.is_ok
    assert span.attributes is not None
    assert span.attributes["error.type"] == "INVALID_ARGUMENT"


async def test_a_generation_that_is_dropped_ends_its_span_without_an_error(
    spans: InMemorySpanExporter, verifier: FakeVerifier
) -> None:
    async with Client(verifier.address) as client:
        generation = client.generate("hello")
        await anext(generation)
        del generation
        gc.collect()
        [span] = spans.get_finished_spans()
    assert span.status.is_unset


async def test_without_a_tracer_of_the_application_nothing_is_said(verifier: FakeVerifier) -> None:
    said = []

    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        said.extend(key for key, _ in context.invocation_metadata())
        yield from a_good_generation(request, context)

    verifier.script = script
    await complete(verifier)
    assert said
    assert "traceparent" not in said


async def test_the_span_of_several_texts_ends_with_the_last_one(
    spans: InMemorySpanExporter, verifier: FakeVerifier
) -> None:
    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        for index in (0, 1):
            for event in (started(), chunk(5, text="a"), finished(index + 1)):
                event.index = index
                yield event

    verifier.script = script
    await complete(verifier, n=2)
    [span] = spans.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["gen_ai.usage.output_tokens"] == 2
