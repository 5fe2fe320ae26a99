"""What is waited for is seen: in a line each where there is no terminal, in a spinner where there is one."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from outrider_cli.steps import Steps


def test_without_a_terminal_each_step_is_a_line() -> None:
    shown = StringIO()
    with Steps(Console(file=shown)) as steps:
        steps.show("loading the verifier")
        steps.say("redis: not reachable [refused]")
    assert shown.getvalue() == "loading the verifier\nredis: not reachable [refused]\n"


def test_a_result_is_on_stdout_and_never_in_the_line_of_the_spinner(capsys: pytest.CaptureFixture[str]) -> None:
    shown = StringIO()
    with Steps(Console(file=shown, force_terminal=True, width=80)) as steps:
        steps.show("loading the verifier")
        before = len(shown.getvalue())
        steps.result("verifier   127.0.0.1:50051")
        # The spinner's line is erased before, and drawn anew behind: \x1b[2K is "erase the line".
        assert "\x1b[2K" in shown.getvalue()[before:]
    assert capsys.readouterr().out == "verifier   127.0.0.1:50051\n"
    assert "50051" not in shown.getvalue()
