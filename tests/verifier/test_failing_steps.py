"""A verifier with a broken accelerator reports it; one that fails at a single request goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from outrider.models.engine import MAX_FAILED_STEPS
from outrider_client.client import Client
from outrider_client.errors import Unavailable
from tests.support import services
from tests.support.failing_runner import FailingRunner, with_failing_runner
from tests.support.services import RunningVerifier, running_verifier, target_model
from tests.support.waiting import until


@pytest.fixture
async def broken(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[RunningVerifier, FailingRunner]]:
    model, runner = with_failing_runner(target_model())
    monkeypatch.setattr(services, "target_model", lambda: model)
    async with running_verifier() as verifier:
        yield verifier, runner


async def fail_once(client: Client) -> None:
    with pytest.raises(Unavailable, match="lost this session"):
        await client.complete("def add(", max_tokens=4, method="off", resume=False)


async def test_an_engine_that_fails_every_step_is_at_fault_until_one_is_done(
    broken: tuple[RunningVerifier, FailingRunner],
) -> None:
    verifier, runner = broken
    async with Client(verifier.address) as client:
        runner.fails = lambda segments: True
        for _ in range(MAX_FAILED_STEPS - 1):
            await fail_once(client)
        assert verifier.engine.fault() == ""
        await fail_once(client)
        await until(verifier.engine.fault)
        assert verifier.engine.fault() == "3 steps in a row have failed, the last one with RuntimeError"
        runner.fails = lambda segments: False
        await client.complete("def add(", max_tokens=4, method="off")
        assert verifier.engine.fault() == ""


async def test_an_engine_that_one_request_breaks_again_and_again_is_not(
    broken: tuple[RunningVerifier, FailingRunner],
) -> None:
    verifier, runner = broken
    async with Client(verifier.address) as client:
        runner.fails = lambda segments: len(segments[0].token_ids) > 1
        for _ in range(2 * MAX_FAILED_STEPS):
            await fail_once(client)
        assert runner.num_failed >= 2 * MAX_FAILED_STEPS
        assert verifier.engine.fault() == ""


async def test_an_engine_whose_thread_has_ended_is_at_fault(broken: tuple[RunningVerifier, FailingRunner]) -> None:
    verifier, _ = broken
    await asyncio.to_thread(verifier.engine.stop)
    assert verifier.engine.fault() == "the engine's thread has ended"
