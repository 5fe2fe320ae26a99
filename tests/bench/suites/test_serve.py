"""`outrider bench serve` against a verifier that is real, and against one that fails as it is told."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider.v1.verifier_pb2 import GenerateRequest, GenerateResponse
from outrider_bench.config import ServeConfig
from outrider_bench.suites.serve.suite import ServeSuite
from outrider_cli.app import app
from outrider_cli.prompts import Prompt
from tests.support.fake_verifier import FakeVerifier, a_good_generation
from tests.support.services import running_verifier

NO_SERVER = "127.0.0.1:1"


async def test_a_verifier_that_runs_is_measured_rate_by_rate(tmp_path: Path) -> None:
    async with running_verifier() as verifier:
        config = ServeConfig(
            address=verifier.address,
            request_rates=(200.0, float("inf")),
            num_prompts=5,
            prompts=(Prompt("def add(a, b):\n"), Prompt("import os\n")),
            options={"max_tokens": 6, "ignore_eos": True, "temperature": 0.0},
            goodput={"e2el": 60_000.0},
            percentiles=(50.0, 99.0),
            save_detailed=True,
        )
        suite = ServeSuite(config)
        lines: list[str] = []
        await suite.measure(lines.append)
        assert await verifier.is_idle()
    assert not suite.has_failures
    ServeSuite.write(suite.results(), tmp_path)
    first, last = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert (first["request_rate"], last["request_rate"]) == (200.0, "inf")
    for run in (first, last):
        assert (run["completed"], run["failed"], run["unfinished"], run["num_prompts"]) == (5, 0, 0, 5)
        assert (run["model_id"], run["backend"], run["burstiness"]) == (verifier.model.model_id, "outrider", 1.0)
        assert run["total_output_tokens"] == 30
        assert run["output_lens"] == [6] * 5
        assert run["input_lens"][0] == run["input_lens"][2] > 0
        assert run["goodput_share"] == 1.0
        assert run["request_goodput"] == run["request_throughput"] == pytest.approx(5 / run["duration"])
        assert 0 < run["p50_ttft_ms"] <= run["p99_ttft_ms"] <= run["p99_e2el_ms"] <= 1000 * run["duration"]
        # Without speculation a chunk has one token: 5 gaps between 6.
        assert [len(gaps) for gaps in run["itls"]] == [5] * 5
        assert "spec_decode_acceptance_rate" not in run
    assert first["start_times"][-1] >= 5 / 200, "the last request is not sent before it is due"
    assert any("5 of 5 completed" in line for line in lines)


def failing(*numbers: int, status: grpc.StatusCode = grpc.StatusCode.RESOURCE_EXHAUSTED) -> Any:
    """A script that refuses calls by their numbers, that of the warm-up being 0; without any all but that one."""
    count = iter(range(1000))

    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        number = next(count)
        if number in numbers or (not numbers and number > 0):
            context.abort(status, "no more sessions")
        yield from a_good_generation(request, context)

    return script


def bench(*arguments: str, out: Path | None = None) -> Result:
    line = ["bench", "serve", *arguments, *(["--out", str(out)] if out else [])]
    return CliRunner(env={"OUTRIDER_ADDRESS": "", "TERM": "dumb"}).invoke(app, line)


def runs_in(folder: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())["runs"]
    return runs


def test_flags_of_vllm_reach_the_requests_and_the_results(verifier: FakeVerifier, tmp_path: Path) -> None:
    limits = ["--goodput", "ttft:60000", "tpot:60000", "e2el:60000", "--percentiles", "50,99.9"]
    sampling = ["--max-tokens", "7", "--ignore-eos", "--temperature", "0.5", "--method", "pearl"]
    load = ["--request-rate", "100,inf", "--num-prompts", "3", "--max-concurrency", "1", "--arrival", "constant"]
    result = bench("--address", verifier.address, *limits, *sampling, *load, out=tmp_path)
    assert result.exit_code == 0, result.output
    assert len(verifier.requests) == 1 + 2 * 3
    assert verifier.requests[0].sampling.max_tokens == 7, (
        "the server is warmed up by no longer a text than it is asked for"
    )
    request = verifier.requests[-1]
    assert (request.sampling.max_tokens, request.sampling.ignore_eos) == (7, True)
    assert request.sampling.temperature == 0.5
    assert {one.sampling.seed for one in verifier.requests[1:4]} == {one.sampling.seed for one in verifier.requests[4:]}
    first, last = runs_in(tmp_path)
    assert (first["completed"], first["goodput_share"], first["burstiness"]) == (3, 1.0, "inf")
    assert (last["max_concurrency"], last["max_concurrent_requests"]) == (1, 1)
    assert {"p99.9_ttft_ms", "p99.9_client_queue_time_ms"} <= last.keys()
    # By the fake's summaries: 2 rounds, 16 drafted, 2 accepted in each generation.
    assert (last["spec_decode_acceptance_length"], last["spec_decode_acceptance_rate"]) == (2.0, 12.5)
    assert "100 req/s: latencies in ms" in result.stdout


def test_refused_requests_are_counted_and_the_rest_is_measured(verifier: FakeVerifier, tmp_path: Path) -> None:
    verifier.script = failing(2, 3)
    result = bench("--address", verifier.address, "--num-prompts", "5", out=tmp_path)
    assert result.exit_code == 0
    [run] = runs_in(tmp_path)
    assert (run["completed"], run["failed"]) == (3, 2)
    assert run["failures"] == {"RESOURCE_EXHAUSTED": {"count": 2, "message": "no more sessions"}}
    note = " ".join(result.stdout.split())
    assert "all at once: 2 failed with RESOURCE_EXHAUSTED: no more sessions" in note


def test_a_rate_at_which_nothing_is_answered_is_the_last_and_a_failure(verifier: FakeVerifier, tmp_path: Path) -> None:
    verifier.script = failing()
    result = bench("--address", verifier.address, "--num-prompts", "2", "--request-rate", "inf,50", out=tmp_path)
    assert result.exit_code == 1
    assert [run["failed"] for run in runs_in(tmp_path)] == [2]
    note = " ".join(result.stdout.split())
    assert "no request was answered (RESOURCE_EXHAUSTED: no more sessions), so no other rate was tried" in note


@pytest.mark.parametrize(
    ("status", "exit_code"), [(grpc.StatusCode.INVALID_ARGUMENT, 2), (grpc.StatusCode.RESOURCE_EXHAUSTED, 1)]
)
def test_a_server_that_refuses_the_first_request_is_one_line_and_nothing_is_written(
    verifier: FakeVerifier, tmp_path: Path, status: grpc.StatusCode, exit_code: int
) -> None:
    verifier.script = failing(0, status=status)
    result = bench("--address", verifier.address, out=tmp_path)
    assert result.exit_code == exit_code
    assert result.stderr.splitlines()[-1] == f"error: no more sessions ({status.name})"
    assert not list(tmp_path.iterdir())
    assert len(verifier.requests) == 1


def test_a_server_that_is_not_there_is_one_line() -> None:
    result = bench("--address", NO_SERVER)
    assert result.exit_code == 3
    assert f"cannot reach a verifier at {NO_SERVER} (connection refused)" in result.stderr.splitlines()[-1]


def test_ctrl_c_shows_and_keeps_what_has_been_measured(verifier: FakeVerifier, tmp_path: Path) -> None:
    calls = iter(range(1000))

    def interrupting(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        if next(calls) == 3:  # the warm-up, two requests, and now
            verifier.ended.clear()
            os.kill(os.getpid(), signal.SIGINT)
            verifier.ended.wait(30)
        yield from a_good_generation(request, context)

    verifier.script = interrupting
    flags = ["--num-prompts", "6", "--max-concurrency", "1", "--request-rate", "inf,1"]
    result = bench("--address", verifier.address, *flags, out=tmp_path)
    assert result.exit_code == 130
    assert "Traceback" not in result.output
    [run] = runs_in(tmp_path)
    assert (run["completed"], run["failed"], run["unfinished"]) == (2, 0, 4)
    assert run["request_throughput"] == pytest.approx(2 / run["duration"])
    assert "2 of 6" in result.stdout
    assert "was interrupted" in result.stdout


def test_the_token_goes_with_every_request(verifier: FakeVerifier, tmp_path: Path) -> None:
    seen: list[Any] = []

    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        seen.append(dict(context.invocation_metadata()).get("authorization"))
        yield from a_good_generation(request, context)

    verifier.script = script
    (tmp_path / "token").write_text("sesame")
    result = bench("--address", verifier.address, "--num-prompts", "2", "--token-file", str(tmp_path / "token"))
    assert result.exit_code == 0, result.output
    assert seen == ["Bearer sesame"] * 3
