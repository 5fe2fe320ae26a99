"""Lanes: work off the event loop, in which no caller waits for everything that another one has sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from google.rpc import error_details_pb2

from outrider.server.lanes import Lane
from outrider.wire.errors import ResourceExhausted
from tests.support.waiting import until


class Held:
    """Work that runs until it is released, and then reports its name."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._may_end = threading.Event()

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.begun.append(name)
            assert self._may_end.wait(30)
            return name

        return run

    def let_go(self) -> None:
        self._may_end.set()


async def waiting_behind(
    lane: Lane, held: Held, *requests: tuple[str, str, int]
) -> tuple[asyncio.Task[str], list[asyncio.Task[str]]]:
    """A request that runs, and others that wait for its thread: each by caller, name and size."""
    running = asyncio.create_task(lane.run(held.work("first"), "somebody"))
    await until(lambda: held.begun)
    others = []
    for caller, name, num_bytes in requests:
        others.append(asyncio.create_task(lane.run(held.work(name), caller, num_bytes)))
        await asyncio.sleep(0)
    return running, others


def retry_after_s(error: BaseException) -> float:
    assert isinstance(error, ResourceExhausted)
    [detail] = error.details
    assert isinstance(detail, error_details_pb2.RetryInfo)
    return detail.retry_delay.ToTimedelta().total_seconds()


async def test_work_is_done_in_a_thread_and_its_error_is_raised() -> None:
    lane = Lane("counting", 1)
    assert await lane.run(threading.get_ident, "a") != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await lane.run(lambda: 1 // 0, "a")


async def test_callers_take_turns_however_much_one_of_them_has_sent() -> None:
    lane, held = Lane("counting", 1), Held()
    sent = [*(("a", f"a{number}", 1) for number in range(4)), ("b", "b0", 1), ("c", "c0", 1), ("b", "b1", 1)]
    running, others = await waiting_behind(lane, held, *sent)
    held.let_go()
    await asyncio.gather(running, *others)
    assert held.begun == ["first", "a0", "b0", "c0", "a1", "b1", "a2", "a3"]


async def test_beyond_the_bytes_that_may_wait_the_caller_with_most_is_told_to_come_back() -> None:
    lane, held = Lane("counting", 1, max_waiting_bytes=100), Held()
    sent = (("a", "a0", 50), ("a", "a1", 40), ("b", "b0", 30), ("b", "b1", 10))
    running, others = await waiting_behind(lane, held, *sent)
    held.let_go()
    told = await asyncio.gather(running, *others, return_exceptions=True)
    assert [name if isinstance(name, str) else "" for name in told] == ["first", "a0", "", "b0", "b1"]
    assert isinstance(told[2], ResourceExhausted)
    assert retry_after_s(told[2]) > 0


async def test_who_waits_too_long_is_told_to_come_back_and_the_time_of_the_work_begins_after_the_wait() -> None:
    lane, held = Lane("counting", 1, max_wait_s=0.05), Held()
    running, _ = await waiting_behind(lane, held)
    with pytest.raises(ResourceExhausted, match="counting") as refused:
        await lane.run(held.work("late"), "a", timeout_s=0.01)
    assert retry_after_s(refused.value) > 0
    held.let_go()
    await running
    assert held.begun == ["first"]


async def test_work_beyond_its_time_keeps_its_thread_until_it_ends() -> None:
    lane, held = Lane("counting", 1), Held()
    with pytest.raises(TimeoutError):
        await lane.run(held.work("long"), "a", timeout_s=0.01)
    after = asyncio.create_task(lane.run(held.work("after"), "a"))
    await asyncio.sleep(0.02)
    assert held.begun == ["long"]
    held.let_go()
    assert await after == "after"


async def test_who_goes_while_it_waits_takes_no_turn() -> None:
    lane, held = Lane("counting", 1), Held()
    running, (gone, stays) = await waiting_behind(lane, held, ("a", "gone", 1), ("b", "stays", 1))
    gone.cancel()
    held.let_go()
    await asyncio.gather(running, stays)
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert held.begun == ["first", "stays"]
    assert await lane.run(lambda: "free", "c") == "free"
