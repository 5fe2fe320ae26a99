"""A speculator that is slower than a verifier would try unasked waits until it is steered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from outrider.v1 import speculator_pb2, speculator_pb2_grpc, types_pb2
from tests.support.services import RunningSpeculator, running_speculator
from tests.support.speculator_requests import PROMPT, Session, commit, opening

STEERING = types_pb2.Steering(
    speculation=types_pb2.SpeculationParams(method=types_pb2.METHOD_PEARL, num_speculative_tokens=4, lookahead=4)
)


@pytest.fixture
async def speculator() -> AsyncIterator[RunningSpeculator]:
    async with running_speculator() as running:
        yield running


@pytest.fixture
async def call(speculator: RunningSpeculator) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(speculator.address) as channel:
        yield Session(speculator_pb2_grpc.SpeculatorServiceStub(channel))


async def test_it_says_how_long_its_forward_takes(call: Any, speculator: RunningSpeculator) -> None:
    await call.write(opening(speculator))
    opened = (await call.read()).opened
    assert opened.forward_us == speculator.engine.forward_us > 0


@pytest.mark.parametrize("max_forward_us", [0, 10**9])
async def test_within_the_limit_it_drafts_at_once(
    call: Any, speculator: RunningSpeculator, max_forward_us: int
) -> None:
    await call.write(opening(speculator, max_forward_us=max_forward_us))
    assert (await call.draft()).base_len == len(PROMPT)


async def test_beyond_the_limit_it_drafts_when_it_is_steered(call: Any, speculator: RunningSpeculator) -> None:
    speculator.engine.forward_us = 5000
    await call.write(opening(speculator, max_forward_us=4999))
    assert (await call.read()).WhichOneof("event") == "opened"
    await call.write(commit(len(PROMPT), [7]))
    draft = asyncio.create_task(call.draft())
    await call.write(speculator_pb2.SessionRequest(number=1, steering=STEERING))
    # Its first draft already follows the commit, so nothing was drafted before the steering.
    assert (await draft).base_len == len(PROMPT) + 1
