"""The command as a whole: its help, wrong usage, and options that all subcommands share."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider_cli.app import app
from tests.support.fake_verifier import FakeVerifier

ROOT = Path(__file__).parents[2]
IMPORTED_AS = {"grpcio-reflection": "grpc_reflection", "huggingface-hub": "huggingface_hub"}
"""Modules that are not named like their packages."""
COMMANDS = ("generate", "chat", "up", "info", "demo")
NO_SERVER = "127.0.0.1:1"

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "OUTRIDER_ADDRESS": ""})


def test_help_lists_every_command() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(f" {name} " in result.stdout for name in (*COMMANDS, "bench", "draft"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_has_a_line_of_help(command: str) -> None:
    result = runner.invoke(app, [command, "--help-all"])
    assert result.exit_code == 0
    flags = [line for line in result.stdout.splitlines() if line.startswith("  --")]
    assert flags
    for line in flags:
        assert len(line.strip().split("  ", 1)[-1].strip()) > 10, line


@pytest.mark.parametrize("line", ["generate hi --topk 3", "generate hi --method fast", "dance"])
def test_a_wrong_flag_shows_the_usage(line: str) -> None:
    result = runner.invoke(app, line.split())
    assert result.exit_code == 2
    assert "Usage: outrider" in result.stderr


def test_the_address_comes_from_the_environment(verifier: FakeVerifier) -> None:
    assert runner.invoke(app, ["info"], env={"OUTRIDER_ADDRESS": verifier.address}).exit_code == 0


@pytest.mark.parametrize("command", [["generate", "hello"], ["info"], ["chat"]], ids=lambda command: command[0])
def test_nobody_listening_is_one_clear_line(command: list[str]) -> None:
    result = runner.invoke(app, [*command, "--address", NO_SERVER])
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert f"cannot reach a verifier at {NO_SERVER} (connection refused)" in result.stderr
    assert "outrider up" in result.stderr


def test_an_address_of_nobody_is_wrong_usage() -> None:
    for command in (["generate", "hello"], ["info"]):
        result = runner.invoke(app, [*command, "--address", " , "])
        assert result.exit_code == 2
        assert "address must name at least one server" in result.stderr


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ("genrate hi", "'generate'"),
        ("prior lod", "'load'"),
        ("credentials nwe", "'new'"),
        ("generate hi --temprature 1", "--temperature"),
        ("info --adress x", "--address"),
    ],
)
def test_an_unknown_word_names_the_nearest(line: str, nearest: str) -> None:
    result = runner.invoke(app, line.split())
    assert result.exit_code == 2
    assert nearest in result.stderr


BARE = """
import sys
for name in {missing!r}:
    sys.modules[name] = None  # as if it were not installed
from outrider_cli.app import app
from typer.testing import CliRunner
for line in {lines!r}:
    result = CliRunner().invoke(app, line.split())
    print(line, result.exit_code, result.output.strip(), result.exception)
"""


def test_the_command_needs_no_package_of_a_server() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    packages = [
        re.split(r"[\\[<>=]", each)[0] for name in ("server", "models", "datastore", "bench") for each in extras[name]
    ]
    modules = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in packages if name != "outrider"}
    assert {"torch", "numpy", "structlog", "redis", "gguf"} <= modules
    modules -= {"pydantic", "jinja2"}  # typer may also import them
    lines = [
        "--help",
        f"info --address {NO_SERVER}",
        "credentials new --role generate",
        "prior load none.bin",
    ]
    script = BARE.format(missing=sorted(modules), lines=lines)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for line, code in zip(lines, (0, 3, 0, 2), strict=True):
        assert f"{line} {code} " in ended.stdout
    assert "none.bin: No such file or directory" in ended.stdout


@pytest.mark.parametrize("command", ["bench", "draft"])
def test_a_command_without_its_packages_names_the_extra(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"outrider_{command}.app", None)
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 1
    assert result.stderr == f"error: outrider_{command}.app is not installed: pip install -e '.[demo]'\n"
