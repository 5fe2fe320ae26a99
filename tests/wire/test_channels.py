"""Pauses grow with every attempt, however many there are."""

from __future__ import annotations

import asyncio

import pytest

from outrider.core.statistics import RunningMean
from outrider.peers.reconnecting import LAST_RETRY_S, MAX_FIRST_ANSWER_S, AnswerDeadline, wait_before_retry
from outrider.wire.channels import doubled

FOR_WEEKS = 1_000_000


def test_each_wait_is_twice_the_one_before_up_to_the_longest() -> None:
    assert [doubled(0.5, 3.0, number) for number in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


async def test_a_peer_that_was_away_for_weeks_is_still_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def wait(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", wait)
    await wait_before_retry(1)
    await wait_before_retry(FOR_WEEKS)
    assert waited == [0.1, LAST_RETRY_S]
    assert AnswerDeadline(RunningMean(0.1), FOR_WEEKS).open(0.0) == MAX_FIRST_ANSWER_S
