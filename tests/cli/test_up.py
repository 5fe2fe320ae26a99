"""`outrider up` with real services: it starts, serves, and leaves nothing over."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider import models
from outrider_cli.app import app
from outrider_cli.links.direction import LinkSettings
from outrider_cli.local.process import ProcessFailed
from outrider_cli.local.stack import LocalStack, StackConfig
from outrider_cli.models import draft_for
from outrider_client import BlockingClient
from outrider_client.errors import Unauthenticated
from tests.support.waiting import until_true

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMMAND = [sys.executable, "-m", "outrider_cli"]
VERIFIER = ["--target", "demo/target", "--target-dtype", "float32", "--port", "0"]
SMALL = [*VERIFIER, "--http-port", "0"]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`outrider up` with a small target; its logs are kept for a failing test."""
    command = [*COMMAND, "up", *SMALL, "--log-folder", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, process_group=0
    ) as process:
        yield process
        process.kill()


def addresses(process: subprocess.Popen[str]) -> dict[str, str]:
    """What the command printed about its services, up to the last of these lines; returns when all of them serve."""
    assert process.stdout is not None
    found: dict[str, str] = {}
    while "redis" not in found:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        name, address = line.split()
        found[name] = address
    return found


def children_of(pid: int) -> list[int]:
    """Process ids of the direct children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> str:
    """The command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def ask_lab(gateway: str, **request: Any) -> dict[str, Any]:
    """Asks the page's laboratory for its state, or to break something."""
    data = json.dumps(request).encode() if request else None
    asked = urllib.request.Request(f"http://{gateway}/page/lab", data, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        state: dict[str, Any] = json.load(answer)
    return state


def opened(exits: ExitStack, pid: int) -> int:
    """A handle that becomes readable when the process ends, even if another process gets its id."""
    handle = os.pidfd_open(pid)
    exits.callback(os.close, handle)
    return handle


@pytest.mark.suite
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_no_process_outlives_the_command(up: subprocess.Popen[str], number: signal.Signals) -> None:
    found = addresses(up)
    assert list(found) == ["verifier", "gateway", "speculator", "datastore", "redis"]
    children = children_of(up.pid)
    assert len(children) == 5
    with ExitStack() as exits:
        selector = exits.enter_context(selectors.DefaultSelector())
        for child in children:
            selector.register(opened(exits, child), selectors.EVENT_READ)
        os.killpg(up.pid, number)  # as the terminal does
        assert up.wait(60) == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
        while selector.get_map():
            ready = selector.select(timeout=30)
            assert ready, "a child is still there"
            for key, _ in ready:
                selector.unregister(key.fileobj)
    assert up.stderr is not None
    last_word = {signal.SIGINT: "interrupted\n", signal.SIGTERM: "ended by SIGTERM\n", signal.SIGKILL: ""}[number]
    assert up.stderr.read().endswith(last_word)


@pytest.mark.suite
def test_it_generates_the_same_text_with_and_without_drafts(up: subprocess.Popen[str]) -> None:
    address = addresses(up)["verifier"]
    with BlockingClient(address) as client:
        off, waiting, *others = (
            client.complete("def add(", method=method, temperature=0.7, seed=1, max_tokens=48, ignore_eos=True)
            for method in ("off", "speculative", "pearl", "retrieval")
        )
        assert off.summary.num_rounds == 48
        assert {result.text for result in (waiting, *others)} == {off.text}
        assert waiting.acceptance_length > 1  # the others do not wait for a drafter that is slower than this target
    shown = subprocess.run(
        [*COMMAND, "generate", "def add(", "--seed", "1", "--temperature", "0.7", "--max-tokens", "48", "--ignore-eos"],
        env={**os.environ, "OUTRIDER_ADDRESS": address},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == off.text + "\n"
    assert shown.stderr.startswith("48 tokens, ")


@pytest.mark.suite
def test_its_curl_line_works_and_what_is_killed_is_started_anew(tmp_path: Path) -> None:
    command = [*COMMAND, "up", *SMALL, "--no-datastore", "--lab", "--log-folder", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            lines = [process.stdout.readline() for _ in range(9)]
            gateway = next(line.split()[1] for line in lines if line.startswith("gateway"))
            assert f"api:  http://{gateway}/v1\n" in lines
            curl = next(line.removeprefix("try:").strip() for line in lines if "curl" in line)
            answer = json.loads(subprocess.run(curl, shell=True, capture_output=True, check=True).stdout)
            assert answer["choices"][0]["text"]
            steps = list(iter(lambda: process.stderr.readline().strip(), "running; Ctrl-C stops"))
            assert steps[1] == "starting the services, which import their libraries"
            assert steps[-1] == "waiting for the gateway"
            assert "verifier: timing forwards" in steps

            assert ask_lab(gateway) == {
                "speculator": "running",
                "delay_ms": 0,
                "actions": ["kill_speculator", "set_delay"],
            }
            assert ask_lab(gateway, action="set_delay", delay_ms=3)["delay_ms"] == 3
            ask_lab(gateway, action="kill_speculator")
            assert process.stderr.readline() == "the speculator was killed (signal 9); started anew in 5 s\n"
            assert ask_lab(gateway)["speculator"] == "killed"

            (verifier,) = [pid for pid in children_of(process.pid) if "outrider.verifier" in command_of(pid)]
            os.kill(verifier, signal.SIGKILL)
            assert process.stderr.readline().startswith("the verifier was killed (signal 9); started anew")
            until_true(lambda: ask_lab(gateway)["speculator"] == "running")
            # The gateway's client waits for the verifier, and resumes its generation.
            until_true(lambda: subprocess.run(f"{curl} --fail", shell=True, capture_output=True).returncode == 0)
            again = json.loads(subprocess.run(curl, shell=True, capture_output=True, check=True).stdout)
            assert again["choices"][0]["text"] == answer["choices"][0]["text"]
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        for flag, otherwise in (("--port", ""), ("--http-port", ", and --no-gateway does without")):
            flags = ["--port", "0", "--http-port", "0", flag, port, "--log-folder", str(tmp_path / "logs")]
            result = CliRunner(env={"TERM": "dumb"}).invoke(app, ["up", *flags])
            assert result.exit_code == 1
            assert result.stderr == f"error: port {port} is in use. {flag} 0 takes a free one{otherwise}\n"
    assert not (tmp_path / "logs").exists()


@pytest.mark.suite
def test_a_model_of_ones_own_with_a_chat_template_is_shown_as_one_to_chat_with(tmp_path: Path) -> None:
    shutil.copytree(Path(models.__file__).parent / "demo" / "target", tmp_path / "mine")
    flags = ["--target", str(tmp_path / "mine"), "--port", "0", "--http-port", "0", "--no-datastore"]
    with subprocess.Popen([*COMMAND, "up", *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline().strip()]
            while not lines[-1].startswith("open"):
                lines.append(process.stdout.readline().strip())
                assert process.poll() is None
            assert not any(line.startswith("speculator") for line in lines)
            address = lines[0].split()[1]
            assert f"try:  outrider chat --address {address}" in lines
            curl = next(line.removeprefix("try:").strip() for line in lines if "curl" in line)
            assert "/v1/chat/completions" in curl
            answer = json.loads(subprocess.run(curl, shell=True, capture_output=True, check=True).stdout)
            assert answer["choices"][0]["message"]["content"]
            short = curl.replace(str(tmp_path / "mine"), "mine")
            answer = json.loads(subprocess.run(short, shell=True, capture_output=True, check=True).stdout)
            assert answer["model"] == "mine"
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130


@pytest.mark.suite
def test_with_credentials_its_lines_work_and_a_call_without_a_token_does_not(tmp_path: Path) -> None:
    entries, token = tmp_path / "callers.json", tmp_path / "token"
    made = CliRunner().invoke(app, ["credentials", "new", "--role", "generate", "--add", str(entries)])
    token.write_text(made.stdout)
    flags = ["--credentials", str(entries), "--token-file", str(token), "--no-datastore", "--no-speculator"]
    with subprocess.Popen([*COMMAND, "up", *SMALL, *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline().strip() for _ in range(6)]
            curl = next(line.removeprefix("try:").strip() for line in lines if "curl" in line)
            answer = json.loads(subprocess.run(curl, shell=True, capture_output=True, check=True).stdout)
            assert answer["choices"][0]["text"]
            with BlockingClient(lines[0].split()[1]) as client, pytest.raises(Unauthenticated):
                client.complete("def add(", max_tokens=1)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130


@pytest.mark.suite
def test_a_fleet_prints_all_addresses_and_those_that_clients_dial(tmp_path: Path) -> None:
    flags = [
        "--no-datastore",
        "--no-gateway",
        "--num-verifiers",
        "2",
        "--num-speculators",
        "2",
        "--log-folder",
        str(tmp_path),
    ]
    with subprocess.Popen([*COMMAND, "up", *VERIFIER, *flags], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().rsplit(maxsplit=1) for _ in range(5)]
        names, found = zip(*lines, strict=True)
        assert names == ("verifier", "verifier-2", "speculator", "speculator-2", "clients dial")
        assert found[4] == ",".join(found[:2])
        with BlockingClient(found[4]) as client:
            assert client.complete("def add(", max_tokens=4).num_output_tokens == 4
            assert [speculator.address for speculator in client.info().speculators] == list(found[2:4])
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--delay-ms", "5", "--num-speculators", "2"], "--delay-ms must be unset with several speculators"),
        (["--lab", "--num-speculators", "2"], "--lab must be unset with several speculators"),
        (["--lab", "--no-gateway"], "--lab must be unset with --no-gateway"),
        (["--served-model-name", "mine", "--no-gateway"], "--served-model-name must be unset with --no-gateway"),
        (["--no-datastore", "--redis-url", "redis://:s3cret@a"], "--redis-url must be unset with --no-datastore\n"),
        (["--no-speculator", "--draft", "demo/draft"], "--draft must be unset with --no-speculator"),
        (["--no-speculator", "--num-speculators", "2"], "--num-speculators must be unset without a draft model"),
        (["--target", "a/b", "--drafter", "in-process"], "--drafter must be unset without a draft model (--draft)"),
        (["--drafter", "in-process", "--num-speculators", "2"], "--num-speculators must be unset with --drafter in-pr"),
        (["--drafter", "in-process", "--delay-ms", "5"], "--delay-ms must be unset with --drafter in-process"),
        (["--drafter", "in-process", "--lab"], "--lab must be unset with --drafter in-process"),
        (
            ["--host", "0.0.0.0"],
            "--host must be of this machine alone, like 127.0.0.1, or there must be --insecure",
        ),
        (["--credentials", __file__], "--credentials needs --token-file"),
        (["--device", "gpu"], "--device must be cpu, cuda, cuda:NUMBER, xpu, xpu:NUMBER or mps, got 'gpu'"),
        (["--target-dtype", "fp16"], "'fp16' is not one of 'auto', 'bfloat16', 'float32'"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: list[str], message: str) -> None:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["up", *flags])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"num_verifiers": 0}, "num_verifiers and num_speculators must be at least 1"),
        ({"num_verifiers": 2, "edge": True}, "num_verifiers must be 1 with an edge"),
        ({"num_speculators": 2, "link": LinkSettings()}, "num_speculators must be 1 with a link"),
        ({"drafter": "in-process", "draft": None}, "draft must be set with drafter in-process"),
        ({"drafter": "in-process", "link": LinkSettings()}, "drafter must be speculator with an edge, a link"),
        ({"drafter": "in-process", "speculator_arguments": ("--x",)}, "drafter must be speculator with an edge, a l"),
    ],
)
def test_a_stack_that_cannot_be_is_refused(wrong: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        StackConfig(**wrong)


def test_with_the_draft_model_in_process_one_process_drafts_and_verifies(tmp_path: Path) -> None:
    flags = ["--drafter", "in-process", "--no-datastore", "--no-gateway", "--log-folder", str(tmp_path)]
    with subprocess.Popen([*COMMAND, "up", *VERIFIER, *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            name, address = process.stdout.readline().split()
            assert name == "verifier"
            [verifier] = children_of(process.pid)
            assert os.sched_getaffinity(verifier) == os.sched_getaffinity(0), "it is bound to no core"
            with BlockingClient(address) as client:
                result = client.complete("def add(", method="speculative", max_tokens=32, ignore_eos=True)
                assert result.summary.num_accepted_tokens > 0
                assert [each.address for each in client.info().speculators] == ["in-process"]
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("flags", "device", "told"),
    [
        ([], "xpu:9", ["2 processes take turns on xpu:9, and each takes of its", "--drafter in-process", "MPS"]),
        (["--num-speculators", "2"], "xpu", ["3 processes take turns on xpu,", "--drafter in-process", "MPS"]),
        (["--no-speculator", "--num-verifiers", "2"], "xpu", ["2 processes take turns on xpu,", "MPS"]),
        (["--drafter", "in-process", "--num-verifiers", "2"], "xpu", ["2 processes take turns on xpu,", "MPS"]),
        (["--drafter", "in-process"], "xpu", []),
        (["--no-speculator"], "xpu", []),
        ([], "cpu", []),
    ],
)
def test_several_processes_on_one_device_are_told_what_helps(
    flags: list[str], device: str, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ProcessFailed("there is no such device")

    monkeypatch.setattr(LocalStack, "start", fail)
    arguments = ["up", "--device", device, "--port", "0", "--no-gateway", "--no-datastore", *flags]
    result = CliRunner(env={"TERM": "dumb"}).invoke(app, arguments)
    phrases = ("processes take turns on", "--drafter in-process", "MPS")
    assert [phrase in result.stderr for phrase in phrases] == [
        any(phrase in each for each in told) for phrase in phrases
    ]
    assert all(each in result.stderr for each in told)
    assert "there is no such device" in result.stderr


def test_a_service_that_cannot_start_is_explained() -> None:
    command = [*COMMAND, "up", *VERIFIER, "--no-gateway", "--no-datastore"]
    wrong = {**os.environ, "OUTRIDER_VERIFIER_MAX_ROWS": "none"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=wrong)
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.splitlines()[-1].startswith("error: verifier: --max-rows: Input should be a valid integer")


@pytest.fixture
def other_draft(tmp_path: Path) -> Path:
    """A draft model whose tokenizer differs from the demo target's: two tokens have changed places."""
    folder = tmp_path / "draft"
    shutil.copytree(Path(models.__file__).parent / "demo" / "draft", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["!"], ids["#"] = ids["#"], ids["!"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_models_that_cannot_work_are_refused_before_anything_starts(other_draft: Path, tmp_path: Path) -> None:
    difference = "vocab sizes 2048 and 2048; the first tokens that differ are 1: '!' and '#'"
    refused = {
        ("--target", "demo/nothing"): "--target demo/nothing: there is no demo model 'demo/nothing'",
        ("--target", "./nothing"): "--target ./nothing: no such folder",
        ("--target", "nothing", "--draft", "/no"): "--target nothing: no such folder and no demo model; a name on the",
        ("--draft", str(other_draft)): f"--draft must be a model with the target's tokenizer, got '{other_draft}' for "
        f"'demo/target-100m': {difference}",
    }
    with socket.create_server(("127.0.0.1", 0)) as listener:  # flags are checked before the port, which is taken
        port = str(listener.getsockname()[1])
        for flags, message in refused.items():
            result = CliRunner().invoke(app, ["up", *flags, "--port", port, "--log-folder", str(tmp_path / "logs")])
            assert (result.exit_code, result.stderr.startswith(f"error: {message}")) == (2, True), result.stderr
    assert not (tmp_path / "logs").exists()


def test_a_target_of_ones_own_has_no_demo_draft(monkeypatch: pytest.MonkeyPatch, other_draft: Path) -> None:
    def fail(*_: object) -> None:
        raise ProcessFailed("this is as far as it comes")

    monkeypatch.setattr(LocalStack, "start", fail)
    arguments = ["up", "--target", str(other_draft), "--port", "0", "--no-gateway", "--no-datastore"]
    result = CliRunner(env={"TERM": "dumb"}).invoke(app, arguments)
    assert "no --draft: drafts come from retrieval alone; a small model with the same tokenizer" in result.stderr
    assert "the draft model" not in result.stderr
    assert draft_for("demo/target-300m", None) == "demo/draft"


@pytest.mark.parametrize("url", ["nonsense", "http://127.0.0.1:6379", "redis://:s3cret@127.0.0.1:port/0", ""])
def test_what_is_no_url_of_a_redis_is_refused_before_anything_starts(url: str) -> None:
    result = CliRunner(env={"TERM": "dumb"}).invoke(app, ["up", "--redis-url", url])
    assert result.exit_code == 2
    assert "--redis-url (or REDIS_URL): must be a redis://, rediss:// or unix:// URL" in result.stderr
    assert "s3cret" not in result.stderr


def test_wrong_flags_end_it_at_once_and_a_redis_that_is_not_there_is_told_of() -> None:
    flags = ["--redis-url", "redis://127.0.0.1:9/0", "--port", "0", "--no-gateway"]
    run = subprocess.run([*COMMAND, "up", *flags, "--device", "gpu"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr == "error: --device must be cpu, cuda, cuda:NUMBER, xpu, xpu:NUMBER or mps, got 'gpu'\n"
    # Errors that only the services themselves find.
    environ = {**os.environ, "OUTRIDER_DATASTORE_LOG_LEVEL": "loud"}
    command = [*COMMAND, "up", *flags]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environ)
    assert run.returncode == 1
    assert run.stderr.startswith("redis: not reachable (connection refused); retrieval keeps to memory\n")
