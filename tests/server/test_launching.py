"""A service as a process: what is told before anything heavy is imported, and an early Ctrl-C."""

from __future__ import annotations

from typing import NoReturn

import pytest

from outrider.security.watched_files import UnusableFile
from outrider.server import process
from outrider.server.process import INTERRUPTED
from outrider.server.run import launch
from outrider.server.settings import ServiceSettings, model_config


class Settings(ServiceSettings):
    model_config = model_config("test")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No arguments, and the logs of the tests stay as they are."""
    monkeypatch.setattr("sys.argv", ["test"])
    monkeypatch.setattr(process, "configure_logs", lambda *_: None)


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


def test_a_file_that_cannot_be_used_is_one_line() -> None:
    def make(settings: Settings) -> NoReturn:
        raise UnusableFile("--peer-ca: no such file")

    with pytest.raises(SystemExit) as ended:
        launch("test", Settings, lambda: make)
    assert ended.value.code == "error: --peer-ca: no such file"
