"""Traces of one process: whose decision it follows, what it records, and what happens if no collector takes it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.server.export import FLUSH_TIMEOUT_S, TraceExport, start_traces
from outrider.server.settings import ServiceSettings, model_config, parse_settings
from outrider.telemetry.tracing import (
    LOOKUP,
    MAX_TRACED_MESSAGES,
    NO_SPAN,
    SPECULATE,
    current_span,
    traced_call,
    traced_message,
    traced_request,
)
from outrider.wire.errors import InvalidArgument, RpcError, Unavailable, rpc_errors
from tests.support.collector import Collector, Seen, running_collector

CHECK = "grpc.health.v1.Health/Check"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = (f"00-{TRACE_ID}-{PARENT_ID}-{flags}" for flags in ("01", "00"))
MALFORMED = (
    "",
    "nonsense",
    SAMPLED.upper(),
    SAMPLED[:-1],
    SAMPLED + "-more",
    f"ff{SAMPLED[2:]}",
    f"00-{'0' * 32}-{PARENT_ID}-01",
    f"00-{TRACE_ID}-{'0' * 16}-01",
    f"01{SAMPLED[2:]}-{'x' * 100}",
)


def is_sampled(traceparent: str) -> bool:
    """True if the lowest bit of its flags is set."""
    return bool(int(traceparent[-2:], 16) & 1)


class Settings(ServiceSettings):
    model_config = model_config("outrider.test")


class Answering(health_pb2_grpc.HealthServicer):
    """A traced call that does what a test wants."""

    def __init__(self) -> None:
        self.work: Callable[[], object] = lambda: None

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        with traced_call(CHECK, context), rpc_errors(context):
            self.work()
        return health_pb2.HealthCheckResponse()


class Served:
    """Its caller's side."""

    def __init__(self, servicer: Answering, stub: health_pb2_grpc.HealthStub) -> None:
        self._servicer, self._stub = servicer, stub

    async def call(self, metadata: Sequence[tuple[str, str]] = (), work: Callable[[], object] = lambda: None) -> None:
        self._servicer.work = work
        with suppress(grpc.aio.AioRpcError):  # its span is checked instead
            await self._stub.Check(health_pb2.HealthCheckRequest(), metadata=metadata)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    servicer, server = Answering(), grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Served(servicer, health_pb2_grpc.HealthStub(channel))
    await server.stop(0)


class Recording:
    """The spans that a process sends between its first one and its end."""

    def __init__(self, collector: Collector, export: TraceExport) -> None:
        self._collector, self._export = collector, export

    def spans(self) -> list[Seen]:
        """Ends it."""
        self._export.stop()
        return self._collector.spans


@contextmanager
def recording(ratio: float) -> Iterator[Recording]:
    with running_collector() as (collector, url):
        export = TraceExport("outrider-test", url, ratio)
        try:
            yield Recording(collector, export)
        finally:
            export.stop()


async def test_a_recorded_caller_is_followed_whatever_the_ratio(served: Served) -> None:
    with recording(0.0) as recorded:
        await served.call((("traceparent", SAMPLED), ("tracestate", "vendor=1")))
        await served.call()
        [span] = recorded.spans()
    assert (span.name, span.trace_id, span.parent_id) == (CHECK, TRACE_ID, PARENT_ID)
    assert span.attributes["rpc.system.name"] == "grpc"
    assert span.attributes["rpc.response.status_code"] == "OK"
    assert span.resource["service.name"] == "outrider-test"
    assert {"service.version", "service.instance.id"} <= span.resource.keys()


async def test_an_unrecorded_caller_makes_no_span_anywhere(served: Served) -> None:
    said: list[tuple[tuple[str, str], ...]] = []

    def work() -> None:
        span = current_span()
        assert not span.is_recorded
        assert span.log_fields == {}
        assert span.child("prefill") is NO_SPAN
        assert span.trace_budget().next() == ""
        with span.calling(SPECULATE, "127.0.0.1:1") as call:
            said.append(call.metadata)

    with recording(1.0) as recorded:
        await served.call((("traceparent", UNSAMPLED),), work)
        assert recorded.spans() == []
    [[(name, traceparent)]] = said
    assert name == "traceparent"
    assert traceparent.startswith(f"00-{TRACE_ID}-")
    assert not is_sampled(traceparent), "who is called shall not begin a trace of its own"


@pytest.mark.parametrize("traceparent", MALFORMED)
async def test_a_malformed_traceparent_is_ignored(served: Served, traceparent: str) -> None:
    with recording(1.0) as recorded:
        await served.call((("traceparent", traceparent),))
        with traced_message(LOOKUP, traceparent) as span:
            assert not span.is_recorded
        [span] = recorded.spans()
    assert span.trace_id != TRACE_ID
    assert span.parent_id == ""


async def test_what_is_called_and_what_is_asked_are_parts_of_a_call(served: Served) -> None:
    said: list[str] = []

    def work() -> None:
        session = current_span()
        said.append(session.log_fields["trace_id"])
        session.child("prefill").end()
        with session.calling(SPECULATE, "[::1]:50052") as call:
            said.append(dict(call.metadata)["traceparent"])
        budget = session.trace_budget()
        for _ in range(MAX_TRACED_MESSAGES + 3):
            with traced_message(LOOKUP, budget.next()) as lookup:
                if lookup.is_recorded:
                    current_span().child("FCALL_RO", "client").end()

    with recording(1.0) as recorded:
        await served.call(work=work)
        spans = recorded.spans()
    [root] = [span for span in spans if span.name == CHECK]
    [call] = [span for span in spans if span.name == SPECULATE]
    [prefill] = [span for span in spans if span.name == "prefill"]
    lookups = [span for span in spans if span.name == LOOKUP]
    commands = [span for span in spans if span.name == "FCALL_RO"]
    assert {span.trace_id for span in spans} == {root.trace_id} == {said[0]}
    assert said[1].startswith(f"00-{call.trace_id}-{call.span_id}-")
    assert is_sampled(said[1])
    assert {span.parent_id for span in (call, prefill, *lookups)} == {root.span_id}
    assert call.attributes["server.address"] == "::1"
    assert call.attributes["server.port"] == 50052
    assert len(lookups) == MAX_TRACED_MESSAGES, "a trace stays small"
    assert sorted(span.parent_id for span in commands) == sorted(span.span_id for span in lookups)


@pytest.mark.parametrize(
    ("error", "status", "is_error"),
    [
        (InvalidArgument("prompt", "must be set"), "INVALID_ARGUMENT", False),
        (Unavailable("the secret prompt"), "UNAVAILABLE", True),
        (KeyError("the secret prompt"), "INTERNAL", True),
    ],
)
async def test_a_failed_call_says_its_status_and_no_more(
    served: Served, error: Exception, status: str, is_error: bool
) -> None:
    def work() -> None:
        raise error

    with recording(1.0) as recorded:
        await served.call(work=work)
        [span] = recorded.spans()
    assert span.attributes["rpc.response.status_code"] == status
    assert span.is_error is is_error
    assert b"secret" not in span.raw


def test_a_call_that_fails_says_with_what_and_one_that_is_dropped_does_not_fail() -> None:
    with recording(1.0) as recorded:
        with traced_message(LOOKUP, SAMPLED) as span:
            with pytest.raises(RpcError), span.calling(SPECULATE, "a:1"):
                raise Unavailable("gone")
            with pytest.raises(GeneratorExit), span.calling(SPECULATE, "b:1"):
                raise GeneratorExit
        seen = {span.attributes.get("server.address"): span for span in recorded.spans()}
    assert seen["a"].is_error
    assert seen["a"].attributes["rpc.response.status_code"] == "UNAVAILABLE"
    assert not seen["b"].is_error
    assert seen["b"].attributes["rpc.response.status_code"] == "CANCELLED"


def test_the_variables_of_opentelemetry_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab,service.instance.id=verifier-0")
    with recording(1.0) as recorded:
        with traced_message(LOOKUP, SAMPLED):
            pass
        [span] = recorded.spans()
    assert span.resource["deployment.environment.name"] == "lab"
    assert span.resource["service.instance.id"] == "verifier-0"
    assert span.service == "outrider-test"


def test_the_standard_name_of_the_service_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "drafts-in-europe")
    with recording(1.0) as recorded:
        with traced_message(LOOKUP, SAMPLED):
            pass
        [span] = recorded.spans()
    assert span.service == "drafts-in-europe"


@contextmanager
def silent_listener() -> Iterator[str]:
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def nobody() -> Iterator[str]:
    with silent_listener() as url:
        pass
    yield url


@pytest.mark.slow
@pytest.mark.parametrize("collector", [nobody, silent_listener])
def test_a_collector_that_is_away_delays_the_end_by_a_moment_only(
    collector: Callable[[], contextmanager[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with collector() as url:
        export = TraceExport("outrider-test", url, 1.0)
        for _ in range(3000):  # more than are kept
            with traced_message(LOOKUP, SAMPLED):
                pass
        began = time.monotonic()
        export.stop()
        assert time.monotonic() - began < FLUSH_TIMEOUT_S + 0.5
    said = capsys.readouterr()
    assert said.err.count("\n") + said.out.count("\n") <= 3, "the log is not full of it"
    assert "traces.not_sent" in said.err + said.out


@pytest.mark.parametrize(
    "endpoint",
    [
        "collector:4317",
        "grpc://collector:4317",
        "http://",
        "http://a:b",
        "http://a:4318/v1/traces",
        "http://u:pass@a:1",
    ],
)
def test_a_wrong_endpoint_is_told_by_flag_and_rule(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(Settings, ["--otlp-endpoint", endpoint])
    said = capsys.readouterr().err
    assert "--otlp-endpoint (or OUTRIDER_TEST_OTLP_ENDPOINT): must be http://HOST:PORT or https://HOST:PORT" in said
    assert "pass" not in said


@pytest.mark.parametrize("ratio", ["-0.1", "1.1", "some"])
def test_a_wrong_ratio_is_told_by_its_flag(ratio: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_settings(Settings, ["--trace-ratio", ratio])
    assert "--trace-ratio" in capsys.readouterr().err


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(SystemExit, match=r"error: --otlp-endpoint: needs pip install -e '\.\[otel\]'"):
        start_traces("outrider-test", Settings(otlp_endpoint="http://127.0.0.1:4317"))


def num_recorded(monkeypatch: pytest.MonkeyPatch, *arguments: str, **variables: str) -> int | None:
    """How many of 20 traces that begin here are sent, with a collector named by OpenTelemetry's variable and by
    `arguments`, where {url} is its URL. None means that the service does not trace."""
    with running_collector() as (collector, url), monkeypatch.context() as environment:
        for name, value in {"OTEL_EXPORTER_OTLP_ENDPOINT": url, **variables}.items():
            environment.setenv(name, value)
        settings = parse_settings(Settings, [argument.format(url=url) for argument in arguments])
        if (export := start_traces("outrider-test", settings)) is None:
            return None
        for _ in range(20):
            with traced_request("POST /v1/completions", ""):
                pass
        export.stop()
        return len(collector.spans)


def test_the_standard_variable_names_a_collector_and_then_all_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_recorded(monkeypatch) == 20  # by default one in ten of ours


def test_the_standard_sampler_holds_unless_a_flag_gives_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    flag, none = ("--otlp-endpoint", "{url}"), {"OTEL_TRACES_SAMPLER": "parentbased_always_off"}
    share = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}
    for variables in (none, share):
        assert num_recorded(monkeypatch, **variables) == 0
        assert num_recorded(monkeypatch, *flag, **variables) == 0
        assert num_recorded(monkeypatch, *flag, "--trace-ratio", "1", **variables) == 20
        assert num_recorded(monkeypatch, "--trace-ratio", "1", **variables) == 20


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_SDK_DISABLED", "true", "OTEL_SDK_DISABLED is true"),
        ("OTEL_TRACES_EXPORTER", "none", "OTEL_TRACES_EXPORTER must be otlp, got 'none'"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "OTEL_EXPORTER_OTLP_PROTOCOL must be grpc, got"),
        ("OTEL_PROPAGATORS", "b3", "OTEL_PROPAGATORS must include tracecontext, got 'b3'"),
    ],
)
def test_a_standard_variable_that_forbids_traces_is_named(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert num_recorded(monkeypatch, **{name: value}) is None
    output = capsys.readouterr()
    assert said in output.err + output.out


def test_the_sdk_is_off_where_the_standard_variable_says_so_with_a_flag_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_recorded(monkeypatch, "--otlp-endpoint", "{url}", OTEL_SDK_DISABLED="True") is None
    assert (
        num_recorded(monkeypatch, "--otlp-endpoint", "{url}", "--trace-ratio", "1", OTEL_TRACES_EXPORTER="none") == 20
    )


def test_an_unknown_sampler_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert num_recorded(monkeypatch, OTEL_TRACES_SAMPLER="sometimes") == 20
    output = capsys.readouterr()
    assert "sometimes" in output.err + output.out


def test_the_standard_variable_without_the_packages_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # It is often set for all programs of a machine.
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    assert num_recorded(monkeypatch) is None


def test_without_an_endpoint_opentelemetry_is_not_even_imported() -> None:
    program = (
        "import sys, outrider_client.client, outrider_client.blocking, outrider.server.run\n"
        "from outrider.server.export import start_traces\n"
        "from outrider.edge.settings import EdgeSettings\n"
        "assert start_traces('outrider-edge', EdgeSettings(upstream='127.0.0.1:1', _cli_parse_args=[])) is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[]\n"
