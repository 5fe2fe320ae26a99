"""Callers that read nothing, or are silent, do not disturb others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from outrider.core.params import Source
from outrider.core.tree import Draft
from outrider.security.quotas import Quotas
from outrider.speculator.caller_session import HIGH_WATER, CallerSession, Outbox
from outrider.v1 import speculator_pb2_grpc
from tests.support.metric_values import values_of
from tests.support.services import RunningSpeculator, running_speculator
from tests.support.speculator_requests import PROMPT, Code, Session, commit, opening, refusal


@pytest.fixture
async def speculator() -> AsyncIterator[RunningSpeculator]:
    async with running_speculator(max_num_sessions=1) as running:
        yield running


@pytest.fixture
async def stub(speculator: RunningSpeculator) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(speculator.address) as channel:
        yield speculator_pb2_grpc.SpeculatorServiceStub(channel)


async def test_who_opens_a_stream_and_says_nothing_holds_no_session(stub: Any, speculator: RunningSpeculator) -> None:
    silent = [Session(stub) for _ in range(3)]
    for call in silent:
        await call.call.wait_for_connection()
    call = Session(stub)
    await call.write(opening(speculator))
    assert len((await call.draft()).token_ids) == 4
    for each in (call, *silent):
        each.cancel()
    assert await speculator.is_idle()


async def test_a_caller_that_reads_nothing_is_cut_off(
    speculator: RunningSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator.servicer, "_stall_timeout_s", 0.3)
    has_drafted, send = asyncio.Event(), CallerSession.send

    def noticed(session: CallerSession, draft: Draft) -> None:
        send(session, draft)
        has_drafted.set()

    monkeypatch.setattr(CallerSession, "send", noticed)
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]  # so that little is read ahead for it
    async with grpc.aio.insecure_channel(speculator.address, options=options) as channel:
        call = Session(speculator_pb2_grpc.SpeculatorServiceStub(channel))
        await call.write(opening(speculator))
        await call.read()
        for position in range(len(PROMPT), 1500):
            # Commits after the draft for the last commit, or after a second if none comes any more.
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await has_drafted.wait()
            has_drafted.clear()
            if not speculator.servicer.num_sessions:
                break
            await call.write(commit(position, [position]))
        assert await call.end() == (Code.DEADLINE_EXCEEDED, "the caller has read nothing for 0.3 s")
    assert await speculator.is_idle()


@pytest.mark.parametrize("num_sessions", [1, 3])
async def test_a_caller_that_is_behind_is_not_read_from(num_sessions: int) -> None:
    outbox = Outbox()
    outbox.num_sessions = num_sessions
    draft = Draft(2, 1, [0], [5], [0.0], Source.DRAFT)
    for number in range(num_sessions * HIGH_WATER):
        assert await asyncio.wait_for(outbox.room(), 10) is None
        outbox.put(number % num_sessions, draft)
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert len(await outbox.take()) == num_sessions * HIGH_WATER
    await asyncio.wait_for(waiting, 10)


async def test_a_refusal_names_the_limit_and_is_counted(stub: Any, speculator: RunningSpeculator) -> None:
    speculator.servicer._quotas = Quotas(2, max_read_tokens_per_minute=2 * len(PROMPT))
    calls = [Session(stub)]
    await calls[0].write(opening(speculator))
    await calls[0].read()
    assert await refusal(stub, opening(speculator)) == (
        Code.RESOURCE_EXHAUSTED,
        "the speculator has all 1 sessions in use",
    )
    # The two openings are as many tokens as may be read.
    code, text = await refusal(stub, opening(speculator))
    assert (code, text) == (
        Code.RESOURCE_EXHAUSTED,
        f"max_read_tokens_per_minute is reached: {2 * len(PROMPT)}",
    )
    speculator.servicer._quotas = Quotas(1)
    speculator.servicer._max_num_sessions = 3
    calls.append(Session(stub))
    await calls[1].write(opening(speculator))
    await calls[1].read()
    assert (await refusal(stub, opening(speculator)))[1] == "max_sessions_per_caller is reached: 1"
    values = values_of(speculator.servicer.metrics())["outrider_draft_refusals_total"]
    assert values == {"max_num_sessions": 1, "max_sessions_per_caller": 1, "max_read_tokens_per_minute": 1}
    for call in calls:
        call.cancel()
    assert await speculator.is_idle()
