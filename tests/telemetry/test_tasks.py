"""A permanent task is restarted when it fails, and the metrics count that."""

from __future__ import annotations

import asyncio

import pytest

from outrider.telemetry.tasks import keep_running, task_metrics
from tests.support.metric_values import values_of
from tests.support.waiting import until


def num_failures(name: str) -> float:
    return values_of(task_metrics())["outrider_task_failures_total"][name]


async def test_a_task_that_fails_is_begun_again_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    beginnings: list[int] = []

    async def run() -> None:
        beginnings.append(len(beginnings))
        if len(beginnings) == 1:
            raise KeyError("a bug")
        await asyncio.Event().wait()

    task = keep_running("that fails once", run)
    assert num_failures("that fails once") == 0
    await until(lambda: len(beginnings) == 2)
    assert num_failures("that fails once") == 1
    said = capsys.readouterr().out
    assert "task.failed" in said
    assert "a bug" in said
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_task_that_comes_to_its_end_is_left_alone() -> None:
    async def run() -> None:
        return

    await keep_running("that ends", run)
    assert num_failures("that ends") == 0
