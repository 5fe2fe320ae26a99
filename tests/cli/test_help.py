"""--help: short, in 80 columns, in words."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from outrider_cli.app import app

COMMANDS = ["generate", "chat", "up", "info", "edge", "demo"]

runner = CliRunner(env={"COLUMNS": "80", "TERM": "dumb", "OUTRIDER_ADDRESS": ""})


def helped(command: str, flag: str = "--help") -> str:
    result = runner.invoke(app, [command, flag])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_names_no_type(command: str) -> None:
    for text in (helped(command), helped(command, "--help-all")):
        assert not re.search(r"<(int|float|str|list|bool)|INTEGER|x>=|<=x", text)
        assert max(map(len, text.splitlines())) <= 80
    assert len(helped(command).splitlines()) <= 50


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("up --port 70000", "'--port': must be less than or equal to 65535"),
        ("up --port x", "'--port': must be a valid integer"),
        ("generate hi --method fast", "'--method': 'fast' is not one of 'off'"),
        ("credentials new --role king", "'--role': 'king' is not one of 'generate'"),
        ("bench serve --num-prompts x", "must be a valid integer"),
    ],
)
def test_a_value_that_a_flag_does_not_take_is_told_in_plain_words(line: str, words: str) -> None:
    result = runner.invoke(app, line.split())
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Value error" not in result.stderr
    assert "Input should" not in result.stderr


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_what_few_need_is_behind_a_flag_of_its_own(command: str) -> None:
    brief, whole = helped(command), helped(command, "--help-all")
    for flag in ("--shared-noise", "--key-file", "--frequency-penalty", "saguaro: "):
        assert flag not in brief
        assert flag in whole
    for flag in ("--temperature", "--max-tokens", "--method", "--help-all"):
        assert flag in brief


@pytest.mark.parametrize("command", ["generate", "chat", "up", "info", "edge"])
def test_help_ends_with_three_examples_that_name_flags_of_the_command(command: str) -> None:
    text = helped(command)
    title, *examples = text.rstrip().splitlines()[-4:]
    assert title == "Examples:"
    assert all(line.startswith("  outrider ") for line in examples)
    own = " ".join(line for line in examples if line.startswith(f"  outrider {command}"))
    assert all(flag in helped(command, "--help-all") for flag in re.findall(r"--[a-z-]+", own))
