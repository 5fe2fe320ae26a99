"""Services whose stderr accepts no lines, or only some, serve and end as well as others."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO
from urllib.request import urlopen

import httpx
import pytest

from outrider_cli.local.redis import running_redis
from outrider_client import BlockingClient, OutriderError
from tests.support.bad_stderr import KINDS, Kind, bad_stderr, started
from tests.support.waiting import until_true

pytestmark = [pytest.mark.suite, pytest.mark.timeout(300)]

ON_ONE_CORE = ("--dtype", "float32", "--num-threads", "1", "--kv-cache-tokens", "8192")
NUM_TEXTS = 30
END_TIMEOUT_S = 60.0


class Services:
    """All services of a stack, each with a stderr of the same kind."""

    def __init__(self, kind: Kind, exits: ExitStack) -> None:
        self._kind, self._exits = kind, exits
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._metrics: dict[str, str] = {}

    def start(self, name: str, *flags: str, module: str = "") -> str:
        """Starts a service, and returns its address. `module`: its package, if it differs from the name."""
        options = self._exits.enter_context(bad_stderr(self._kind))
        command = [
            sys.executable,
            "-m",
            module or f"outrider.{name}",
            "--listen",
            "127.0.0.1:0",
            "--log-level",
            "debug",
        ]
        command += ["--metrics-listen", "127.0.0.1:0", *flags]
        process = self._exits.enter_context(started(command, **options))
        self._processes[name] = process
        address = said(process.stdout, "listening")
        self._metrics[name] = said(process.stdout, "metrics")
        return address

    def num_dropped(self, name: str) -> float:
        """Returns how many lines the service reports as dropped."""
        with urlopen(f"http://{self._metrics[name]}/metrics", timeout=30) as answer:
            [line] = [
                line for line in answer.read().decode().splitlines() if line.startswith("outrider_log_lines_dropped")
            ]
        return float(line.split()[1])

    def ends(self) -> dict[str, int]:
        """Ends all services, in reverse order of their start. Returns their statuses."""
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGTERM)
            process.wait(END_TIMEOUT_S)
        return {name: process.returncode for name, process in self._processes.items()}


def said(stdout: IO[str] | None, word: str) -> str:
    """Returns the service's next line on stdout."""
    assert stdout is not None
    found, address = stdout.readline().split()
    assert found == word
    return address


@contextmanager
def services(kind: Kind, folder: Path) -> Iterator[tuple[Services, str, str]]:
    """A stack, and the addresses of its verifier and its gateway."""
    with ExitStack() as exits:
        redis_url = exits.enter_context(running_redis(folder))
        running = Services(kind, exits)
        datastore = running.start("datastore", "--redis-url", redis_url)
        speculator = running.start("speculator", "--model", "demo/draft", *ON_ONE_CORE, "--datastore", datastore)
        peers = ("--speculator", speculator, "--datastore", datastore)
        verifier = running.start("verifier", "--model", "demo/target", *ON_ONE_CORE, *peers)
        gateway = running.start("gateway", "--upstream", verifier, module="outrider_gateway")
        yield running, verifier, gateway


@pytest.mark.parametrize("kind", KINDS)
def test_services_serve_and_end_well_whatever_becomes_of_their_lines(kind: Kind, tmp_path: Path) -> None:
    with services(kind, tmp_path) as (running, verifier, gateway):
        with BlockingClient(verifier) as client:
            until_true(lambda: is_ready(client))
            expected = client.complete("def add(a, b):\n", temperature=0.8, seed=1, max_tokens=8, method="off").text
            for _ in range(NUM_TEXTS):
                generated = client.complete("def add(a, b):\n", temperature=0.8, seed=1, max_tokens=8)
                assert generated.text == expected
            info = client.info()
            assert (info.speculator.connected, info.datastore.connected) == (True, True)
        body = {"model": "demo/target", "prompt": "def add(a, b):\n", "temperature": 0.8, "seed": 1, "max_tokens": 8}
        answer = httpx.post(f"http://{gateway}/v1/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["text"] == expected
        if kind != "unread":  # there lines wait for a reader, and only those that find no room are dropped
            assert all(running.num_dropped(name) for name in ("verifier", "speculator", "datastore"))
        assert running.ends() == dict.fromkeys(("datastore", "speculator", "verifier", "gateway"), 0)


def is_ready(client: BlockingClient) -> bool:
    try:
        return bool(client.info().model.model_id)
    except OutriderError:
        return False
