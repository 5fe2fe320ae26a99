"""`--config`: a file of all services is checked before anything starts, and flags override it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider_cli.app import app
from outrider_client import BlockingClient

FILE = """
[verifier]
model = "demo/target"
listen = "127.0.0.1:0"
max-num-sessions = 9
max-num-rows = 8

[speculator]
max-num-sessions = 5

[gateway]
listen = "127.0.0.1:0"
served-model-name = "file"
"""


def refused(path: Path, text: str, command: str = "up") -> list[str]:
    """The errors of a file, a line for each, without the path."""
    path.write_text(text)
    result = CliRunner(env={"TERM": "dumb"}).invoke(app, [command, "--config", str(path)])
    assert result.exit_code == 2, result.stderr
    return [line.removeprefix("error: ").removeprefix(f"{path}: ") for line in result.stderr.splitlines()]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[verifer]", "[verifer]: there is no such section: did you mean verifier?"),
        ("gateway = 3", "gateway: must be a section, [gateway], got 3"),
        (
            "[verifier]\nmax-num-sesions = 3",
            "[verifier] max-num-sesions: there is no such flag: did you mean max-num",
        ),
        ("[verifier]\nmax_rows = 'many'", "[verifier] max-rows: must be a valid integer, unable to parse string as an"),
        (
            "[speculator]\ndevice = 'gpu'",
            "[speculator] device: must be cpu, cuda, cuda:NUMBER, xpu, xpu:NUMBER or mps",
        ),
        ("[verifier]\ndatastore = 'a:1'", "[verifier] datastore: must be left out, as `outrider up` decides it"),
        ("[verifier]\nlisten = '0.0.0.0:1'", "[verifier] listen: must be 127.0.0.1:PORT, where the other services"),
        ("[gateway]\nlenient = 'maybe'", "[gateway] lenient: must be true or false, got 'maybe'"),
        ("[edge]\nmax-num-sessions = 0", "[edge] max-num-sessions: must be greater than or equal to 1, got 0"),
        ("[verifier]\nmax-rows = true", "[verifier] max-rows: must be a value, got True"),
        ("[verifier]\nmax-rows = 9\nmax_rows = 8", "[verifier] a key is given twice, with - and with _"),
        ("[up]\nnum-verifiers = 0", "[up] num-verifiers: must be greater than or equal to 1"),
        ("[up]\ntarget = 'a/b'", "[up] target: must be left out: it is model of [verifier]"),
    ],
)
def test_what_is_wrong_with_a_file_names_section_key_and_rule(tmp_path: Path, text: str, words: str) -> None:
    [line] = refused(tmp_path / "outrider.toml", text)
    assert line.startswith(words)


def test_all_that_is_wrong_is_told_at_once_without_passwords(tmp_path: Path) -> None:
    text = "[datastore]\nredis-url = 'http://:s3cret@a'\nsession-ttl = 1\n[edge]\nupstream = ''"
    lines = refused(tmp_path / "outrider.toml", text, "edge")
    assert [line.split(":")[0] for line in lines] == [
        "[datastore] session-ttl",
        "[datastore] redis-url",
        "[edge] upstream",
    ]
    assert "s3cret" not in "".join(lines)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "outrider.toml"
    assert refused(path, "a = ?") == [f"--config: {path}: Invalid value (at line 1, column 5)"]
    path.unlink()
    result = CliRunner().invoke(app, ["up", "--config", str(path)])
    assert (result.exit_code, result.stderr) == (2, f"error: --config: {path}: No such file or directory\n")


@pytest.mark.suite
@pytest.mark.timeout(300)
def test_flags_come_before_variables_and_these_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "outrider.toml"
    path.write_text(FILE)
    flags = ["--no-datastore", "--no-speculator", "--served-model-name", "flag", "--log-folder", str(tmp_path)]
    command = [sys.executable, "-m", "outrider_cli", "up", "--config", str(path), *flags]
    environ = {**os.environ, "OUTRIDER_VERIFIER_MAX_NUM_ROWS": "16"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stderr.readline() == f"{path}: [speculator] is not used: there is no speculator\n"
            verifier, gateway = (process.stdout.readline().split()[1] for _ in range(2))
            with BlockingClient(verifier) as client:
                info = client.info()
            assert (info.model.model_id, info.max_num_sessions, info.max_num_rows) == ("demo/target", 9, 16)
            with urllib.request.urlopen(f"http://{gateway}/v1/models", timeout=30) as answer:
                assert [model["id"] for model in json.load(answer)["data"]] == ["demo/target", "flag"]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130


def test_the_file_of_the_documents_is_right(tmp_path: Path) -> None:
    readme = Path(__file__).parent.parent.parent / "clients" / "README.md"
    path = tmp_path / "outrider.toml"
    path.write_text(readme.read_text().partition("```toml\n")[2].partition("```")[0])
    for command in ("up", "edge"):
        result = CliRunner().invoke(app, [command, "--config", str(path), "--device", "gpu"])
        assert result.stderr.startswith("error: --device must be cpu, cuda, "), "as far as that the file is right"
