"""The ratio rule between real models and services: texts differ from `off`, but have the same distribution."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from outrider.core.methods import METHODS
from outrider.core.params import AcceptanceRule
from outrider.models.loading import load_model
from outrider.models.runner import Segment
from outrider_client.client import Client
from outrider_client.generation import Result
from tests.support.laws import Law, law_of, only_best, p_value

pytestmark = pytest.mark.slow

PROMPT = "def parse(self, value):\n    "
TEMPERATURE = 1.5
TOP_K = 3
LENGTH = 6
"""Tokens of a text: the first rounds come before the first draft."""
NUM_TEXTS, NUM_FULL_TEXTS = 300, 600
MAX_SHARES = 8
"""At most this many times as many texts, until enough drafts have come in time to be judged."""
SAMPLED = [method.name for method in METHODS.values() if method.samples]
PUBLISHED = [
    name
    for name, method in METHODS.items()
    if method.published and method.published.fixed.get("acceptance_rule") is AcceptanceRule.RATIO
]
OURS = {"acceptance_rule": "ratio", "min_path_probability": 0.3}
CASES: dict[str, dict[str, Any]] = {
    **{method: {"method": method, **OURS} for method in SAMPLED},
    "saguaro": {"method": "saguaro", "saguaro": {"bias": 0.5}, **OURS},
    **{f"{method} as published": {"method": method, "as_published": True} for method in PUBLISHED},
}


@cache
def law(prompt_token_ids: tuple[int, ...]) -> Law:
    """The exact law of texts: the target's softmax over its best TOP_K."""
    runner = load_model("demo/target", dtype="float32").runner

    def scores(text: tuple[int, ...]) -> Tensor:
        logits = runner.forward([Segment(runner.new_cache(), [*prompt_token_ids, *text], 1)])[0]
        return only_best(logits / TEMPERATURE, TOP_K)

    return law_of(scores, LENGTH)


# A law is tested only where drafts come in time to be judged, which needs the machine alone.
@pytest.mark.suite
@pytest.mark.parametrize("case", CASES)
async def test_texts_under_the_ratio_rule_have_the_targets_distribution(client: Client, case: str, full: bool) -> None:
    num_texts = NUM_FULL_TEXTS if full else NUM_TEXTS
    limit = asyncio.Semaphore(4)

    async def generate(seed: int) -> Result:
        async with limit:
            return await client.complete(
                PROMPT,
                temperature=TEMPERATURE,
                top_k=TOP_K,
                seed=seed,
                max_tokens=LENGTH + 1,
                ignore_eos=True,
                **CASES[case],
            )

    results: list[Result] = []
    # The number of drafts that come in time depends on the machine; if there are few, more texts are generated.
    while num_judged(results) <= num_texts // 5:
        assert len(results) < MAX_SHARES * num_texts
        seeds = range(len(results), len(results) + num_texts)
        results += await asyncio.gather(*(generate(seed) for seed in seeds))
    assert not any(result.summary.degraded for result in results)
    expected = law(tuple(await client.tokenize(PROMPT)))
    texts = [result.token_ids[:LENGTH] for result in results]
    assert set(texts) <= expected.keys()
    for place in range(LENGTH - 1):
        assert p_value(texts, expected, slice(place, place + 2)) > 1e-6


def num_judged(results: Sequence[Result]) -> int:
    return sum(result.summary.num_drafted_tokens for result in results)


async def test_at_temperature_zero_the_text_is_that_of_off(client: Client) -> None:
    texts = [
        (
            await client.complete(
                PROMPT, method=method, acceptance_rule=rule, temperature=0.0, max_tokens=32, ignore_eos=True
            )
        ).text
        for method, rule in [("off", None), *((method, "ratio") for method in SAMPLED)]
    ]
    assert len(set(texts)) == 1


async def test_sessions_under_both_rules_share_forwards(client: Client) -> None:
    """The match rule's output does not depend on the other sessions in the same forward."""
    plain = await client.complete(PROMPT, method="off", seed=3, max_tokens=32, ignore_eos=True)
    both = [
        client.complete(PROMPT, method="pearl", acceptance_rule=rule, seed=3, max_tokens=32, ignore_eos=True)
        for rule in ("match", "ratio") * 3
    ]
    results = await asyncio.gather(*both)
    assert {result.text for result in results[::2]} == {plain.text}
    assert all(len(result.token_ids) == 32 for result in results)
