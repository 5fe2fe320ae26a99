"""Child processes: started, ended, restarted, never left behind. The delay proxy is the child: it starts quickly."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider_cli.local.process import ManagedProcess, ProcessFailed, wait_for_end

pytestmark = pytest.mark.slow

Start = Callable[..., ManagedProcess]


@pytest.fixture
def child(tmp_path: Path) -> Iterator[ManagedProcess]:
    proxy = ManagedProcess(
        "proxy", "outrider_cli.links.delay_proxy", ["--to", "127.0.0.1:1"], tmp_path / "log", listen="127.0.0.1:0"
    )
    yield proxy
    proxy.kill()


def wait_until_gone(pid: int) -> None:
    """Returns when the process has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with selectors.DefaultSelector() as selector:
        selector.register(handle, selectors.EVENT_READ)
        assert selector.select(timeout=30), f"process {pid} is still there"
    os.close(handle)


def test_a_child_says_where_it_listens_and_ends_when_stopped(child: ManagedProcess) -> None:
    child.start()
    assert not child.address.endswith(":0")
    assert child.is_running
    child.stop()
    assert not child.is_running


def test_a_killed_child_starts_again_at_the_same_address(child: ManagedProcess) -> None:
    child.start()
    address, pid = child.address, child.pid
    child.kill()
    child.start()
    assert child.address == address
    assert child.pid != pid


def test_a_child_that_fails_shows_the_end_of_its_log(child: ManagedProcess) -> None:
    child._arguments = ["--too", "127.0.0.1:1"]
    with pytest.raises(ProcessFailed, match=r"(?s)exit status 2.*unrecognized arguments|required: --to"):
        child.start()


def test_a_child_runs_on_its_core(child: ManagedProcess) -> None:
    core = min(os.sched_getaffinity(0))
    child._cores = [core]
    child.start()
    assert os.sched_getaffinity(child.pid) == {core}


def test_the_end_of_a_child_is_noticed(child: ManagedProcess) -> None:
    child.start()
    os.kill(child.pid, signal.SIGKILL)
    assert wait_for_end([child]) is child


def test_a_child_does_not_survive_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = (
        "from outrider_cli.local.process import ManagedProcess; from pathlib import Path; import sys\n"
        f"log, nobody = Path({str(tmp_path / 'log')!r}), '127.0.0.1:1'\n"
        "proxy = 'outrider_cli.links.delay_proxy'\n"
        "child = ManagedProcess('proxy', proxy, ['--to', nobody], log, listen='127.0.0.1:0')\n"
        "child.start(); print(child.pid, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_until_gone(pid)
