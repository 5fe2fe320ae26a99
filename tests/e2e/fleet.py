"""A fleet of three verifiers and two speculators as processes, and many short texts at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from outrider_cli.local.stack import LocalStack, Service, StackConfig
from outrider_client.client import Client
from outrider_client.generation import Result

PROMPTS = [
    f"{opening}\n\n{definition}\n    "
    for opening in ("import os", "import re", "from pathlib import Path", "import unittest")
    for definition in ("def parse(text):", "class Queue:", "def main():")
]
NUM_TEXTS = 48
NUM_AT_ONCE = 12
NUM_TOKENS = 48
METHODS = ("pearl", "speculative", "best-first", "auto")


@contextmanager
def running_fleet(log_folder: Path) -> Iterator[LocalStack]:
    config = StackConfig(
        target="demo/target",
        target_dtype="float32",
        datastore=False,
        num_verifiers=3,
        num_speculators=2,
        log_folder=log_folder,
    )
    with LocalStack(config) as stack:
        yield stack


async def generated(
    stack: LocalStack,
    hurt: Callable[[], None] | None = None,
    methods: Sequence[str] = METHODS,
    num_at_once: int = NUM_AT_ONCE,
) -> list[Result]:
    """Generates texts in order, some of them at a time; calls `hurt` when half of all tokens are there."""
    gate, num_left = asyncio.Semaphore(num_at_once), NUM_TEXTS * NUM_TOKENS // 2

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


def num_begun(services: Sequence[Service]) -> list[int]:
    """Sessions that each process has begun so far, according to its log."""
    return [service.log.read_text().count("session.started") for service in services]


def begun_since(before: Sequence[int], services: Sequence[Service]) -> list[int]:
    return [now - then for now, then in zip(num_begun(services), before, strict=True)]


def unevenness(counts: Sequence[int]) -> float:
    """Largest distance from the mean, as a share of it."""
    mean = sum(counts) / len(counts)
    return max(abs(count - mean) for count in counts) / mean
