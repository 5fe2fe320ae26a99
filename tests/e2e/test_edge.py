"""The edge as a separate process, with the cloud some milliseconds away: same texts, whatever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from outrider.core.methods import METHODS
from outrider_cli.links.direction import LinkSettings
from outrider_cli.local.stack import LocalStack, Service, StackConfig
from outrider_cli.prompts import load_prompts
from outrider_client.client import Client
from outrider_client.edge import running_edge
from outrider_client.generation import Result

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = "import unittest\n\nclass TestQueue(unittest.TestCase):\n    def test_"
DRAFTED = [method.name for method in METHODS.values() if method.has_draft_model]
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    config = StackConfig(
        target="demo/target",
        target_dtype="auto",
        edge=True,
        datastore=False,
        link=LinkSettings(delay_ms=2.0),
        edge_arguments=("--resume-timeout-s", "120"),
        log_folder=tmp_path_factory.mktemp("logs"),
    )
    with LocalStack(config) as running:
        yield running


@pytest.fixture
async def cloud(stack: LocalStack) -> AsyncIterator[Client]:
    async with Client(stack.address) as connected:
        yield connected


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[Client]:
    async with Client(stack.edge_address) as connected:
        yield connected


async def generate(
    client: Client, method: str, *, num_tokens: int = 300, hurt: Callable[[], object] | None = None
) -> Result:
    """Generates; calls `hurt` once the first tokens are there."""
    generation = client.generate(PROMPT, temperature=0.7, seed=1, max_tokens=num_tokens, ignore_eos=True, method=method)
    async for _ in generation:
        if hurt is not None:
            hurt()
            hurt = None
    return generation.result


def edge_of(stack: LocalStack) -> Service:
    assert stack.edge is not None
    return stack.edge


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_every_drafted_method_gives_the_clouds_text(cloud: Client, client: Client, temperature: float) -> None:
    limit = asyncio.Semaphore(4)

    async def run(talker: Client, prompt: str, method: str) -> Result:
        async with limit:
            return await talker.complete(
                prompt, temperature=temperature, seed=len(prompt), max_tokens=NUM_TOKENS, ignore_eos=True, method=method
            )

    prompts = [prompt.text for prompt in load_prompts("demo")[:4]]
    plain = await asyncio.gather(*(run(cloud, prompt, "off") for prompt in prompts))
    for method in DRAFTED:
        drafted = await asyncio.gather(*(run(client, prompt, method) for prompt in prompts))
        assert [result.token_ids for result in drafted] == [result.token_ids for result in plain], method
        assert [result.text for result in drafted] == [result.text for result in plain], method
        assert not any(result.summary.degraded for result in drafted), method
        # A method that waits for drafts gets them, however busy the machine is.
        if method == "speculative":
            assert sum(result.summary.num_rounds for result in drafted) < NUM_TOKENS * len(prompts) * 0.8
            assert all(result.summary.num_accepted_tokens > 0 for result in drafted)
            assert all(result.summary.times_p50.draft_latency_ms > 4 for result in drafted)


@pytest.mark.suite
@pytest.mark.parametrize("method", ["speculative", "auto", "off"])
async def test_a_cloud_that_is_killed_and_comes_back_is_gone_on_with(
    stack: LocalStack, cloud: Client, client: Client, method: str
) -> None:
    assert stack.verifier is not None
    plain = await generate(cloud, "off")

    def hurt() -> None:
        assert stack.verifier is not None
        stack.verifier.kill()
        stack.verifier.spawn()

    interrupted = await generate(client, method, hurt=hurt)
    assert (interrupted.token_ids, interrupted.text) == (plain.token_ids, plain.text)
    await asyncio.to_thread(stack.verifier.wait_listening)
    await asyncio.to_thread(stack.verifier.wait_serving)


@pytest.mark.suite
async def test_a_killed_edge_leaves_no_session_and_drafts_again_later(
    stack: LocalStack, cloud: Client, client: Client
) -> None:
    generation = client.generate(PROMPT, max_tokens=1500, ignore_eos=True, method="pearl")
    await anext(generation)
    assert (await cloud.info()).num_sessions == 1
    edge_of(stack).kill()
    for _ in range(500):
        if (await cloud.info()).num_sessions == 0:
            break
        await asyncio.sleep(0.01)
    assert (await cloud.info()).num_sessions == 0
    # The first tokens come while the draft model is loading.
    edge_of(stack).restart()
    async with Client(stack.edge_address) as again:
        first = await generate(again, "speculative", num_tokens=8)
        assert first.summary.degraded
        assert not (await again.info()).speculator.connected
        for _ in range(3000):
            if (await again.info()).speculator.connected:
                break
            await asyncio.sleep(0.02)
        second = await generate(again, "speculative", num_tokens=8)
        assert not second.summary.degraded
        assert second.token_ids == first.token_ids


async def test_an_edge_that_is_stopped_lets_running_generations_end(stack: LocalStack, client: Client) -> None:
    edge = edge_of(stack)
    generation = client.generate(PROMPT, max_tokens=200, ignore_eos=True, method="pearl")
    await anext(generation)
    os.kill(edge.pid, signal.SIGTERM)
    async for _ in generation:
        pass
    assert generation.result.num_output_tokens == 200
    await asyncio.to_thread(edge.wait, 20.0)
    edge.kill()
    edge.restart()


async def test_an_application_runs_an_edge_in_its_own_process(stack: LocalStack, cloud: Client) -> None:
    plain = await generate(cloud, "off", num_tokens=64)
    async with running_edge(stack.address, model="demo/draft", num_threads=1) as client:
        early = await generate(client, "speculative", num_tokens=64)
        assert early.token_ids == plain.token_ids
        for _ in range(3000):
            if (await client.info()).speculator.connected:
                break
            await asyncio.sleep(0.02)
        drafted = await generate(client, "speculative", num_tokens=64)
        assert drafted.token_ids == plain.token_ids
        assert drafted.summary.num_accepted_tokens > 0
        assert not drafted.summary.degraded


async def test_a_wrong_setting_of_an_edge_is_named() -> None:
    with pytest.raises(ValueError, match="upstream"):
        async with running_edge("nowhere"):
            pass
