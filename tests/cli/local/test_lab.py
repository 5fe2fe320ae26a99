"""Faults on demand: the socket's answers and access rights, and the effects on processes and links."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider_cli.links.control import LinkControl
from outrider_cli.local.lab import MAX_LINE_BYTES, Lab, LabSocket
from outrider_cli.local.process import ManagedProcess
from outrider_cli.local.stack import LocalStack
from outrider_cli.local.supervision import Supervisor

pytestmark = pytest.mark.slow


class Speculator(ManagedProcess):
    """A process that claims to serve if the test says so."""

    serves = True

    def is_serving(self) -> bool:
        """The test's choice."""
        return self.serves


class Caller:
    """Calls the socket, and lets the supervisor work in between, all in one thread."""

    def __init__(self, path: Path, supervisor: Supervisor) -> None:
        self._connection, self._supervisor = socket.socket(socket.AF_UNIX), supervisor
        self._connection.settimeout(10)
        self._connection.connect(str(path))
        supervisor.step()

    def send(self, line: bytes) -> bytes:
        """Sends bytes and returns the answer; empty if the connection is closed."""
        self._connection.sendall(line)
        self._supervisor.step()
        return self._connection.recv(65536)

    def ask(self, request: Any) -> dict[str, Any]:
        """Sends a request and returns the answer."""
        answer: dict[str, Any] = json.loads(self.send(json.dumps(request).encode() + b"\n"))
        return answer

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()


def proxy(kind: type[ManagedProcess], name: str, folder: Path, *flags: str) -> Any:
    arguments = ["--to", "127.0.0.1:1", *flags]
    return kind(name, "outrider_cli.links.delay_proxy", arguments, folder / f"{name}.log", listen="127.0.0.1:0")


@pytest.fixture
def speculator(tmp_path: Path) -> Iterator[Speculator]:
    process = proxy(Speculator, "speculator", tmp_path)
    process.start()
    yield process
    process.kill()


@pytest.fixture
def stack(speculator: Speculator) -> SimpleNamespace:
    return SimpleNamespace(speculators=[speculator], link=None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lab.sock"


@pytest.fixture
def caller(stack: SimpleNamespace, speculator: Speculator, path: Path) -> Iterator[Caller]:
    supervisor = Supervisor([speculator], [], lambda _: None)
    served = LabSocket(path, Lab(cast(LocalStack, stack), supervisor.kill), supervisor.selector)
    calling = Caller(path, supervisor)
    yield calling
    calling.close()
    served.close()


def test_a_stack_without_a_link_offers_a_kill_alone(caller: Caller) -> None:
    state = {"speculator": "running", "delay_ms": 0.0, "actions": ["kill_speculator"]}
    assert caller.ask({"action": "state"}) == state
    answer = caller.ask({"action": "set_delay", "delay_ms": 40})
    assert answer == {"error": "action set_delay needs a link: `outrider up --lab`"}


def test_a_killed_speculator_is_gone_and_one_that_loads_starts(caller: Caller, speculator: Speculator) -> None:
    speculator.serves = False
    assert caller.ask({"action": "state"})["speculator"] == "starting"
    caller.ask({"action": "kill_speculator"})
    while speculator.is_running:
        caller._supervisor.step()
    assert caller.ask({"action": "state"})["speculator"] == "killed"


def test_a_link_is_made_slow_and_fast_again(caller: Caller, stack: SimpleNamespace, tmp_path: Path) -> None:
    control = tmp_path / "proxy.sock"
    link = proxy(ManagedProcess, "link", tmp_path, "--control", str(control))
    link.start()
    stack.link = LinkControl(control)
    try:
        assert caller.ask({"action": "set_delay", "delay_ms": 40})["delay_ms"] == 40
        assert stack.link.report().settings.delay_ms == 40
        assert caller.ask({"action": "set_delay", "delay_ms": 0})["delay_ms"] == 0
        for wrong in (-1, 1e9, "40", True, None):
            answer = caller.ask({"action": "set_delay", "delay_ms": wrong})
            assert answer["error"].startswith("delay_ms must be a number in [0, 1000], got ")
        assert caller.ask({"action": "state"})["actions"] == ["kill_speculator", "set_delay"]
    finally:
        link.kill()
    assert "error" in caller.ask({"action": "state"})  # without the link there is still an answer


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"[]\n", "a request must be a JSON object, got []"),
        (b'{"action": "explode"}\n', "action must be one of state, kill_speculator, got 'explode'"),
        (b"{}\n", "action must be one of state, kill_speculator, got None"),
        (b"\xff\n", "utf-8"),
        (b"{\n", "Expecting"),
    ],
)
def test_a_wrong_request_is_explained_and_the_next_one_answered(caller: Caller, line: bytes, error: str) -> None:
    assert error in json.loads(caller.send(line))["error"]
    assert caller.ask({"action": "state"})["speculator"] == "running"


def test_a_request_without_an_end_is_cut_off(caller: Caller) -> None:
    for _ in range(MAX_LINE_BYTES // 1024):
        caller._connection.sendall(b"x" * 1024)
        caller._supervisor.step()
    assert caller.send(b"x" * 1024) == b""


def test_nobody_else_may_open_it(caller: Caller, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
