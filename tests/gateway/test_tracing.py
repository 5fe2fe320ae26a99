"""A request's trace: from the gateway's caller, through the gateway, to the verifier."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from grpc import ServicerContext
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import StatusCode

from outrider.telemetry.tracing import Tracer, use_tracer
from outrider.v1.verifier_pb2 import GenerateRequest, GenerateResponse
from tests.support.fake_verifier import FakeVerifier, a_good_generation
from tests.support.gateways import running_gateway

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """The spans of this process, which records what its callers record."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(sampler=ParentBased(ALWAYS_OFF), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    use_tracer(Tracer(provider.get_tracer("test")))
    yield exporter
    use_tracer(None)
    provider.shutdown()


@pytest.mark.parametrize("flags", ["01", "00"], ids=["recorded", "not-recorded"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_verifier_goes_on_with_the_trace_of_the_caller(
    verifier: FakeVerifier, spans: InMemorySpanExporter, stream: bool, flags: str
) -> None:
    told: list[str] = []

    def script(request: GenerateRequest, context: ServicerContext) -> Iterator[GenerateResponse]:
        told.append(dict(context.invocation_metadata())["traceparent"])
        return a_good_generation(request, context)

    verifier.script = script
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-{flags}"}
    body = {"prompt": "a", "stream": stream}
    async with running_gateway(verifier.address) as gateway:
        response = await gateway.http.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200
    found = spans.get_finished_spans()
    _, trace, parent, sampled = told[0].split("-")
    assert (trace, sampled) == (TRACE, flags)
    if flags == "00":
        assert found == ()
        return
    (span,) = found
    assert (span.name, f"{span.context.span_id:016x}") == ("POST /v1/completions", parent)
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"


async def test_what_a_caller_does_wrong_is_no_error_of_the_span(
    verifier: FakeVerifier, spans: InMemorySpanExporter
) -> None:
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    async with running_gateway(verifier.address) as gateway:
        response = await gateway.http.post("/v1/completions", json={"prompt": "a", "n": "x"}, headers=headers)
    assert response.status_code == 400
    (span,) = spans.get_finished_spans()
    assert span.status.status_code is StatusCode.UNSET


async def test_a_gateway_that_does_not_trace_says_nothing_of_it(verifier: FakeVerifier) -> None:
    told: list[object] = []

    def script(request: GenerateRequest, context: ServicerContext) -> Iterator[GenerateResponse]:
        told.append(dict(context.invocation_metadata()).get("traceparent"))
        return a_good_generation(request, context)

    verifier.script = script
    async with running_gateway(verifier.address) as gateway:
        await gateway.post("/v1/completions", prompt="a")
    assert told == [None]
