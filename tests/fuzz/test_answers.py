"""Lying speculators and datastores change no text, and end no generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import count, cycle
from typing import Any

import grpc
import pytest

from outrider.v1 import datastore_pb2, speculator_pb2
from outrider_cli.local.redis import started_redis
from outrider_client.client import Client
from tests.fuzz.answers import LyingPeer, lying
from tests.support import datastores
from tests.support.longest_turn import LongestTurn
from tests.support.services import RunningVerifier, running_speculator, running_verifier

SPECULATOR = speculator_pb2.DESCRIPTOR.services_by_name["SpeculatorService"]
DATASTORE = datastore_pb2.DESCRIPTOR.services_by_name["DatastoreService"]
PROMPTS = ("def add(a, b):\n", "import os\nimport sys\n", "for i in range(10):\n    print(")
DRAFTED = ("best-first", "speculative", "pearl", "card", "saguaro", "opt-tree", "sequoia", "auto")
RETRIEVED = ("retrieval", "auto", "spacelike")
NUM_BESIDE = 4
LONGEST_TURN_S = 1.0
"""The lying peer runs on the same event loop, and so many answers make garbage to collect."""


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with started_redis(tmp_path_factory.mktemp("redis")) as redis:
        yield redis.url


@pytest.fixture
async def speculator() -> AsyncIterator[tuple[str, LyingPeer]]:
    async with (
        running_speculator() as real,
        grpc.aio.insecure_channel(real.address) as channel,
        lying(SPECULATOR, channel, seed=1) as liar,
    ):
        yield liar


@pytest.fixture
async def datastore(redis_url: str) -> AsyncIterator[tuple[str, LyingPeer]]:
    async with (
        datastores.serving(datastores.settings_for(redis_url)) as real,
        lying(DATASTORE, real.channel, seed=1) as liar,
    ):
        yield liar


async def answered(verifier: RunningVerifier, liar: LyingPeer, methods: tuple[str, ...], num_answers: int) -> float:
    """Generates until the liar has sent so many answers, and checks that every text is as without drafts; returns the
    longest turn of the loop."""
    longest, numbers = LongestTurn(), count()
    async with Client(verifier.address) as client:
        options: dict[str, Any] = {"max_tokens": 32, "temperature": 0.9, "seed": 3, "ignore_eos": True}
        expected = {prompt: (await client.complete(prompt, method="off", **options)).token_ids for prompt in PROMPTS}
        scope: dict[str, Any] = {"retrieval_scope": "tenant"} if methods is RETRIEVED else {}
        chosen = cycle(methods)

        async def generate() -> None:
            while liar.num_answers.total() < num_answers:
                prompt, method = PROMPTS[next(numbers) % len(PROMPTS)], next(chosen)
                # Without `resume` a lost session is an error.
                completed = await client.complete(prompt, method=method, resume=False, **options, **scope)
                assert completed.token_ids == expected[prompt], method
                await client.info()

        watching = asyncio.create_task(longest.watch())
        await asyncio.gather(*(generate() for _ in range(NUM_BESIDE)))
        watching.cancel()
    assert await verifier.is_idle()
    assert not verifier.engine.fault()
    return longest.seconds


LENGTHS = pytest.mark.parametrize(
    "num_answers",
    [
        pytest.param(200, marks=pytest.mark.slow),
        pytest.param(10_000, marks=[pytest.mark.suite, pytest.mark.timeout(900)]),
    ],
)


@LENGTHS
async def test_a_speculator_that_lies_does_no_harm(speculator: tuple[str, LyingPeer], num_answers: int) -> None:
    address, liar = speculator
    async with running_verifier(speculator=address) as verifier:
        assert await answered(verifier, liar, DRAFTED, num_answers) < LONGEST_TURN_S


@LENGTHS
async def test_a_datastore_that_lies_does_no_harm(datastore: tuple[str, LyingPeer], num_answers: int) -> None:
    address, liar = datastore
    async with running_verifier(datastore=address) as verifier:
        assert await answered(verifier, liar, RETRIEVED, num_answers) < LONGEST_TURN_S
