"""Peers die, hang, lie and come back: the stream never fails, and the text is the same as without faults."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from outrider.core.methods import METHODS, OFF
from outrider_cli.local.redis import LocalRedis, started_redis
from outrider_cli.local.stack import LocalStack, StackConfig
from outrider_client.client import Client
from outrider_client.generation import Result
from tests.support.services import running_verifier, target_model

pytestmark = pytest.mark.slow

PROMPT = "import unittest\n\nclass TestQueue(unittest.TestCase):\n    def test_"
NUM_TOKENS = 300


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRedis]:
    with started_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def stack(redis: LocalRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A stack of its own, because its parts get hurt. In bfloat16 if the CPU has it."""
    folder: Path = tmp_path_factory.mktemp("logs")
    config = StackConfig(target="demo/target", target_dtype="auto", redis_url=redis.url, log_folder=folder)
    with LocalStack(config) as running:
        yield running


async def generate(
    client: Client,
    method: str,
    hurt: Callable[[], None] | None = None,
    seed: int = 1,
    temperature: float = 0.7,
    num_tokens: int = NUM_TOKENS,
) -> Result:
    """Generates; calls `hurt` once the first tokens are there; if there is a draft model, the first drafted ones."""
    generation = client.generate(
        PROMPT, temperature=temperature, seed=seed, max_tokens=num_tokens, ignore_eos=True, method=method
    )
    has_draft_model = METHODS[method].has_draft_model
    async for chunk in generation:
        # A stream that was not there yet cannot be lost.
        if hurt is not None and (chunk.num_drafted or not has_draft_model):
            hurt()
            hurt = None
    return generation.result


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[Client]:
    async with Client(stack.address) as connected:
        yield connected


DRAFTED = [method.name for method in METHODS.values() if method.has_draft_model]
NUM_FAULTS = int(os.environ.get("OUTRIDER_NUM_FAULTS", "1"))
"""Random faults of the speculator for each method; each takes some seconds."""


@pytest.mark.suite
@pytest.mark.parametrize("method", DRAFTED)
async def test_random_faults_of_the_speculator_change_no_text(stack: LocalStack, client: Client, method: str) -> None:
    speculator = stack.speculator
    assert speculator is not None
    chosen = random.Random(method)

    def pause() -> None:
        os.kill(speculator.pid, signal.SIGSTOP)
        threading.Timer(chosen.uniform(0.05, 0.3), os.kill, (speculator.pid, signal.SIGCONT)).start()

    for number in range(NUM_FAULTS):
        fault = chosen.choice([pause, speculator.kill, speculator.restart])
        seed, temperature = 100 + number, chosen.choice([0.0, 0.7, 1.0])
        plain = await generate(client, "off", seed=seed, temperature=temperature)
        hurt = await generate(client, method, fault, seed=seed, temperature=temperature)
        assert hurt.token_ids == plain.token_ids, (fault, temperature)
        if not speculator.is_running:
            speculator.restart()


@pytest.mark.parametrize("method", ["speculative", pytest.param("pearl", marks=pytest.mark.suite)])
async def test_a_killed_speculator_changes_nothing_and_is_found_again(
    stack: LocalStack, client: Client, method: str
) -> None:
    assert stack.speculator is not None
    plain = await generate(client, "off")
    hurt = await generate(client, method, stack.speculator.kill)
    assert hurt.token_ids == plain.token_ids
    assert hurt.summary.degraded
    assert hurt.summary.num_speculator_losses == 1
    gone = await generate(client, method)
    assert gone.token_ids == plain.token_ids
    assert gone.summary.num_empty_rounds == gone.summary.num_rounds
    stack.speculator.restart()
    for _ in range(50):  # it is dialled again within two seconds
        back = await generate(client, method)
        assert back.token_ids == plain.token_ids
        if back.summary.num_accepted_tokens:
            break
    assert back.summary.num_accepted_tokens > 0


@pytest.mark.suite
async def test_a_speculator_that_comes_back_in_the_middle_drafts_on(stack: LocalStack, client: Client) -> None:
    assert stack.speculator is not None
    plain = await generate(client, "off", seed=2)
    hurt = await generate(client, "pearl", stack.speculator.restart, seed=2)
    assert hurt.token_ids == plain.token_ids


@pytest.mark.suite
@pytest.mark.parametrize("method", ["speculative", "pearl"])
async def test_a_speculator_that_hangs_is_given_up_on(stack: LocalStack, client: Client, method: str) -> None:
    assert stack.speculator is not None
    plain = await generate(client, "off", seed=3)
    process_id = stack.speculator.pid
    try:
        hurt = await generate(client, method, lambda: os.kill(process_id, signal.SIGSTOP), seed=3)
    finally:
        os.kill(process_id, signal.SIGCONT)
    assert hurt.token_ids == plain.token_ids
    assert hurt.summary.num_empty_rounds > hurt.summary.num_rounds // 2


async def test_a_killed_redis_changes_nothing(stack: LocalStack, client: Client, redis: LocalRedis) -> None:
    plain = await generate(client, "off", seed=4)
    try:
        hurt = await generate(client, "retrieval", redis.kill, seed=4)
        assert hurt.token_ids == plain.token_ids
    finally:
        redis.start()
    assert (await generate(client, "retrieval", seed=4)).token_ids == plain.token_ids


async def test_a_killed_datastore_changes_nothing_and_is_found_again(stack: LocalStack, client: Client) -> None:
    assert stack.datastore is not None
    plain = await generate(client, "off", seed=5)
    hurt = await generate(client, "retrieval", stack.datastore.kill, seed=5)
    assert hurt.token_ids == plain.token_ids
    assert hurt.summary.degraded
    stack.datastore.restart()
    assert (await generate(client, "retrieval", seed=5)).token_ids == plain.token_ids


@pytest.mark.suite
async def test_peers_that_were_never_started_are_not_missed() -> None:
    nobody = "127.0.0.1:9"
    async with running_verifier(speculator=nobody, datastore=nobody) as verifier, Client(verifier.address) as client:
        texts = [await generate(client, method.name, num_tokens=100) for method in METHODS.values()]
        assert len({text.token_ids for text in texts}) == 1
        assert [text.summary.degraded for text in texts] == [method is not OFF for method in METHODS.values()]
        assert await verifier.is_idle()


async def test_a_speculator_with_another_tokenizer_is_done_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dataclasses import replace

    from tests.support import services

    stranger = replace(services.draft_model(), tokenizer_hash="00ff")
    monkeypatch.setattr(services, "draft_model", lambda: stranger)
    async with (
        services.running_speculator() as speculator,
        running_verifier(speculator=speculator.address) as verifier,
        Client(verifier.address) as client,
    ):
        result = await generate(client, "pearl")
        assert result.summary.num_drafted_tokens == 0
        assert result.summary.degraded
        info = await client.info()
        assert target_model().tokenizer_hash in info.speculator.last_error
        assert "00ff" in info.speculator.last_error
        [words] = result.missing_peers
        assert words.startswith("the speculator could not be used for ")
        assert info.speculator.last_error in words
        assert await speculator.is_idle()


async def test_a_cancelled_generation_ends_on_the_speculator_too() -> None:
    from tests.support.services import running_speculator

    async with (
        running_speculator() as speculator,
        running_verifier(speculator=speculator.address) as verifier,
        Client(verifier.address) as client,
    ):
        generation = client.generate(PROMPT, max_tokens=1500, ignore_eos=True, method="pearl")
        await anext(generation)
        assert speculator.engine.num_sessions == 1
        generation.cancel()
        assert await verifier.is_idle()
        assert await speculator.is_idle()
