"""One generation, one trace: from the application through all services to Redis, as real processes send it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from outrider.server.export import FLUSH_TIMEOUT_S
from outrider.telemetry import tracing
from outrider.telemetry.tracing import COLLABORATE, GENERATE, LOOKUP, RECORD, SPECULATE
from outrider_cli.local.redis import running_redis
from outrider_cli.local.stack import ANY_PORT, LocalStack, Service, StackConfig
from outrider_client.blocking import BlockingClient
from outrider_client.client import Client
from outrider_client.edge import running_edge
from outrider_client.errors import InvalidArgument
from tests.support.collector import SOON, Collector, Seen, running_collector

pytestmark = pytest.mark.slow

PROMPT = "def unlikely_name_of_a_function(a, b):"
TOKEN, PASSWORD = "token-nobody-shall-see", "password-nobody-shall-see"
REDIS_LOOKUP, REDIS_RECORD = "FCALL_RO outrider_lookup_4", "FCALL outrider_record_4"
OPTIONS = {"max_tokens": 48, "method": "double", "temperature": 0.7, "seed": 7, "ignore_eos": True}
INTERNAL, SERVER, CLIENT = 1, 2, 3
CONVENTIONS = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
"""Attributes of the semantic conventions for generative AI."""


def flags(url: str, ratio: float) -> tuple[str, ...]:
    return ("--otlp-endpoint", url, "--trace-ratio", str(ratio))


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Collector, str]]:
    with running_collector() as running:
        yield running


@pytest.fixture(scope="module")
def traced(collector: tuple[Collector, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Services that record what their callers record. Redis may be slow, as long as it answers."""
    said, folder = flags(collector[1], 0.0), tmp_path_factory.mktemp("logs")
    config = StackConfig(
        target="demo/target",
        target_dtype="float32",
        verifier_arguments=said,
        speculator_arguments=said,
        datastore_arguments=(*said, "--lookup-timeout-ms", "2000"),
        log_folder=folder,
    )
    with pytest.MonkeyPatch.context() as environment, running_redis(folder) as redis_url:
        for name, value in SOON.items():
            environment.setenv(name, value)
        # A Redis user without a password accepts any.
        with_password = redis_url.replace("://", f"://default:{PASSWORD}@")
        with LocalStack(replace(config, redis_url=with_password)) as running:
            yield running


@pytest.fixture
def application(
    collector: tuple[Collector, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[bool], TracerProvider]]:
    """Makes this process trace, to the same collector."""
    providers: list[TracerProvider] = []

    def trace_here(is_recorded: bool) -> TracerProvider:
        sampler = ParentBased(ALWAYS_ON if is_recorded else ALWAYS_OFF)
        provider = TracerProvider(
            sampler=sampler, resource=Resource.create({"service.name": "application"}), shutdown_on_exit=False
        )
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=collector[1], insecure=True)))
        # OpenTelemetry allows one per process; other tests must not find it.
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
        providers.append(provider)
        return provider

    yield trace_here
    for provider in providers:
        provider.shutdown()


@contextmanager
def app_span(provider: TracerProvider) -> Iterator[str]:
    """A span of the application. Yields the trace's id."""
    with provider.get_tracer("test").start_as_current_span("a page is shown") as span:
        yield f"{span.get_span_context().trace_id:032x}"


def only(spans: list[Seen], name: str, kind: int) -> Seen:
    [found] = [span for span in spans if span.name == name and span.kind == kind]
    return found


async def test_a_generation_is_one_trace_through_all_services(
    traced: LocalStack, collector: tuple[Collector, str], application: Callable[[bool], TracerProvider]
) -> None:
    provider = application(True)
    async with Client(traced.address, token=TOKEN) as client:
        with app_span(provider) as trace_id:
            result = await client.complete(PROMPT, **OPTIONS)
    names = (
        "a page is shown",
        "text_completion",
        "prefill",
        "decode",
        GENERATE,
        SPECULATE,
        LOOKUP,
        RECORD,
        REDIS_LOOKUP,
        REDIS_RECORD,
    )
    spans = collector[0].trace(trace_id, *names, (SPECULATE, SERVER), (SPECULATE, CLIENT), is_whole=True)

    page, generation = only(spans, "a page is shown", INTERNAL), only(spans, "text_completion", CLIENT)
    served, prefill, decode = only(spans, GENERATE, SERVER), *(only(spans, n, INTERNAL) for n in ("prefill", "decode"))
    asked, drafted = only(spans, SPECULATE, CLIENT), only(spans, SPECULATE, SERVER)
    assert generation.parent_id == page.span_id
    assert served.parent_id == generation.span_id
    assert {span.parent_id for span in (prefill, decode, asked)} == {served.span_id}
    assert drafted.parent_id == asked.span_id
    for name, command in ((LOOKUP, REDIS_LOOKUP), (RECORD, REDIS_RECORD)):
        messages = {span.span_id: span for span in spans if span.name == name}
        assert {span.parent_id for span in messages.values()} == {served.span_id}
        commands = [span for span in spans if span.name == command]
        assert commands
        assert {span.parent_id for span in commands} <= messages.keys()
    services = {"application", "outrider-verifier", "outrider-speculator", "outrider-datastore"}
    assert {span.service for span in spans} == services

    summary, said = result.summary, served.attributes
    assert said["gen_ai.operation.name"] == generation.attributes["gen_ai.operation.name"] == "text_completion"
    assert said["gen_ai.provider.name"] == "outrider"
    assert (said["gen_ai.request.temperature"], said["gen_ai.request.seed"]) == (0.7, 7)
    assert said["gen_ai.response.model"] == "demo/target"
    assert said["gen_ai.usage.cache_read.input_tokens"] == 0
    assert said["gen_ai.request.model"] == "demo/target"
    assert (
        said["gen_ai.usage.output_tokens"]
        == result.num_output_tokens
        == generation.attributes["gen_ai.usage.output_tokens"]
    )
    assert said["gen_ai.response.finish_reasons"] == [result.finish_reason.value]
    assert said["outrider.method"] == "double"
    assert said["outrider.num_rounds"] == summary.num_rounds
    assert said["outrider.num_accepted_tokens"] == summary.num_accepted_tokens
    assert said["outrider.mean_acceptance_length"] == pytest.approx(result.acceptance_length)
    assert said["outrider.num_speculator_losses"] == 0
    assert said["rpc.response.status_code"] == "OK"
    assert drafted.attributes["outrider.num_drafts"] > 0
    assert not any(span.is_error for span in spans if span.service != "outrider-datastore")

    named = {name for span in spans for name in span.attributes if name.startswith("gen_ai.")}
    assert named <= CONVENTIONS

    secrets = [PROMPT, PASSWORD, "unlikely_name", TOKEN, *(word for word in result.text.split() if len(word) > 5)]
    for span in spans:
        for secret in secrets:
            assert secret.encode() not in span.raw
        assert not any("query.text" in key or "statement" in key for key in span.attributes)
    for name in ("verifier", "speculator"):
        log = (traced.log_folder / f"{name}.log").read_text()
        assert f"trace_id={trace_id}" in log


@pytest.mark.suite
async def test_the_standard_variables_alone_bring_one_trace_over_all_services(
    collector: tuple[Collector, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standard = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector[1],
        "OTEL_TRACES_SAMPLER": "parentbased_always_on",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=variables",
    }
    for name, value in {**SOON, **standard}.items():
        monkeypatch.setenv(name, value)
    config = StackConfig(target="demo/target", target_dtype="float32", gateway=True, log_folder=tmp_path)
    with running_redis(tmp_path) as redis_url, LocalStack(replace(config, redis_url=redis_url)) as stack:
        async with httpx.AsyncClient(base_url=f"http://{stack.gateway_address}", timeout=60.0) as http:
            body = {"prompt": PROMPT, "max_tokens": 32, "speculation": {"method": "double"}, "ignore_eos": True}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        [began] = collector[0].wait(lambda spans: [each for each in spans if each.name == "POST /v1/completions"])[-1:]
        wanted = (GENERATE, SPECULATE, LOOKUP, RECORD)
        spans = collector[0].trace(began.trace_id, "POST /v1/completions", *wanted, is_whole=True)
    assert {span.service.removeprefix("outrider-") for span in spans} == {
        "gateway",
        "verifier",
        "speculator",
        "datastore",
    }
    assert {span.resource["deployment.environment.name"] for span in spans} == {"variables"}


def test_the_blocking_client_is_a_part_of_the_same_trace(
    traced: LocalStack, collector: tuple[Collector, str], application: Callable[[bool], TracerProvider]
) -> None:
    provider = application(True)
    with BlockingClient(traced.address) as client, app_span(provider) as trace_id:
        client.complete(PROMPT, **(OPTIONS | {"method": "off"}))
        with pytest.raises(InvalidArgument):
            client.complete(PROMPT, temperature=-1.0)
    spans = collector[0].trace(trace_id, *2 * (GENERATE,), *2 * ("text_completion",))
    generations = {span.span_id: span for span in spans if span.name == "text_completion"}
    served = [span for span in spans if span.name == GENERATE]
    assert {span.parent_id for span in served} == generations.keys()
    [refused] = [span for span in generations.values() if span.is_error]
    assert refused.attributes["error.type"] == "INVALID_ARGUMENT"
    assert not any(span.is_error for span in served), "the verifier has not failed"


async def test_an_unrecorded_caller_makes_no_span_and_the_text_is_the_same(
    traced: LocalStack, collector: tuple[Collector, str], application: Callable[[bool], TracerProvider]
) -> None:
    async with Client(traced.address) as client:
        untraced = await client.complete(PROMPT, **OPTIONS)
        with app_span(application(False)) as unrecorded_id:
            unrecorded = await client.complete(PROMPT, **OPTIONS)
        with app_span(application(True)) as recorded_id:
            recorded = await client.complete(PROMPT, **OPTIONS)
    assert untraced.text == unrecorded.text == recorded.text
    # A process sends spans in order: once those of the later call are here, earlier ones would be, too.
    seen = collector[0].trace(recorded_id, GENERATE, SPECULATE, RECORD)
    assert seen
    assert not [span for span in collector[0].spans if span.trace_id == unrecorded_id]


@pytest.mark.suite
async def test_an_edge_passes_the_trace_on_to_the_cloud(
    collector: tuple[Collector, str],
    application: Callable[[bool], TracerProvider],
    log_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in SOON.items():
        monkeypatch.setenv(name, value)
    said = flags(collector[1], 0.0)
    config = StackConfig(
        target="demo/target",
        target_dtype="float32",
        datastore=False,
        edge=True,
        verifier_arguments=said,
        edge_arguments=said,
        log_folder=log_folder,
    )
    with LocalStack(config) as stack:
        async with Client(stack.edge_address) as client:
            with app_span(application(True)) as trace_id:
                await client.complete(PROMPT, **(OPTIONS | {"method": "pearl"}))
        wanted = ("text_completion", CLIENT), (GENERATE, SERVER), (COLLABORATE, CLIENT), (COLLABORATE, SERVER)
        spans = collector[0].trace(trace_id, *wanted)
    at_edge, sent_up = only(spans, GENERATE, SERVER), only(spans, COLLABORATE, CLIENT)
    in_cloud = only(spans, COLLABORATE, SERVER)
    assert at_edge.service == sent_up.service == "outrider-edge"
    assert in_cloud.service == "outrider-verifier"
    assert at_edge.parent_id == only(spans, "text_completion", CLIENT).span_id
    assert sent_up.parent_id == at_edge.span_id
    assert in_cloud.parent_id == sent_up.span_id


async def test_an_edge_inside_the_application_traces_as_the_application_does(
    traced: LocalStack,
    collector: tuple[Collector, str],
    application: Callable[[bool], TracerProvider],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "_tracer", None)  # restored when the test is over
    provider = application(True)
    async with running_edge(traced.address) as client:
        with app_span(provider) as trace_id:
            await client.complete(PROMPT, **(OPTIONS | {"method": "off"}))
        spans = collector[0].trace(trace_id, *3 * (GENERATE,))
    sent_up = only(spans, GENERATE, CLIENT)
    [at_edge] = [span for span in spans if span.span_id == sent_up.parent_id]
    [in_cloud] = [span for span in spans if span.parent_id == sent_up.span_id]
    assert at_edge.service == sent_up.service == "application"
    assert in_cloud.service == "outrider-verifier"


@pytest.mark.suite
async def test_a_dead_collector_changes_no_text_and_delays_no_end(traced: LocalStack, tmp_path: Path) -> None:
    async with Client(traced.address) as client:
        expected = await client.complete(PROMPT, **(OPTIONS | {"method": "off"}))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        arguments = ("--model", "demo/target", "--dtype", "float32", "--num-threads", "1", *flags(url, 1.0))
        service = Service("verifier", "outrider.verifier", arguments, tmp_path / "log", listen=ANY_PORT)
        service.start()
        try:
            service.wait_serving()
            async with Client(service.address) as client:
                result = await client.complete(PROMPT, **(OPTIONS | {"method": "off"}))
            began = time.monotonic()
            os.kill(service.pid, signal.SIGTERM)
            assert service.wait(20.0) == 0
            assert time.monotonic() - began < FLUSH_TIMEOUT_S + 3.0
        finally:
            service.kill()
    assert result.text == expected.text
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert log.count("traces.") <= 2
