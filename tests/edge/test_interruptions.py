"""The cloud dies in the middle, and the application reads the same text as without a fault."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from outrider.v1 import verifier_pb2
from outrider_cli.links.delay_proxy import DelayProxy
from outrider_client.client import Client, Generation
from outrider_client.errors import Unavailable
from outrider_client.generation import FinishReason, Result
from tests.support import services
from tests.support.scripted_cloud import ScriptedCloud, chunk, serving, started
from tests.support.services import RunningVerifier, draft_model, running_edge, running_verifier

pytestmark = pytest.mark.slow

TEXT = "class TestParser(unittest.TestCase):\n    def test_"
NUM_TOKENS = 120
METHODS = ["off", "speculative", "best-first", "auto"]


@pytest.fixture
async def proxy(verifier: RunningVerifier) -> AsyncIterator[DelayProxy]:
    """The link to the cloud; closing it cuts all connections."""
    async with DelayProxy(verifier.address) as running:
        yield running


async def generate(client: Client, method: str, hurt: Callable[[], Awaitable[object]] | None = None) -> Result:
    """Generates; awaits `hurt` once the first tokens are there."""
    generation, ends = begun(client, method), list[int]()
    async for each in generation:
        ends += each.text_ends
        if hurt is not None:
            await hurt()
            hurt = None
    # The ends count in the whole text, whatever the number of calls.
    assert len(ends) == NUM_TOKENS
    assert ends == sorted(ends)
    assert ends[-1] == len(generation.result.text)
    return generation.result


def begun(client: Client, method: str, resume: bool = True) -> Generation:
    return client.generate(
        TEXT,
        temperature=0.7,
        seed=3,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        method=method,
        resume=resume,
        text_ends=True,
    )


@pytest.mark.parametrize("method", METHODS)
async def test_a_lost_connection_is_no_news_to_the_application(
    verifier: RunningVerifier, cloud: Client, proxy: DelayProxy, method: str
) -> None:
    plain = await generate(cloud, "off")

    async def cut() -> None:
        address = proxy.address
        await proxy.close()
        await proxy.start(address)

    async with running_edge(proxy.address, model=draft_model()) as edge, Client(edge.address) as client:
        hurt = await generate(client, method, cut)
        assert (hurt.token_ids, hurt.text) == (plain.token_ids, plain.text)
        assert (hurt.num_prompt_tokens, hurt.num_output_tokens) == (plain.num_prompt_tokens, NUM_TOKENS)
        assert hurt.summary.num_rounds < plain.summary.num_rounds  # those since
        assert await edge.is_idle()
    assert await verifier.is_idle()


@pytest.mark.parametrize("method", METHODS)
async def test_another_verifier_goes_on_where_the_first_one_died(cloud: Client, proxy: DelayProxy, method: str) -> None:
    plain = await generate(cloud, "off")
    async with (
        running_verifier() as second,
        running_edge(proxy.address, second.address, model=draft_model()) as edge,
        Client(edge.address) as client,
    ):
        hurt = await generate(client, method, proxy.close)
        assert (hurt.token_ids, hurt.text) == (plain.token_ids, plain.text)
        again = await generate(client, method)  # the second one is now dialled at once
        assert again.token_ids == plain.token_ids
        assert await second.is_idle()


async def test_the_next_address_takes_a_generation_that_has_not_begun(verifier: RunningVerifier) -> None:
    async with running_edge("127.0.0.1:9", verifier.address) as edge, Client(edge.address) as client:
        assert (await generate(client, "off")).num_output_tokens == NUM_TOKENS
        assert len(await client.tokenize(TEXT)) > 0


async def test_a_cloud_that_stays_away_is_given_up_on(proxy: DelayProxy) -> None:
    async with (
        running_edge(proxy.address, model=draft_model(), resume_timeout_s=0.3) as edge,
        Client(edge.address) as client,
    ):
        # An application that resumes by itself would ask the edge for half a minute.
        generation = begun(client, "pearl", resume=False)
        await anext(generation)
        await proxy.close()
        with pytest.raises(Unavailable):
            async for _ in generation:
                pass
        assert 0 < len(generation.token_ids) < NUM_TOKENS
        assert await edge.is_idle()


async def test_a_verifier_with_another_model_does_not_go_on(proxy: DelayProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(services.target_model(), model_id="demo/other")
    monkeypatch.setattr(services, "target_model", lambda: other)
    async with (
        running_verifier() as second,
        running_edge(proxy.address, second.address, model=draft_model(), resume_timeout_s=0.3) as edge,
        Client(edge.address) as client,
    ):
        # If the edge forgot who began a generation, it would answer a client that tries again.
        generation = client.generate(TEXT, max_tokens=NUM_TOKENS, ignore_eos=True, method="pearl", resume=False)
        await anext(generation)
        await proxy.close()
        with pytest.raises(Unavailable):
            async for _ in generation:
                pass
        assert await second.is_idle()


async def test_what_is_lost_after_the_last_token_is_asked_for_again() -> None:
    async def almost(requests: Any, context: Any) -> None:
        opening = (await anext(requests)).open
        await context.write(started([5, 6]))
        if list(opening.request.resume_token_ids) == [7, 8]:
            end = {"reason": "FINISH_REASON_LENGTH", "num_prompt_tokens": 2, "num_output_tokens": 2, "summary": {}}
            await context.write(verifier_pb2.CollaborateResponse(finished=end))
            return
        await context.write(chunk(7, 8))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async with (
        serving(ScriptedCloud(almost)) as address,
        running_edge(address, model=draft_model()) as edge,
        Client(edge.address) as client,
    ):
        result = await client.complete(TEXT, max_tokens=2, method="pearl")
        assert (result.token_ids, result.text, result.finish_reason) == ((7, 8), "xx", FinishReason.LENGTH)
        assert (result.num_prompt_tokens, result.num_output_tokens) == (2, 2)


async def test_what_breaks_behind_the_end_is_no_error() -> None:
    async def end(requests: Any, context: Any) -> None:
        await context.write(started([5, 6]))
        await context.write(chunk(7))
        await context.write(verifier_pb2.CollaborateResponse(finished={"reason": "FINISH_REASON_STOP", "summary": {}}))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async with (
        serving(ScriptedCloud(end)) as address,
        running_edge(address, model=draft_model()) as edge,
        Client(edge.address) as client,
    ):
        assert (await client.complete(TEXT, max_tokens=2, method="pearl")).finish_reason is FinishReason.STOP
