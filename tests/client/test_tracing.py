"""The client's span: one for a generation, however many calls it takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.v1 import verifier_pb2
from outrider_client.errors import InvalidArgument, Unavailable
from outrider_client.requests import generate_request
from outrider_client.retries import Replicas, ResumableCall

STARTED = verifier_pb2.GenerateResponse(
    started=verifier_pb2.Started(session_id="s", seed=1, num_prompt_tokens=3, model={"model_id": "demo/target"})
)
CHUNK = verifier_pb2.GenerateResponse(chunk=verifier_pb2.Chunk(token_ids=[5], text="a secret text"))
FINISHED = verifier_pb2.GenerateResponse(
    finished=verifier_pb2.Finished(reason=verifier_pb2.FINISH_REASON_LENGTH, num_output_tokens=7)
)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """What the application has recorded."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


def course() -> ResumableCall:
    return ResumableCall(generate_request("a secret prompt", {}), Replicas("one:1,two:2"), {})


def test_a_generation_that_is_resumed_is_one_span_with_an_event(spans: InMemorySpanExporter) -> None:
    generation = course()
    generation.begin()
    said = generation.trace.metadata
    for message in (STARTED, CHUNK):
        generation.on_message(message)
    generation.after(Unavailable("the secret prompt broke it"))
    generation.begin()
    assert generation.trace.metadata == said, "both calls are parts of it"
    for message in (STARTED, CHUNK, FINISHED):
        generation.on_message(message)
    generation.trace.cancel()  # as leaving `async with` may
    [span] = spans.get_finished_spans()
    assert said[0][1].split("-")[2] == f"{span.context.span_id:016x}"
    assert [event.name for event in span.events] == ["outrider.call_failed"]
    assert span.status.is_unset
    assert span.attributes is not None
    assert span.attributes["gen_ai.usage.output_tokens"] == 7
    assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert span.attributes["gen_ai.request.model"] == "demo/target"
    assert "secret" not in span.to_json()


def test_a_generation_that_fails_says_with_what(spans: InMemorySpanExporter) -> None:
    generation = course()
    generation.begin()
    with pytest.raises(InvalidArgument):
        generation.after(InvalidArgument("prompt must be set"))
    [span] = spans.get_finished_spans()
    assert not span.status.is_ok
    assert span.attributes is not None
    assert span.attributes["error.type"] == "INVALID_ARGUMENT"


def test_a_generation_that_is_dropped_ends_its_span_without_an_error(spans: InMemorySpanExporter) -> None:
    generation = course()
    generation.begin()
    del generation
    gc.collect()
    [span] = spans.get_finished_spans()
    assert span.status.is_unset


def test_without_a_tracer_of_the_application_nothing_is_said() -> None:
    assert course().trace.metadata == ()


def test_the_span_of_several_texts_ends_with_the_last_one(spans: InMemorySpanExporter) -> None:
    generation = ResumableCall(generate_request("a prompt", {"n": 2}), Replicas("one:1,two:2"), {})
    generation.begin()
    for index in (0, 1):
        message = verifier_pb2.GenerateResponse(index=index)
        message.MergeFrom(FINISHED)
        assert not spans.get_finished_spans()
        generation.on_message(message)
    assert len(spans.get_finished_spans()) == 1
