"""Child processes that fail, say what they are at, take their time or hang. Some are the delay proxy, which starts
quickly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider_cli.local.process import ManagedProcess, ProcessFailed

pytestmark = pytest.mark.slow


@pytest.fixture
def child(tmp_path: Path) -> Iterator[ManagedProcess]:
    proxy = ManagedProcess(
        "proxy", "outrider_cli.links.delay_proxy", ["--to", "127.0.0.1:1"], tmp_path / "log", listen="127.0.0.1:0"
    )
    yield proxy
    proxy.kill()


def test_a_child_that_fails_shows_the_end_of_its_log(child: ManagedProcess) -> None:
    child._arguments = ["--too", "127.0.0.1:1"]
    with pytest.raises(ProcessFailed, match=r"(?s)exit status 2.*unrecognized arguments|required: --to"):
        child.start()


def test_a_child_runs_on_its_core(child: ManagedProcess) -> None:
    core = min(os.sched_getaffinity(0))
    child._cores = [core]
    child.start()
    assert os.sched_getaffinity(child.pid) == {core}


def printing(folder: Path, program: str, **flag_names: str) -> ManagedProcess:
    """A process that runs this program as a module, with the log of an earlier run."""
    (folder / "printing.py").write_text(program)
    log = folder / "printing.log"
    log.write_text("error: --model: of an earlier run\n")
    names = {f"--{name.replace('_', '-')}": flag for name, flag in flag_names.items()}
    return ManagedProcess("printing", "printing", [], log, listen="127.0.0.1:0", flag_names=names)


def test_a_child_that_refuses_a_flag_is_told_in_the_words_of_who_typed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    refusing = printing(
        tmp_path,
        "import sys; print('loading', file=sys.stderr)\n"
        "sys.exit('error: --peer-ca (or OUTRIDER_EDGE_PEER_CA): no such file, see --peer-ca-file')",
        peer_ca="--ca-file",
    )
    with pytest.raises(ProcessFailed) as failed:
        refusing.start()
    assert str(failed.value) == "printing: --ca-file: no such file, see --peer-ca-file"
    refusing.kill()


def test_the_log_of_an_earlier_run_is_not_this_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    silent = printing(tmp_path, "raise SystemExit(3)")
    with pytest.raises(ProcessFailed) as failed:
        silent.start()
    assert str(failed.value) == "printing ended before it listened (exit status 3); the end of its log:\n"
    silent.kill()


def test_what_a_child_prints_behind_its_address_is_read_in_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    talking = printing(tmp_path, "print('listening 127.0.0.1:7\\ncloud: away'); print('cloud: back')")
    talking.start()
    assert (talking.address, list(talking.further_lines())) == ("127.0.0.1:7", ["cloud: away", "cloud: back"])
    talking.kill()


def test_a_child_says_what_it_is_at_and_other_lines_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    lines = "listening 127.0.0.1:7\\nstep: reading\\ncloud: away\\nstep: timing\\ncloud: back"
    working, steps = printing(tmp_path, f"print('{lines}')"), list[str]()
    working.start()
    while working.take_steps(10.0, steps.append):
        pass
    assert steps[-1] == "printing: timing"
    assert list(working.further_lines()) == ["cloud: away", "cloud: back"]
    working.kill()


def test_a_child_that_works_may_take_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = "import time\nwhile time.process_time() < 1.5: pass\nprint('listening 127.0.0.1:7')"
    slow = printing(tmp_path, program)
    slow.spawn()
    slow.wait_listening(silence_s=0.6)
    slow.kill()


def test_a_child_that_does_nothing_is_waited_for_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    hanging = printing(tmp_path, "import time; time.sleep(60)")
    hanging.spawn()
    with pytest.raises(ProcessFailed, match="has not begun to listen, and has done nothing for 1 s"):
        hanging.wait_listening(silence_s=1.0)
    hanging.kill()
