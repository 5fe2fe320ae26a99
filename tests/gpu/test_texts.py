"""On a GPU the text depends neither on the method, nor on other sessions, nor on how little memory there is."""

from __future__ import annotations

import asyncio

import pytest

from outrider.models.loading import LoadedModel, load_model
from outrider_cli.prompts import load_prompts
from outrider_client.client import Client
from tests.support.services import running_speculator, running_verifier
from tests.support.variants import options_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
VARIANTS = (
    *("off", "auto", "speculative", "pearl", "card", "card tree", "saguaro", "best-first", "best-first tree"),
    *("opt-tree tree", "sequoia tree", "retrieval+recycled", "best-first+pool,recycled tree"),
)
"""Ways to draft that need no datastore."""


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_every_method_says_what_off_says_alone_and_beside_others(
    device: str, target: LoadedModel, temperature: float
) -> None:
    if not target.exactness.is_exact:
        pytest.skip(f"rows are not exact here: {target.exactness.reason}")
    draft = load_model("demo/draft", dtype="bfloat16", device=device)
    prompts = [prompt.text for prompt in load_prompts("demo")[:4]]
    async with (
        running_speculator(model=draft) as speculator,
        running_verifier(model=target, speculator=speculator.address) as verifier,
        Client(verifier.address) as client,
    ):

        async def text_of(prompt: str, variant: str) -> tuple[int, ...]:
            options = options_of(variant)
            done = await client.complete(
                prompt, temperature=temperature, seed=3, max_tokens=48, ignore_eos=True, **options
            )
            return done.token_ids

        alone = {prompt: await text_of(prompt, "off") for prompt in prompts}
        for variant in VARIANTS:
            texts = await asyncio.gather(*(text_of(prompt, variant) for prompt in prompts))
            assert dict(zip(prompts, texts, strict=True)) == alone, variant


@pytest.mark.parametrize("method", ["off", "retrieval"])
async def test_a_text_is_that_of_an_engine_without_overlap(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    if not target.exactness.is_exact:
        pytest.skip(f"rows are not exact here: {target.exactness.reason}")
    prompts = [prompt.text for prompt in load_prompts("demo")[:6]]
    async with running_verifier(model=target) as verifier, Client(verifier.address) as client:

        async def text_of(number: int) -> tuple[int, ...]:
            # Some end by a token of their text, and so with a wasted row; the others go on.
            stops = {"stop_token_ids": [13, 199]} if number % 2 else {"ignore_eos": True}
            options = {"temperature": 0.4 * (number % 3), "max_tokens": 60 + 20 * number, "method": method}
            reports = {"logprobs": 2} if method == "off" and number == 4 else {}
            return (await client.complete(prompts[number], seed=number, **options, **stops, **reports)).token_ids

        together = await asyncio.gather(*map(text_of, range(len(prompts))))
        assert verifier.engine.overlaps
        monkeypatch.setattr(verifier.engine, "overlaps", False)
        assert together == [await text_of(number) for number in range(len(prompts))]
        assert together == await asyncio.gather(*map(text_of, range(len(prompts))))


async def test_sessions_that_displace_each_other_in_a_tiny_pool_say_what_they_say_alone(device: str) -> None:
    # Room for ten blocks, of which each of the ten sessions wants three.
    crowded = load_model("demo/target", dtype="bfloat16", device=device, exact="auto", num_tokens=640)
    if not crowded.exactness.is_exact:
        pytest.skip(f"rows are not exact here: {crowded.exactness.reason}")
    prompts = [f"def f{n}(x):\n    # {'step ' * (5 * n)}\n    return" for n in range(10)]
    async with running_verifier(model=crowded) as verifier, Client(verifier.address) as client:

        async def text_of(prompt: str) -> tuple[int, ...]:
            options = {"seed": 5, "temperature": 0.8, "max_tokens": 120}
            return (await client.complete(prompt, ignore_eos=True, method="off", **options)).token_ids

        before = verifier.engine.residency.state().num_preemptions
        together = await asyncio.gather(*map(text_of, prompts))
        assert verifier.engine.residency.state().num_preemptions > before
        assert together == [await text_of(prompt) for prompt in prompts]
