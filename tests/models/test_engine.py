"""The thread that both engines share, with sessions that need no model."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from outrider.models.engine import MAX_FAILED_STEPS, EngineThread
from tests.support.waiting import WAIT_S


class FakeRunner:
    """Stands for a device. An engine that suspects it runs a forward, which fails while `is_broken`."""

    def __init__(self) -> None:
        self.is_broken = False
        self.num_forwards = 0
        self.device = torch.device("cpu")

    def new_cache(self) -> SimpleNamespace:
        return SimpleNamespace(clear=lambda: None)

    def forward(self, segments: object) -> None:
        self.num_forwards += 1
        if self.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class CountingEngine(EngineThread[list[int]]):
    """A session is a list of numbers. A turn takes one number from each that has any, and fails at a negative one."""

    def __init__(
        self, runner: Any, loop: asyncio.AbstractEventLoop | None = None, host: CountingEngine | None = None
    ) -> None:
        super().__init__("counting-engine", runner, loop, host)
        self.steps: queue.Queue[list[int]] = queue.Queue()
        self.num_turns = 0
        self.removed_sessions: list[list[int]] = []
        self.start()

    def turn(self, now: float) -> float | None:
        self.num_turns += 1
        work = [numbers for numbers in self.sessions.values() if numbers]
        if not work:
            return None
        self.step([numbers.pop(0) for numbers in work])
        self.step_done()
        return 0.0

    def step(self, taken: list[int]) -> None:
        if min(taken) < 0:
            raise ValueError("a negative number")
        self.steps.put(taken)

    def removed(self, session: list[int], *, has_failed: bool) -> None:
        self.removed_sessions.append(session)

    def begin_with(self, name: str, *numbers: int) -> threading.Event:
        """Begins a session; the event is set when the engine loses it."""
        failed = threading.Event()
        self.begin(name, lambda: list(numbers), lambda is_own: failed.set())
        return failed

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds the thread between two turns, so that it finds everything that the body posts at once."""
        is_held, is_released = threading.Event(), threading.Event()

        def hold() -> list[int]:
            is_held.set()
            assert is_released.wait(WAIT_S)
            return []

        self.begin("holder", hold, lambda is_own: is_released.set())
        self.close("holder")
        assert is_held.wait(WAIT_S)
        yield
        is_released.set()


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def engine(runner: FakeRunner) -> Iterator[CountingEngine]:
    running = CountingEngine(runner)
    yield running
    running.stop()


def test_sessions_share_steps_for_as_long_as_they_have_work(engine: CountingEngine) -> None:
    with engine.held():
        engine.begin_with("a", 1, 2, 3)
        engine.begin_with("b", 10)
    assert [engine.steps.get(timeout=WAIT_S) for _ in range(3)] == [[1, 10], [2], [3]]


def test_an_action_is_called_with_its_session_between_steps(engine: CountingEngine) -> None:
    with engine.held():
        engine.begin_with("a")
        engine.begin_with("b")
        engine.post("b", lambda numbers: numbers.append(7))
    assert engine.steps.get(timeout=WAIT_S) == [7]


def test_what_is_posted_for_a_session_that_has_ended_is_dropped(engine: CountingEngine) -> None:
    called = threading.Event()
    with engine.held():
        engine.begin_with("a", 1)
        engine.close("a")
        engine.close("a")
        engine.post("a", lambda _: called.set())
        engine.begin_with("b", 5)
    assert engine.steps.get(timeout=WAIT_S) == [5]
    assert not called.is_set()
    assert [1] in engine.removed_sessions
    assert engine.num_sessions == 1


def test_a_session_whose_action_fails_is_lost_alone(engine: CountingEngine) -> None:
    with capture_logs() as logs:
        with engine.held():
            failed, other_failed = engine.begin_with("a", 1), engine.begin_with("b", 2)
            engine.post("a", lambda numbers: numbers.remove(99))
        assert engine.steps.get(timeout=WAIT_S) == [2]
    assert failed.is_set()
    assert not other_failed.is_set()
    assert [1] in engine.removed_sessions
    assert [(line["event"], line["session_id"]) for line in logs] == [("engine.session_failed", "a")]


def test_a_session_that_cannot_be_opened_is_lost_alone(engine: CountingEngine) -> None:
    failed = threading.Event()

    def cannot_open() -> list[int]:
        raise MemoryError

    with engine.held():
        engine.begin("a", cannot_open, lambda is_own: failed.set())
        engine.begin_with("b", 2)
    assert engine.steps.get(timeout=WAIT_S) == [2]
    assert failed.is_set()
    assert list(engine.sessions) == ["b"]


def test_a_step_that_fails_takes_all_sessions_with_it(engine: CountingEngine) -> None:
    with capture_logs() as logs:
        with engine.held():
            failures = [engine.begin_with("a", 1), engine.begin_with("b", -1)]
        assert all(failed.wait(WAIT_S) for failed in failures)
        # A later session is not affected.
        engine.begin_with("c", 3)
        assert engine.steps.get(timeout=WAIT_S) == [3]
    assert list(engine.sessions) == ["c"]
    assert [(line["event"], line["num_sessions"]) for line in logs] == [("engine.step_failed", 2)]


def fail_steps(engine: CountingEngine, num_steps: int) -> None:
    for _ in range(num_steps):
        failed = engine.begin_with("a", -1)
        assert failed.wait(WAIT_S)
    # The engine can be held only between two steps, so it has judged the last one.
    with engine.held():
        pass


def test_a_device_is_at_fault_after_three_failed_steps(engine: CountingEngine, runner: FakeRunner) -> None:
    runner.is_broken = True
    fail_steps(engine, MAX_FAILED_STEPS - 1)
    assert engine.fault() == ""
    assert runner.num_forwards == 0
    fail_steps(engine, 1)
    assert engine.fault() == "3 steps in a row have failed, the last one with RuntimeError"


def test_a_device_that_can_do_a_forward_is_not_at_fault(engine: CountingEngine, runner: FakeRunner) -> None:
    fail_steps(engine, 2 * MAX_FAILED_STEPS)
    assert engine.fault() == ""
    assert runner.num_forwards == 2  # after every three


def test_a_device_that_recovers_is_no_longer_at_fault(engine: CountingEngine, runner: FakeRunner) -> None:
    runner.is_broken = True
    fail_steps(engine, MAX_FAILED_STEPS)
    assert engine.fault()
    engine.begin_with("b", 1)
    assert engine.steps.get(timeout=WAIT_S) == [1]
    with engine.held():
        assert engine.fault() == ""


def test_any_thread_wakes_it(runner: FakeRunner) -> None:
    loop = asyncio.new_event_loop()  # does not run
    engine = CountingEngine(runner, loop=loop)
    for number in range(200):
        engine.begin_with(str(number), number)
        assert engine.steps.get(timeout=WAIT_S) == [number]
    engine.stop()
    loop.close()


def test_stop_ends_the_thread_and_may_be_called_again(engine: CountingEngine) -> None:
    engine.begin_with("a", 1)
    engine.steps.get(timeout=WAIT_S)
    engine.stop()
    engine.stop()
    assert engine.fault() == "the engine's thread has ended"


def test_a_turn_without_work_says_how_long_to_wait(runner: FakeRunner) -> None:
    class Ticking(CountingEngine):
        def turn(self, now: float) -> float | None:
            ticks.put(None)
            return 0.001

    ticks: queue.Queue[None] = queue.Queue()
    engine = Ticking(runner)
    engine.begin_with("a")
    for _ in range(3):
        ticks.get(timeout=WAIT_S)
    engine.stop()


def test_guests_take_turns_on_the_thread_of_their_host(runner: FakeRunner) -> None:
    host = CountingEngine(runner)
    guest, other = CountingEngine(runner, host=host), CountingEngine(runner, host=host)
    for number, engine in enumerate((guest, host, other, guest)):
        engine.begin_with(str(number), number)
        assert engine.steps.get(timeout=WAIT_S) == [number]
    assert {thread.name for thread in threading.enumerate() if "counting" in thread.name} == {"counting-engine"}
    guest.stop()
    assert guest.has_ended
    assert not host.has_ended
    host.begin_with("4", 4)
    assert host.steps.get(timeout=WAIT_S) == [4]
    host.stop()
    assert other.has_ended, "nobody is left to take its turns"
    other.stop()


def test_a_guest_that_fails_a_step_costs_its_host_nothing(runner: FakeRunner) -> None:
    host = CountingEngine(runner)
    guest = CountingEngine(runner, host=host)
    failed = guest.begin_with("a", -1)
    assert failed.wait(WAIT_S)
    host.begin_with("a", 1)
    assert host.steps.get(timeout=WAIT_S) == [1]
    assert not host.has_ended
    host.stop()
