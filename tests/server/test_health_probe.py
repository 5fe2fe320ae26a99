"""The program with which probes ask a service for its health."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.server.health_probe import NOT_SERVING, SERVING, UNREACHABLE, main

SERVICE = "outrider.v1.VerifierService"
TIMEOUT = ("--timeout-s", "20")


@pytest.fixture
def servicer() -> health.HealthServicer:
    return health.HealthServicer()


@pytest.fixture
def address(servicer: health.HealthServicer) -> Iterator[str]:
    """The address of a server with that servicer."""
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def status(*arguments: str) -> int:
    """The exit status of the program."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_service_is_asked_by_name(servicer: health.HealthServicer, address: str) -> None:
    servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert status(address, SERVICE, *TIMEOUT) == SERVING == 0
    assert status(address, *TIMEOUT) == NOT_SERVING
    servicer.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert status(address, SERVICE, *TIMEOUT) == NOT_SERVING


def test_a_name_that_the_server_does_not_know_is_not_healthy(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(address, "outrider.v1.NoService", *TIMEOUT) == NOT_SERVING
    assert "NOT_FOUND" in capsys.readouterr().err


def test_a_port_where_nobody_listens_is_unreachable(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        assert status(f"127.0.0.1:{taken.getsockname()[1]}", *TIMEOUT) == UNREACHABLE
    assert "UNAVAILABLE" in capsys.readouterr().err


def test_a_server_that_says_nothing_is_unreachable_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert status(f"127.0.0.1:{silent.getsockname()[1]}", "--timeout-s", "0.2") == UNREACHABLE


@pytest.mark.slow
def test_it_runs_as_a_program_and_without_torch(servicer: health.HealthServicer, address: str) -> None:
    servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    program = f"import sys; from outrider.server.health_probe import ask; print(ask({address!r}, {SERVICE!r}, 20)); "
    ended = subprocess.run(
        [sys.executable, "-m", "outrider.server.health_probe", address, SERVICE, *TIMEOUT], check=True
    )
    assert ended.returncode == SERVING
    heavy = subprocess.check_output(
        [sys.executable, "-c", program + "print({'torch', 'transformers', 'pydantic'} & set(sys.modules))"], text=True
    )
    assert heavy.splitlines() == ["SERVING", "0", "set()"]
