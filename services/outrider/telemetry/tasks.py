"""Tasks that must last as long as what they serve: a failed task is begun again, and the metrics count it.

Nothing awaits such a task, so an exception would end it silently, and what it kept up to date would become stale.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from outrider.telemetry.metrics import Metrics, counters

log = structlog.get_logger(__name__)

FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 10.0
"""Shortest and longest time from a failure to the next beginning; each is twice the previous one."""

LOST_CANCELLATION_S = 0.2
"""Time after which a task that still runs is cancelled again."""

_num_failures: dict[str, int] = {}
"""Failures since the start of this process, by the names of tasks."""


def keep_running(name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
    """Begins a task that runs until `run` returns or it is cancelled; after any other exception of `run` it is begun
    again.

    Args:
        name: Says what the task does, in logs and metrics. Tasks of one kind share a name.
        run: Makes the coroutine. Called for each beginning.
    """
    _num_failures.setdefault(name, 0)
    return asyncio.create_task(_run(name, run), name=name)


async def _run(name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    pause_s, clock = FIRST_PAUSE_S, asyncio.get_running_loop().time
    while True:
        began = clock()
        try:
            await run()
            return
        except Exception:
            _num_failures[name] += 1
            log.exception("task.failed", task=name, pause_s=pause_s)
        if clock() - began > LAST_PAUSE_S:
            pause_s = FIRST_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)


async def end(task: asyncio.Task[None]) -> None:
    """Ends a task, and returns when it has ended."""
    # Repeatedly: before Python 3.12 a cancellation that comes just as `asyncio.wait_for` returns is lost.
    while not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=LOST_CANCELLATION_S)


def task_metrics() -> Metrics:
    """Yields how often tasks have failed. Safe to call in any thread."""
    if _num_failures:
        yield counters(
            "outrider_task_failures_total",
            "Failures of tasks that last, by their names; each was begun again.",
            "task",
            dict(_num_failures),
        )
