"""An event loop in which waiting takes no time: its clock jumps to the next timer when nothing else is left."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class JumpingSelector(selectors.DefaultSelector):
    """Passes the time that the loop would wait, instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("everything waits for something that will not come")
        self.now_s += 0.0 if events or timeout is None else max(0.0, timeout)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Uses the clock of its selector."""

    def __init__(self) -> None:
        self.clock = JumpingSelector()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now_s


def work_for(seconds: float) -> None:
    """Advances the time, as work does that blocks the loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.clock.now_s += seconds


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end in a new loop, from the time 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
