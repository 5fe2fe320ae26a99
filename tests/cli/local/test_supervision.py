"""Processes that die are restarted after growing pauses, and given up if they keep dying. The child is a delay
proxy."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider_cli.local import supervision
from outrider_cli.local.process import ManagedProcess, ProcessFailed
from outrider_cli.local.supervision import MAX_QUICK_ENDS, QUICK_S, Supervisor

pytestmark = pytest.mark.slow

ENDED = "the proxy ended by itself (exit status 2)"


@pytest.fixture
def child(tmp_path: Path) -> Iterator[ManagedProcess]:
    proxy = ManagedProcess(
        "proxy", "outrider_cli.links.delay_proxy", ["--to", "127.0.0.1:1"], tmp_path / "log", listen="127.0.0.1:0"
    )
    proxy.start()
    yield proxy
    proxy.kill()


class Clock:
    """A clock that every report advances, so that no pause is waited for."""

    def __init__(self, step_s: float = 100.0) -> None:
        self.now, self.step_s = 0.0, step_s
        self.said: list[str] = []

    def __call__(self) -> float:
        return self.now

    def say(self, text: str) -> None:
        """Takes a report."""
        self.said.append(text)
        self.now += self.step_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def supervised(child: ManagedProcess, clock: Clock, *, is_vital: bool = False) -> Supervisor:
    return Supervisor([child], [child] if is_vital else [], clock.say, clock)


def step_until(supervisor: Supervisor, holds: Callable[[], bool]) -> None:
    """Lets it work until a condition holds."""
    while not holds():
        supervisor.step()


def test_a_killed_process_is_started_anew_at_its_address(child: ManagedProcess, clock: Clock) -> None:
    supervisor = supervised(child, clock)
    address, pid = child.address, child.pid
    os.kill(pid, signal.SIGKILL)
    step_until(supervisor, lambda: bool(clock.said) and child.is_running)
    child.wait_listening()
    assert (child.address, child.pid != pid) == (address, True)
    assert clock.said == ["the proxy was killed (signal 9); started anew in 1 s"]


def test_after_a_long_life_the_pause_is_short(child: ManagedProcess, clock: Clock) -> None:
    supervisor = supervised(child, clock)
    clock.now = QUICK_S
    os.kill(child.pid, signal.SIGTERM)
    step_until(supervisor, lambda: bool(clock.said))
    assert clock.said == ["the proxy was killed (signal 15); started anew"]


def test_a_process_that_ends_by_itself_is_shown_with_the_end_of_its_log(child: ManagedProcess, clock: Clock) -> None:
    supervisor = supervised(child, clock)
    child._arguments = ["--nonsense"]
    child.signal_kill()
    step_until(supervisor, lambda: len(clock.said) == 2)
    assert clock.said[1].startswith(
        "the proxy ended by itself (exit status 2); started anew in 2 s; the end of its log:"
    )
    assert "--to" in clock.said[1]


def test_pauses_grow_until_it_is_given_up(child: ManagedProcess, clock: Clock) -> None:
    supervisor = supervised(child, clock)
    child._arguments = ["--nonsense"]
    child.signal_kill()
    step_until(supervisor, lambda: len(clock.said) == MAX_QUICK_ENDS)
    pauses = [text.partition("started anew in ")[2].partition(" s")[0] for text in clock.said[:-1]]
    assert pauses == ["1", "2", "4", "8"]
    assert clock.said[-1].startswith(f"{ENDED} soon after each of 5 starts, and is given up; the end of its log:")
    assert not child.is_running


def test_the_end_of_the_last_vital_process_is_the_end(child: ManagedProcess, clock: Clock) -> None:
    supervisor = supervised(child, clock, is_vital=True)
    child._arguments = ["--nonsense"]
    child.signal_kill()
    with pytest.raises(ProcessFailed, match="soon after each of 5 starts; the end of its log"):
        supervisor.run()


def test_who_is_killed_on_purpose_stays_away_and_it_is_not_held_against_it(
    child: ManagedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "MAX_QUICK_ENDS", 1)
    clock = Clock(step_s=0.0)
    supervisor = supervised(child, clock)
    supervisor.kill(child, 7.0)
    step_until(supervisor, lambda: bool(clock.said))
    assert clock.said == ["the proxy was killed (signal 9); started anew in 7 s"]
    assert not child.is_running
    supervisor.kill(child, 7.0)  # it does not run: nothing happens
    clock.now = 7.0
    step_until(supervisor, lambda: child.is_running)


def test_others_are_served_in_its_thread(child: ManagedProcess, clock: Clock) -> None:
    supervisor = supervised(child, clock)
    read, write = os.pipe()
    heard: list[bytes] = []
    supervisor.selector.register(read, 1, lambda: heard.append(os.read(read, 1)))
    os.write(write, b"x")
    supervisor.step()
    assert heard == [b"x"]
    os.close(read)
    os.close(write)
