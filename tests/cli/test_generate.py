"""`outrider generate`: its request, its output on each stream, and its exit."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from typer.testing import CliRunner

from outrider.v1 import types_pb2, verifier_pb2
from outrider.v1.verifier_pb2 import GenerateRequest, GenerateResponse
from outrider_cli.app import app
from outrider_cli.failures import with_flags_for_fields
from outrider_client.requests import METHOD_MESSAGES
from tests.support.fake_verifier import SEED, FakeVerifier, a_good_generation, until_cancelled

NO_SERVER = "127.0.0.1:1"

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "OUTRIDER_ADDRESS": ""})


def test_every_parameter_of_a_method_is_named_in_the_help() -> None:
    text = runner.invoke(app, ["generate", "--help-all"]).stdout
    for field in types_pb2.SpeculationParams.DESCRIPTOR.fields:
        if field.message_type is not None and field.containing_oneof is not None:
            assert all(parameter.name in text for parameter in field.message_type.fields)


def test_generated_text_goes_to_stdout_and_the_rest_to_stderr(verifier: FakeVerifier) -> None:
    result = runner.invoke(app, ["generate", "hello", "--address", verifier.address])
    assert result.exit_code == 0
    assert result.stdout == "a b c d\n"
    assert re.fullmatch(rf"4 tokens, \d+ a second, 2\.0 a forward; the same again: --seed {SEED}\n", result.stderr)


def test_stats_come_before_the_last_line_and_a_seed_that_was_given_is_not_told_again(verifier: FakeVerifier) -> None:
    result = runner.invoke(app, ["generate", "hello", "--stats", "--seed", "5", "--address", verifier.address])
    statistics, last = result.stderr.splitlines()
    assert "pearl: " in statistics
    assert "acceptance length 2.00" in statistics
    assert last.endswith(" a second, 2.0 a forward")
    result = runner.invoke(app, ["generate", "hello", "--stats", "--json", "--address", verifier.address])
    assert (result.exit_code, "--stats: must be unset with --plain" in result.stderr) == (2, True)


def test_plain_shows_the_text_alone(verifier: FakeVerifier) -> None:
    result = runner.invoke(app, ["generate", "hello", "--plain", "--address", verifier.address])
    assert (result.stdout, result.stderr) == ("a b c d\n", "")


def test_a_prompt_comes_from_stdin_as_it_is(verifier: FakeVerifier) -> None:
    assert runner.invoke(app, ["generate", "-", "--address", verifier.address], input="a\nb\n").exit_code == 0
    assert verifier.requests[0].prompt.text == "a\nb\n"


def test_flags_reach_the_server_and_unset_ones_do_not(verifier: FakeVerifier) -> None:
    flags = ["--temperature", "0", "--stop-token-id", "4", "--stop-token-id", "5", "--method", "off", "--no-retrieval"]
    assert runner.invoke(app, ["generate", "hello", "--address", verifier.address, *flags]).exit_code == 0
    request = verifier.requests[0]
    assert request.sampling == types_pb2.SamplingParams(temperature=0, stop_token_ids=[4, 5])
    assert request.speculation == types_pb2.SpeculationParams(method=types_pb2.METHOD_OFF, retrieval=False)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_parameter_of_a_method_arrives_in_its_field(verifier: FakeVerifier, command: str) -> None:
    said = ["fan_out=given", "fan_outs=3,2,0", "fallback=draft", "bias=0.5", "num-biased=2"]
    flags = ["--method", "saguaro", "--acceptance-rule", "ratio", "--rows", "tree", "--max-rows", "8", "--shared-noise"]
    flags += ["--allow-fallback", *(word for pair in said for word in ("--method-param", pair))]
    prompt = ["hello"] if command == "generate" else []
    result = runner.invoke(app, [command, *prompt, "--address", verifier.address, *flags], input="hi\n/exit\n")
    assert result.exit_code == 0, result.output
    own = types_pb2.SaguaroParams(
        fan_out=types_pb2.FAN_OUT_GIVEN,
        fan_outs=[3, 2, 0],
        fallback=types_pb2.FALLBACK_DRAFT,
        bias=0.5,
        num_biased=2,
    )
    assert verifier.requests[0].speculation == types_pb2.SpeculationParams(
        method=types_pb2.METHOD_SAGUARO,
        rows=types_pb2.ROWS_TREE,
        max_rows=8,
        acceptance_rule=types_pb2.ACCEPTANCE_RULE_RATIO,
        shared_noise=True,
        allow_fallback=True,
        saguaro=own,
    )


def test_sources_are_named_with_commas_between_them(verifier: FakeVerifier) -> None:
    flags = ["--method", "retrieval", "--rows", "tree", "--sources", "recycled, pool,prior", "--retrieval-remote"]
    assert runner.invoke(app, ["generate", "hello", "--address", verifier.address, *flags]).exit_code == 0
    speculation = verifier.requests[0].speculation
    assert speculation.retrieval_params.remote
    assert list(speculation.retrieval_params.sources) == [
        types_pb2.SOURCE_RECYCLED,
        types_pb2.SOURCE_POOL,
        types_pb2.SOURCE_PRIOR,
    ]


@pytest.mark.parametrize("sources", ["recycling", "", "pool,,prior"])
def test_a_source_that_there_is_not_is_wrong_usage_and_names_the_flag(sources: str) -> None:
    result = runner.invoke(app, ["generate", "hello", "--address", NO_SERVER, "--sources", sources])
    assert result.exit_code == 2
    message = " ".join(result.stderr.replace("│", " ").split())
    assert "Invalid value for --sources" in message
    assert "sources must be one of target, draft, prior" in message


def test_a_flag_of_two_words_may_be_said_no_to(verifier: FakeVerifier) -> None:
    flags = ["--method", "best-first", "--no-shared-noise", "--method-param", "num_children=2"]
    assert runner.invoke(app, ["generate", "hello", "--address", verifier.address, *flags]).exit_code == 0
    speculation = verifier.requests[0].speculation
    assert speculation.method == types_pb2.METHOD_BEST_FIRST
    assert speculation.HasField("shared_noise")
    assert not speculation.shared_noise
    assert not speculation.allow_fallback
    assert speculation.best_first == types_pb2.BestFirstParams(num_children=2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--method-param budget=3", "needs a --method with parameters of its own (card, saguaro, double"),
        ("--method pearl --method-param budget=3", "needs a --method with parameters of its own"),
        ("--method card --method-param beam_width", "must be NAME=VALUE, got 'beam_width'"),
        ("--method card --method-param width=3", "must name one of beam_width, num_children, correction"),
        ("--method card --method-param beam_width=wide", "beam_width must be a whole number, got 'wide'"),
        ("--method card --method-param beam_width=99999999999", "card.beam_width: "),
        ("--method card --method-param correction=maybe", "correction must be true or false, got 'maybe'"),
        ("--method saguaro --method-param exponent=big", "exponent must be a number, got 'big'"),
        (
            "--method saguaro --method-param fan_out=wide",
            "fan_out must be one of geometric, uniform, given, got 'wide'",
        ),
        ("--method double --method-param tiers=prior,all", "tiers must be one of target, draft, prior, "),
        ("--method card --method-param beam_width=1 --method-param beam-width=2", "must name beam_width once"),
    ],
)
def test_a_wrong_method_parameter_names_flag_rule_and_value(flags: str, message: str) -> None:
    result = runner.invoke(app, ["generate", "hello", "--address", NO_SERVER, *flags.split()])
    assert result.exit_code == 2
    assert "Invalid value for --method-param" in result.stderr
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_an_error_of_the_server_is_one_line(verifier: FakeVerifier) -> None:
    def refuses(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p must be in (0, 1], got 2")
        yield GenerateResponse()

    verifier.script = refuses
    result = runner.invoke(app, ["generate", "hello", "--top-p", "2", "--address", verifier.address])
    assert result.exit_code == 2
    assert result.stderr == "error: --top-p must be in (0, 1], got 2 (INVALID_ARGUMENT)\n", "as it was typed"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("sampling.stop_token_ids[1] must be below 2048", "--stop-token-id[1] must be below 2048"),
        ("speculation.retrieval_params.scope must be unset", "--retrieval-scope must be unset"),
        ("speculation.retrieval_params.remote needs a datastore", "--retrieval-remote needs a datastore"),
        (
            "speculation.retrieval_params must be unset",
            "--retrieval-scope, --contribute, --sources or --retrieval-remote must be unset",
        ),
        ("speculation.saguaro.bias must be 1", "--method-param bias must be 1"),
        ("prediction must be empty unless speculation.retrieval is true", "unless --retrieval is true"),
        ("structured_outputs.json: no schema", "--json-schema: no schema"),
        ("the speculation. And more", "the speculation. And more"),
    ],
)
def test_fields_are_told_by_their_flags(message: str, words: str) -> None:
    assert with_flags_for_fields(message).endswith(words)


def test_each_field_of_a_generation_has_a_flag_by_which_it_is_told() -> None:
    flags = runner.invoke(app, ["generate", "--help-all"]).stdout
    groups: dict[str, Descriptor] = {
        "sampling": types_pb2.SamplingParams.DESCRIPTOR,
        "report": verifier_pb2.ReportParams.DESCRIPTOR,
        "speculation": types_pb2.SpeculationParams.DESCRIPTOR,
        "speculation.retrieval_params": types_pb2.RetrievalParams.DESCRIPTOR,
    }
    for group, descriptor in groups.items():
        for field in descriptor.fields:
            if field.name not in METHOD_MESSAGES and field.name != "retrieval_params":
                flag = with_flags_for_fields(f"{group}.{field.name}")
                assert re.search(rf"{flag}\b", flags), flag


def test_a_seed_that_does_not_fit_is_wrong_usage() -> None:
    assert runner.invoke(app, ["generate", "hello", "--seed", "-1", "--address", NO_SERVER]).exit_code == 2


def test_ctrl_c_cancels_the_generation_and_exits_with_130(verifier: FakeVerifier) -> None:
    verifier.script = until_cancelled(verifier)
    command = [sys.executable, "-m", "outrider_cli", "generate", "hello", "--plain", "--address", verifier.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(3) == b"a b"
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == b"interrupted\n"
    assert rest == b"\n"
    assert verifier.ended.wait(10)


def test_json_has_a_line_for_each_chunk_and_the_result(verifier: FakeVerifier) -> None:
    asked = ["--json", "--logprobs", "2", "--echo", "--rounds", "--logprobs-mode", "raw-logits"]
    result = runner.invoke(app, ["generate", "hello", "--address", verifier.address, *asked])
    assert result.exit_code == 0, result.stderr
    *chunks, last = [json.loads(line) for line in result.stdout.splitlines()]
    assert "".join(each["chunk"]["text"] for each in chunks) == last["result"]["text"] == "a b c d"
    assert last["result"]["finish_reason"] in ("length", "stop")
    assert "num_rounds" in last["result"]["summary"]
    report = verifier.requests[0].report
    assert (report.logprobs, report.echo, report.rounds) == (2, True, True)
    assert report.logprobs_mode == verifier_pb2.LOGPROBS_MODE_RAW_LOGITS


@pytest.mark.parametrize("flags", [["--logprobs", "2"], ["--rounds"], ["--echo"], ["--prompt-logprobs", "0"]])
def test_what_a_terminal_has_no_place_for_needs_json(verifier: FakeVerifier, flags: list[str]) -> None:
    result = runner.invoke(app, ["generate", "hello", "--address", verifier.address, *flags])
    assert result.exit_code == 2
    assert f"{flags[0]}" in result.stderr
    assert "needs --json" in result.stderr
    assert not verifier.requests


def test_a_structure_is_a_text_or_that_of_a_file(verifier: FakeVerifier, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    for flags in (["--json-schema", f"@{schema}"], ["--regex", "[a-z]+"], ["--choice", "yes", "--choice", "no"]):
        assert runner.invoke(app, ["generate", "hello", "--address", verifier.address, *flags]).exit_code == 0
    given = [request.structured_outputs for request in verifier.requests]
    assert (given[0].json, given[1].regex) == ('{"type": "integer"}', "[a-z]+")
    assert list(given[2].choice.choices) == ["yes", "no"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--json-schema", "{}", "--regex", "a"], "only one of --json-schema, --regex"),
        (["--grammar", "@/nowhere/at/all"], "--grammar: cannot read /nowhere/at/all: No such file or directory\n"),
        (["--json-schema", f"@{sys.executable}"], f"--json-schema: {sys.executable} is not UTF-8 (byte "),
        (["--logit-bias", "5"], "must be TOKEN_ID=BIAS, got '5'"),
    ],
)
def test_a_wrong_structure_or_bias_is_named(verifier: FakeVerifier, flags: list[str], words: str) -> None:
    result = runner.invoke(app, ["generate", "hello", "--address", verifier.address, *flags], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_commands_leave_the_temperature_to_the_model(verifier: FakeVerifier, command: str) -> None:
    prompt = ["hello"] if command == "generate" else []
    assert runner.invoke(app, [command, *prompt, "--address", verifier.address], input="hi\n/exit\n").exit_code == 0
    assert not verifier.requests[0].sampling.HasField("temperature")


def test_an_included_model_is_named_a_toy(verifier: FakeVerifier) -> None:
    words = "is a toy of 5 M parameters"
    command = ["generate", "hello", "--address", verifier.address]
    assert words not in runner.invoke(app, command).stderr
    verifier.model_id = "demo/target"
    result = runner.invoke(app, command)
    assert f"demo/target {words}" in result.stderr
    assert result.stdout == "a b c d\n"
    assert words not in runner.invoke(app, [*command, "--plain"]).stderr


def test_stdin_that_is_not_utf8_names_the_byte(verifier: FakeVerifier) -> None:
    result = runner.invoke(app, ["generate", "-", "--address", verifier.address], input=b"ab\xff")
    assert (result.exit_code, result.stderr) == (2, "error: stdin is not UTF-8 (byte 2)\n")


def test_an_error_in_mid_text_begins_a_line_and_counts_the_tokens(verifier: FakeVerifier) -> None:
    def breaks(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        started, chunk, *_ = a_good_generation(request, context)
        yield from (started, chunk)
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "out of luck")

    verifier.script = breaks
    result = runner.invoke(app, ["generate", "hello", "--max-tokens", "300", "--address", verifier.address])
    assert result.exit_code == 1
    assert result.stdout == "a b c\n"
    assert result.stderr == "error: the text ended after 3 of 300 tokens: out of luck (PERMISSION_DENIED)\n"


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("http://127.0.0.1:1", "address takes HOST:PORT, without http://"),
        ("10.0.0.1:1", "10.0.0.1:1 is not on this machine: --ca-file is needed for TLS, or --insecure to go without"),
    ],
)
def test_an_address_that_may_not_be_dialled_is_wrong_usage(address: str, rule: str) -> None:
    result = runner.invoke(app, ["generate", "hello", "--address", address])
    assert result.exit_code == 2
    assert rule in result.stderr
