"""A real network between two namespaces: packets are late, lost and counted, and nothing of it is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider_cli.links import namespaces
from outrider_cli.links.direction import BadSetting, LinkSettings
from outrider_cli.links.namespaces import Namespace, WanNotPossible, in_namespace, two_namespaces, why_no_wan
from outrider_cli.links.wan import Wan, running_wan
from outrider_cli.local.process import ManagedProcess

pytestmark = [pytest.mark.slow]
needs_root = pytest.mark.skipif(bool(why_no_wan()), reason=why_no_wan() or "it can be made")

PINGS = """
import socket, sys, time
here, there, count = sys.argv[1:]
with socket.create_server((here, 0)) if there == "-" else socket.create_connection((there, int(here))) as end:
    if there == "-":
        print(end.getsockname()[1], flush=True)
        connection, _ = end.accept()
        while data := connection.recv(4096):
            connection.sendall(data)
        sys.exit()
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(int(count)):
        begun = time.monotonic()
        end.sendall(bytes(1000))
        missing = 1000
        while missing:
            missing -= len(end.recv(missing))
        print(time.monotonic() - begun)
"""
"""An echo server that prints its port, or a client that prints how long each echo took."""


@pytest.fixture
def wan(tmp_path: Path) -> Iterator[Wan]:
    with running_wan(LinkSettings(delay_ms=15), tmp_path) as running:
        yield running


def echoes(wan: Wan, count: int) -> list[float]:
    """Round trips of a kilobyte from the edge to the cloud, one after the other, in seconds."""
    program = [sys.executable, "-c", PINGS]
    server = in_namespace(wan.cloud.name, [*program, wan.cloud.address, "-", "0"])
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        port = serving.stdout.readline().strip()
        client = in_namespace(wan.edge.name, [*program, port, wan.cloud.address, str(count)])
        done = subprocess.run(client, capture_output=True, text=True, check=True, timeout=60)
    return [float(line) for line in done.stdout.split()]


@needs_root
def test_a_round_trip_takes_twice_the_delay_and_bytes_are_counted(wan: Wan) -> None:
    assert min(echoes(wan, 10)) >= 0.03
    report = wan.control.report()
    assert min(report.bytes_up, report.bytes_down) >= 10_000
    assert report.num_lost == 0


@needs_root
def test_the_link_is_told_to_be_otherwise_while_it_runs(wan: Wan) -> None:
    assert wan.control.change(delay_ms=0, rate_up_mbit=1).settings == LinkSettings(rate_up_mbit=1)
    assert min(echoes(wan, 5)) >= 0.008  # a thousand bytes at a megabit a second
    with pytest.raises(BadSetting, match=r"state must be up for packets"):
        wan.control.change(state="cut")


@needs_root
def test_what_is_lost_is_sent_again_by_tcp(wan: Wan) -> None:
    wan.control.change(delay_ms=1, loss=0.1)
    assert len(echoes(wan, 60)) == 60
    assert wan.control.report().num_lost > 0


@needs_root
def test_a_child_lives_in_its_namespace(wan: Wan, tmp_path: Path) -> None:
    child = ManagedProcess(
        "proxy",
        "outrider_cli.links.delay_proxy",
        ["--to", "127.0.0.1:1"],
        tmp_path / "proxy.log",
        listen=f"{wan.edge.address}:0",
        namespace=wan.edge.name,
    )
    try:
        child.start()
        assert child.address.startswith(f"{wan.edge.address}:")
        ours, theirs = (os.readlink(f"/proc/{pid}/ns/net") for pid in ("self", child.pid))
        assert ours != theirs
    finally:
        child.stop()


@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_link_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    names = f"outrider-test-{os.getpid()}-a", f"outrider-test-{os.getpid()}-b"
    flags = ["--names", ",".join(names)]
    link = ManagedProcess("wan", "outrider_cli.links.wan", flags, tmp_path / "log", listen=str(tmp_path / "link"))
    try:
        link.start()
        assert set(names) <= known_namespaces()
        os.kill(link.pid, number)
        link.wait(30)
        assert not set(names) & known_namespaces()
        assert not (tmp_path / "link").exists()
    finally:
        link.kill()
        for name in names:
            namespaces.delete(name)


@needs_root
def test_a_killed_link_is_cleaned_up_by_the_one_who_runs_it(tmp_path: Path) -> None:
    with running_wan(LinkSettings(), tmp_path) as wan:
        names = {wan.cloud.name, wan.edge.name}
        wan.carrier.kill()
        assert names <= known_namespaces()
    assert not names & known_namespaces()


@needs_root
def test_what_a_killed_process_has_left_is_deleted_by_the_next() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    stale = f"outrider-{ended.pid}-0-cloud"
    subprocess.run(["ip", "netns", "add", stale], check=True)
    names = f"outrider-test-{os.getpid()}-c", f"outrider-test-{os.getpid()}-d"
    with two_namespaces(names) as (cloud, _):
        assert cloud == Namespace(names[0], "10.77.0.1")
        assert stale not in known_namespaces()
    assert not set(names) & known_namespaces()


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(WanNotPossible, match=r"needs root|needs Linux"), running_wan(LinkSettings(), tmp_path):
        pass


def known_namespaces() -> set[str]:
    return set(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else set()
