"""`outrider prior build`: which texts become documents; a build that fails leaves no file."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from typer.testing import CliRunner

from outrider.v1 import verifier_pb2_grpc
from outrider.v1.verifier_pb2 import GenerateRequest, GenerateResponse
from outrider_cli.app import app
from outrider_cli.failures import FlagError
from outrider_cli.prior_build import BuildPlan, continue_prompts, documents_of
from outrider_cli.prior_file import read_prior
from outrider_client import Client
from outrider_client.errors import Internal, OutOfRange
from tests.cli.prior_fakes import TOKENIZER_HASH, KnowingVerifier, serving
from tests.support.fake_verifier import a_good_generation, started
from tests.support.services import RunningVerifier, running_verifier

NO_SERVER = "127.0.0.1:1"
PROMPTS = ("def add(", "class Stack:\n    ", "import os\n")

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "OUTRIDER_ADDRESS": ""})


@pytest.fixture
async def real() -> AsyncIterator[RunningVerifier]:
    async with running_verifier(max_num_sessions=2) as verifier:
        yield verifier


@pytest.fixture
def fake() -> Iterator[KnowingVerifier]:
    verifier = KnowingVerifier()
    with serving(lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, server)) as address:
        verifier.address = address
        yield verifier


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (folder := tmp_path / "prompts").mkdir()
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A file to write, in an otherwise empty folder."""
    (folder := tmp_path / "out").mkdir()
    return folder / "prior.bin"


def command(prompts: Path, out: Path, *flags: str) -> list[str]:
    return ["prior", "build", "--from", str(prompts), "--out", str(out), *flags]


def test_the_prompt_is_whole_in_the_first_round_only() -> None:
    outputs = [[(7, 8), (9,), (), (6, 6)], [(), (5,), (), ()]]
    assert list(documents_of([[1, 2, 3, 4, 5], [1]], outputs)) == [
        [1, 2, 3, 4, 5, 7, 8],
        [2, 3, 4, 5, 9],
        [2, 3, 4, 5, 6, 6],
        [1, 5],
    ]


async def test_the_first_round_is_greedy_and_the_others_are_drawn_with_the_seed_of_the_round(
    real: RunningVerifier, prompts: Path, out: Path
) -> None:
    flags = ["--rounds", "3", "--max-tokens", "12", "--seed", "40", "--temperature", "0.9", "--address", real.address]
    result = await asyncio.to_thread(runner.invoke, app, command(prompts, out, *flags))
    assert result.exit_code == 0, result.stderr
    expected = []
    async with Client(real.address) as client:
        for prompt in PROMPTS:
            ids = await client.tokenize(prompt)
            greedy = await client.complete(prompt, temperature=0, max_tokens=12, method="off")
            expected.append([*ids, *greedy.token_ids])
            for seed in (42, 43):
                drawn = await client.complete(prompt, temperature=0.9, seed=seed, max_tokens=12, method="off")
                expected.append([*ids[-4:], *drawn.token_ids])
    prior = read_prior(out)
    assert [list(document) for document in prior.documents] == expected
    assert (prior.header.tokenizer_hash, prior.header.vocab_size, prior.header.model_id, prior.header.rounds) == (
        real.model.tokenizer_hash,
        real.model.vocab_size,
        real.model.model_id,
        3,
    )
    summary = result.stdout.splitlines()[-1]  # the lines before it are the log of a verifier in the same process
    assert summary.startswith(f"{out}: 9 documents, {prior.num_tokens} tokens of {real.model.model_id} (tokenizer ")
    assert re.search(r"\); 0\.\d kB, \d\.\d\d bytes a token$", summary)
    assert re.fullmatch(r"(round \d of 3, \d+ tokens, \d+ tokens/s\n){3}", result.stderr)


async def test_the_file_does_not_depend_on_how_many_run_at_a_time(real: RunningVerifier, out: Path) -> None:
    alone, together = [
        await continue_prompts(real.address, BuildPlan(PROMPTS, rounds=2, max_tokens=8, concurrency=concurrency))
        for concurrency in (1, 5)  # 5: more than the verifier takes
    ]
    assert alone == together


async def test_a_prompt_that_is_too_long_is_an_error_before_anything_is_generated(real: RunningVerifier) -> None:
    room = real.model.max_context_len
    outputs: list[int] = []
    with pytest.raises(OutOfRange, match=f"the prompt 'def add.' has . tokens: with --max-tokens {room}"):
        await continue_prompts(real.address, BuildPlan(PROMPTS, max_tokens=room), outputs.append)
    assert outputs == []


async def test_a_generation_that_fails_is_named_and_ends_the_others(fake: KnowingVerifier) -> None:
    other_runs, other_ended = threading.Event(), threading.Event()

    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        yield started()
        if bytes(request.prompt.token_ids.token_ids) == b"import os\n":
            other_runs.wait(30)
            context.abort(grpc.StatusCode.INTERNAL, "the GPU is on fire")
        context.add_callback(other_ended.set)
        other_runs.set()
        other_ended.wait(30)

    fake.script = script
    with pytest.raises(Internal, match=r"round 1 of the prompt 'import os..': the GPU is on fire"):
        await continue_prompts(fake.address, BuildPlan(("def add(", "import os\n"), max_tokens=4, concurrency=2))
    assert await asyncio.to_thread(other_ended.wait, 10)


def test_a_build_that_fails_leaves_no_file(fake: KnowingVerifier, prompts: Path, out: Path) -> None:
    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        yield started()  # and nothing more

    fake.script = script
    result = runner.invoke(app, command(prompts, out, "--max-tokens", "4", "--address", fake.address))
    assert result.exit_code == 1
    assert "without finishing the generation (INTERNAL)\n" in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(out.parent.iterdir()) == []


async def test_a_verifier_that_is_full_is_asked_again(fake: KnowingVerifier) -> None:
    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        if len(fake.requests) % 3:
            packed = any_pb2.Any()
            packed.Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(nanos=1)))
            full = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="full", details=[packed])
            context.abort_with_status(rpc_status.to_status(full))
        yield from a_good_generation(request, context)

    fake.script = script
    plan = BuildPlan(PROMPTS, rounds=2, max_tokens=4, concurrency=1)
    header, documents = await continue_prompts(fake.address, plan)
    assert header.tokenizer_hash == TOKENIZER_HASH
    assert len(documents) == 6
    assert len(fake.requests) == 18


def test_a_wrong_line_of_the_prompts_is_named_with_its_rule(tmp_path: Path, out: Path) -> None:
    (path := tmp_path / "texts.jsonl").write_text('{"prompt": "a"}\n{"text": "a"}')
    result = runner.invoke(app, command(path, out, "--address", NO_SERVER))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: --from: {path}, line 2: must have the fields of one known format")
    assert result.stderr.endswith("with any others), has text\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rounds", "0"], "--rounds"),
        (["--rounds", "101"], "--rounds"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--concurrency", "0"], "--concurrency"),
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "inf"], "--temperature must be a finite number"),
        (["--temperature", "0"], "--temperature must be above 0 for more than one round"),
        (["--seed", "-1"], "--seed"),
        (["--target", "demo/target"], "--target must be unset with --address"),
        (["--from", "nothing.jsonl"], "--from: nothing.jsonl: No such file"),
        (["--out", "."], "must be a file, is a folder"),
        (["--out", "nothing/prior.bin"], "must be in a folder that exists"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_flag_is_refused_before_anybody_is_asked(
    flags: list[str], message: str, prompts: Path, out: Path
) -> None:
    result = runner.invoke(app, command(prompts, out, "--address", NO_SERVER, *flags))
    assert result.exit_code == 2
    assert message in result.stderr


def test_one_greedy_round_needs_no_temperature() -> None:
    assert BuildPlan(PROMPTS, rounds=1, temperature=0).sampling(1) == {"temperature": 0}
    with pytest.raises(FlagError):
        BuildPlan(PROMPTS, rounds=2, temperature=0)


def test_more_documents_than_a_file_holds_are_refused_before_they_are_generated() -> None:
    with pytest.raises(FlagError, match="--rounds must be at most 52 for 20000 prompts, got '53'"):
        BuildPlan(("a",) * 20_000, rounds=53)


def test_a_verifier_that_does_not_answer_is_named(prompts: Path, out: Path) -> None:
    result = runner.invoke(app, command(prompts, out, "--address", NO_SERVER))
    assert result.exit_code == 3
    assert f"cannot reach a verifier at {NO_SERVER}" in result.stderr
    assert list(out.parent.iterdir()) == []


def test_ctrl_c_ends_the_generations_and_leaves_no_file(fake: KnowingVerifier, prompts: Path, out: Path) -> None:
    is_generating = threading.Event()

    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        yield started()
        is_generating.set()
        fake.ended.wait(30)

    fake.script = script
    program = [sys.executable, "-m", "outrider_cli", *command(prompts, out, "--max-tokens", "4")]
    with subprocess.Popen([*program, "--address", fake.address], stderr=subprocess.PIPE) as process:
        assert is_generating.wait(30)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=30)[1]
    assert (process.returncode, errors) == (130, b"interrupted\n")
    assert fake.ended.wait(10)
    assert list(out.parent.iterdir()) == []


@pytest.mark.slow
@pytest.mark.suite
@pytest.mark.timeout(300)
def test_services_of_its_own_end_with_it_however_it_ends(prompts: Path, out: Path) -> None:
    models = ["--target", "demo/target", "--target-dtype", "float32"]
    program = [sys.executable, "-m", "outrider_cli", *command(prompts, out, *models, "--max-tokens", "16")]
    done = subprocess.run([*program, "--rounds", "2"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(read_prior(out).documents) == 6
    out.unlink()
    with subprocess.Popen([*program, "--rounds", "100"], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"round 1 of 100"), "its models are loaded"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2
        handles = [os.pidfd_open(int(child)) for child in children]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    for handle in handles:
        with pytest.raises(ProcessLookupError):
            signal.pidfd_send_signal(handle, 0)
        os.close(handle)
    assert list(out.parent.iterdir()) == []


@pytest.mark.suite
def test_models_that_cannot_be_served_are_explained(prompts: Path, out: Path) -> None:
    models = ["--target", "demo/nothing"]
    program = [sys.executable, "-m", "outrider_cli", *command(prompts, out, *models)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --target demo/nothing: there is no demo model")
    assert list(out.parent.iterdir()) == []
