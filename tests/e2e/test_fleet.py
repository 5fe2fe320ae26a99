"""Three verifiers and two speculators as processes: many short texts at once, which are the same whichever process is
killed on the way, and about as many at each process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from outrider_cli.local.stack import LocalStack, Service, StackConfig
from outrider_client.client import Client
from outrider_client.generation import Result

pytestmark = pytest.mark.slow

PROMPTS = [
    f"{opening}\n\n{definition}\n    "
    for opening in ("import os", "import re", "from pathlib import Path", "import unittest")
    for definition in ("def parse(text):", "class Queue:", "def main():")
]
NUM_TEXTS = 48
NUM_AT_ONCE = 12
NUM_TOKENS = 48
METHODS = ("pearl", "speculative", "best-first", "auto")
MAX_UNEVEN = 0.2
"""Largest distance from the mean, as a share of it."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A fleet of our own, because its parts get hurt."""
    config = StackConfig(
        target="demo/target",
        target_dtype="float32",
        datastore=False,
        num_verifiers=3,
        num_speculators=2,
        log_folder=tmp_path_factory.mktemp("logs"),
    )
    with LocalStack(config) as running:
        yield running


async def texts(
    stack: LocalStack, hurt: Callable[[], None] | None = None, methods: tuple[str, ...] = METHODS
) -> list[Result]:
    """Generations in order, some of them at a time; `hurt` is called when a half of the text is there."""
    gate, num_left = asyncio.Semaphore(NUM_AT_ONCE), NUM_TEXTS * NUM_TOKENS // 2

    async def generate(number: int) -> Result:
        nonlocal num_left, hurt
        async with gate:
            generation = client.generate(
                PROMPTS[number % len(PROMPTS)],
                seed=number,
                temperature=0.7,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                method=methods[number % len(methods)],
            )
            async for chunk in generation:
                num_left -= len(chunk.token_ids)
                if num_left <= 0 and hurt is not None:
                    now, hurt = hurt, None
                    now()
            return generation.result

    async with Client(stack.address) as client:
        return list(await asyncio.gather(*(generate(number) for number in range(NUM_TEXTS))))


@pytest.fixture(scope="module")
def undisturbed(stack: LocalStack) -> list[Result]:
    """The texts without faults and without drafts."""
    return asyncio.run(texts(stack, methods=("off",)))


def num_begun(services: list[Service]) -> list[int]:
    """Sessions that each process has begun so far, by its log."""
    return [service.log.read_text().count("session.started") for service in services]


def counts_since(before: list[int], services: list[Service]) -> list[int]:
    return [now - then for now, then in zip(num_begun(services), before, strict=True)]


def unevenness(counts: list[int]) -> float:
    mean = sum(counts) / len(counts)
    return max(abs(count - mean) for count in counts) / mean


async def test_every_process_gets_its_share_of_the_sessions(stack: LocalStack, undisturbed: list[Result]) -> None:
    before = num_begun(stack.verifiers), num_begun(stack.speculators)
    found = await texts(stack, methods=("pearl",))
    assert [each.token_ids for each in found] == [each.token_ids for each in undisturbed]
    assert {each.num_resumes for each in found} == {0}
    verifiers, speculators = (
        counts_since(counts, services)
        for counts, services in zip(before, (stack.verifiers, stack.speculators), strict=True)
    )
    assert sum(verifiers) == NUM_TEXTS
    assert unevenness(verifiers) <= MAX_UNEVEN, verifiers
    assert unevenness(speculators) <= MAX_UNEVEN, speculators


@pytest.mark.parametrize("victim", ["speculator", "verifier-2"])
async def test_a_killed_process_changes_no_text_and_is_used_again_when_it_is_back(
    stack: LocalStack, undisturbed: list[Result], victim: str
) -> None:
    [hurt] = [process for process in (*stack.verifiers, *stack.speculators) if process.name == victim]
    found = await texts(stack, hurt.kill)
    assert not hurt.is_running
    assert [(each.token_ids, each.text) for each in found] == [(each.token_ids, each.text) for each in undisturbed]
    if hurt in stack.verifiers:
        assert any(each.num_resumes for each in found)
    hurt.restart()
    before = num_begun([hurt])
    again = await texts(stack)
    assert [each.token_ids for each in again] == [each.token_ids for each in undisturbed]
    assert counts_since(before, [hurt])[0] > 0


@pytest.mark.suite
async def test_whichever_process_is_killed_no_text_changes(stack: LocalStack, undisturbed: list[Result]) -> None:
    for hurt in (*stack.speculators, *stack.verifiers):
        found = await texts(stack, hurt.kill)
        assert [(each.token_ids, each.text) for each in found] == [
            (each.token_ids, each.text) for each in undisturbed
        ], hurt.name
        hurt.restart()
