"""`outrider edge` with real parts: it starts, prints its address, and leaves nothing over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outrider_client import BlockingClient
from outrider_client.errors import Unavailable

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "outrider_cli", "edge"]


def test_it_serves_at_once_and_ends_with_an_interrupt(tmp_path: Path) -> None:
    command = [*COMMAND, "--upstream", "127.0.0.1:9", "--listen", "127.0.0.1:0", "--log-folder", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0) as edge:
        try:
            assert edge.stdout is not None
            name, address = edge.stdout.readline().split()
            assert name == "edge"
            assert edge.stderr is not None
            found = {edge.stderr.readline().strip() for _ in range(2)}
            assert found == {"running; Ctrl-C stops", "cloud: not reachable (connection refused), trying"}
            with BlockingClient(address) as client:
                assert client.health()
                with pytest.raises(Unavailable, match=r"the upstream 127\.0\.0\.1:9 is not reachable"):
                    client.info()
            os.killpg(edge.pid, signal.SIGINT)
            assert edge.wait(60) == 130
        finally:
            edge.kill()


def test_a_wrong_address_is_explained() -> None:
    command = [*COMMAND, "--upstream", "nowhere", "--listen", "127.0.0.1:0"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert run.returncode == 1
    assert "error: edge: --upstream: must be HOST:PORT with a port of 1 to 65535, or several with commas" in run.stderr


def test_a_draft_model_that_is_none_ends_it_with_the_reason() -> None:
    command = [*COMMAND, "--upstream", "127.0.0.1:9", "--listen", "127.0.0.1:0", "--model", "demo/nope"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert run.returncode == 2
    assert run.stderr.startswith("error: --model demo/nope: there is no demo model")


def test_the_address_of_the_cloud_must_be_given() -> None:
    run = subprocess.run(COMMAND, capture_output=True, text=True, check=False, timeout=100)
    assert run.returncode == 2
    assert "--upstream" in run.stderr


def test_a_cloud_on_another_machine_is_not_dialled_in_plaintext() -> None:
    command = [*COMMAND, "--upstream", "cloud.example:50051", "--listen", "127.0.0.1:0"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert run.returncode == 1
    assert run.stderr == (
        "error: edge: --upstream: cloud.example:50051 is on another machine: give --ca-file for TLS, or --insecure\n"
    )


def test_files_of_security_reach_the_edge(tmp_path: Path) -> None:
    missing = tmp_path / "none.pem"
    command = [*COMMAND, "--upstream", "cloud.example:50051", "--listen", "127.0.0.1:0", "--ca-file", str(missing)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert run.returncode == 1
    assert "--ca-file: No such file or directory" in run.stderr
