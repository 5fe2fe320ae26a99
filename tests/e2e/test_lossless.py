"""The text does not depend on the method: same prompt, parameters and seed, same text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from outrider.models.loading import build_hf_model, load_model
from outrider.models.runner import Segment
from outrider_cli.prompts import load_prompts
from outrider_client.client import Client
from tests.support.variants import VARIANTS, options_of

# Hundreds of generations each, on machines of any speed.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

NUM_TOKENS = 32
NUM_PROMPTS = 40


def prompts() -> list[str]:
    """The benchmark's prompts, and pieces of them, so that there are 40."""
    whole = [prompt.text for prompt in load_prompts("demo")]
    return (whole + [text[len(text) // 3 :] for text in whole])[:NUM_PROMPTS]


async def generate(client: Client, prompt: str, temperature: float, variant: str) -> tuple[int, ...]:
    result = await client.complete(
        prompt,
        temperature=temperature,
        seed=len(prompt),
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        **options_of(variant),
    )
    assert not result.summary.degraded
    return result.token_ids


def first_difference(prompt_token_ids: Sequence[int], one: Sequence[int], other: Sequence[int]) -> str:
    """Where two texts part, and the target's top-2 gap there, which is wide for a real bug."""
    index = next(i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
    runner = load_model("demo/target", dtype="float32").runner
    logits = runner.forward([Segment(runner.new_cache(), [*prompt_token_ids, *one[:index]], 1)])[0]
    best, second = logits.topk(2).values.tolist()
    return f"output index {index}: {one[index]} and {other[index]}, top-2 gap {best - second:.6f}"


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_all_methods_give_the_same_text_with_chains_and_with_trees(
    client: Client, temperature: float, full: bool
) -> None:
    chosen = prompts()[:: 1 if full else 14]
    jobs = [(prompt, variant) for prompt in chosen for variant in VARIANTS]
    limit = asyncio.Semaphore(8)

    async def run(prompt: str, method: str) -> tuple[int, ...]:
        async with limit:
            return await generate(client, prompt, temperature, method)

    texts = dict(zip(jobs, await asyncio.gather(*(run(*job) for job in jobs)), strict=True))
    differences = [
        f"{method}: {first_difference(await client.tokenize(prompt), texts[prompt, 'off'], texts[prompt, method])}"
        for prompt, method in jobs
        if texts[prompt, method] != texts[prompt, "off"]
    ]
    assert not differences
    assert len(set(texts.values())) > len(chosen) // 2  # the prompts are not all the same


async def test_greedy_text_is_that_of_transformers(client: Client) -> None:
    model, tokenizer = build_hf_model("demo/target", "float32")
    for prompt in prompts()[::4]:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.inference_mode():
            expected = model.generate(ids, do_sample=False, min_new_tokens=NUM_TOKENS, max_new_tokens=NUM_TOKENS)
        text = await generate(client, prompt, 0.0, "pearl")
        assert list(text) == expected[0, ids.shape[1] :].tolist(), prompt


async def test_the_same_seed_gives_the_same_text_and_another_seed_another(client: Client) -> None:
    texts = [
        (await client.complete("def main():\n", seed=seed, max_tokens=24, ignore_eos=True)).text for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


async def test_eight_generations_at_once_have_the_texts_that_they_have_alone(client: Client) -> None:
    some = prompts()[:8]
    alone = [await generate(client, prompt, 0.7, "pearl") for prompt in some]
    together = await asyncio.gather(*(generate(client, prompt, 0.7, "pearl") for prompt in some))
    assert together == alone


async def test_speculation_speaks_for_itself_in_the_summary(client: Client) -> None:
    result = await client.complete(
        load_prompts("demo")[0].text, temperature=0, max_tokens=64, ignore_eos=True, method="pearl"
    )
    summary = result.summary
    assert summary.num_rounds + summary.num_accepted_tokens >= 64
    assert summary.num_rounds < 50
    assert summary.accepted_by_source[0].num_tokens == summary.num_accepted_tokens
    assert not summary.degraded
    assert 0 < result.bytes_per_accepted_token < 300
