"""A service as a process: what it prints before heavy imports, and an early Ctrl-C."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import NoReturn

import pytest

from outrider.security.watched_files import UnusableFile
from outrider.server import process
from outrider.server.process import INTERRUPTED, SWITCH_INTERVAL_S, is_taken
from outrider.server.run import launch
from outrider.server.settings import ServiceSettings, model_config


class Settings(ServiceSettings):
    model_config = model_config("outrider.test")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No arguments; logs and threads of the tests are not changed."""
    monkeypatch.setattr("sys.argv", ["test"])
    monkeypatch.setattr(process, "configure_logs", lambda *_: None)
    monkeypatch.setattr(process, "replace_stderr", lambda: None)
    interval_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval_s)


def test_a_wrong_flag_is_told_before_anything_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["test", "--nonsense"])
    with pytest.raises(SystemExit) as ended:
        launch("test", Settings, lambda: pytest.fail("imported"))
    assert ended.value.code not in (0, None)
    assert "--nonsense" in capsys.readouterr().err


def test_an_interrupt_while_it_imports_is_no_traceback() -> None:
    def load() -> NoReturn:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        launch("test", Settings, load)
    assert ended.value.code == INTERRUPTED


def test_its_threads_do_not_wait_long_for_each_other() -> None:
    def load() -> NoReturn:
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
        raise SystemExit(7)

    with pytest.raises(SystemExit) as ended:
        launch("test", Settings, load)
    assert ended.value.code == 7


def test_a_file_that_cannot_be_used_is_one_line() -> None:
    def make(settings: Settings) -> NoReturn:
        raise UnusableFile("--peer-ca: no such file")

    with pytest.raises(SystemExit) as ended:
        launch("test", Settings, lambda: make)
    assert ended.value.code == "error: --peer-ca: no such file"


def test_a_port_that_is_taken_is_told_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        for flag in ("--listen", "--metrics-listen"):
            monkeypatch.setattr("sys.argv", ["test", flag, address])
            with pytest.raises(SystemExit) as ended:
                launch("test", Settings, lambda: pytest.fail("imported"))
            port = listener.getsockname()[1]
            assert ended.value.code == f"error: {flag}: port {port} is in use, got {address!r}"


def test_what_can_be_listened_on_is_not_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert is_taken(address)
        assert is_taken(f"0.0.0.0:{listener.getsockname()[1]}")
    assert not is_taken(address)
    assert not any(map(is_taken, ("127.0.0.1:0", "no.such.host.invalid:80", "")))


@pytest.mark.slow
def test_a_model_that_still_loads_does_not_hold_up_the_end() -> None:
    program = (
        "import asyncio, threading, time\n"
        "from outrider.models.threads import in_own_thread\n"
        "from outrider.server import process\n"
        "from tests.server.test_launching import Settings\n"
        "async def serve(settings):\n"
        "    loading = asyncio.create_task(in_own_thread(threading.Event().wait))\n"
        "    await asyncio.sleep(0); loading.cancel(); print('ended')\n"
        "process.run_process('test', Settings, lambda: serve)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr
