"""Clients that generate without pause, and compare the tokens with those of a run without faults."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.methods import METHODS
from outrider.core.params import Source
from outrider.core.speculation import Method
from outrider_bench.suites.faults.experiments import FaultsSizes
from outrider_bench.suites.faults.observed import Observed, Outcome
from outrider_cli.prompts import default_prompts
from outrider_client.client import Client
from outrider_client.errors import OutriderError
from outrider_client.requests import GenerateOptions

TEMPERATURES = (0.0, 0.7, 1.0)
DRAFTING = tuple(method for method in METHODS.values() if method.has_draft_model)
OTHERS = tuple(method for method in METHODS.values() if method not in DRAFTING)
DRAFTING_SHARE = 0.75
"""Share of the generations that draft with the speculator: only they show that it is back."""
STALL_TIMEOUT_S = 3.0
"""Shorter than verifiers are stopped for at the longest: some generations leave them, some wait for them."""
CONCURRENCY = 4


@dataclass(frozen=True, slots=True)
class Case:
    """Something to generate, and what comes out if nothing goes wrong."""

    prompt: str
    options: GenerateOptions
    token_ids: tuple[int, ...] = ()
    text: str = ""


def cases_of(sizes: FaultsSizes, seed: int) -> list[Case]:
    """Make the cases, without their outputs."""
    chosen, prompts = random.Random(seed), default_prompts()
    return [
        Case(
            prompts[number % len(prompts)].text,
            GenerateOptions(
                temperature=TEMPERATURES[number % len(TEMPERATURES)],
                seed=chosen.randrange(2**32),
                max_tokens=chosen.randint(sizes.max_tokens // 2, sizes.max_tokens),
                ignore_eos=chosen.random() < 0.8,
            ),
        )
        for number in range(sizes.num_cases)
    ]


async def with_answers(cases: Sequence[Case], address: str) -> list[Case]:
    """Return the cases with their outputs by plain decoding."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def answer(case: Case) -> Case:
        async with gate:
            # `client` is bound below, before any of these runs.
            result = await client.complete(case.prompt, **GenerateOptions(**case.options, method="off"))
        return Case(case.prompt, case.options, result.token_ids, result.text)

    async with Client(address) as client:
        return list(await asyncio.gather(*(answer(case) for case in cases)))


async def run_session(
    addresses: Sequence[str], cases: Sequence[Case], seed: str, observed: Observed, over: asyncio.Event
) -> None:
    """Run one client, until `over` is set and its last generation has ended."""
    # A text seeds `Random` alike in every process, unlike its `hash`, which is salted.
    chosen = random.Random(seed)
    async with Client(addresses) as client:
        while not over.is_set():
            method = chosen.choice(DRAFTING if chosen.random() < DRAFTING_SHARE else OTHERS)
            observed.add(await _generate(client, chosen.choice(cases), method, observed))


async def _generate(client: Client, case: Case, method: Method, observed: Observed) -> Outcome:
    # Texts do not depend on the method, so one answer of plain decoding serves all of them.
    options = GenerateOptions(**case.options, method=method.name, stall_timeout_s=STALL_TIMEOUT_S)
    generation = client.generate(case.prompt, **options)
    longest_s, last, error = 0.0, time.monotonic(), ""
    try:
        async for chunk in generation:
            now = time.monotonic()
            longest_s, last = max(longest_s, now - last), now
            observed.count(now, len(chunk.token_ids), has_drafted=Source.DRAFT in chunk.sources)
    except OutriderError as failure:
        error = f"{failure.code.name}: {failure.message}"
    is_whole = not error and generation.token_ids == case.token_ids
    return Outcome(
        method=method.name,
        error=error,
        is_equal=is_whole and generation.text == case.text,
        first_difference=_first_difference(generation.token_ids, case.token_ids),
        num_tokens=len(generation.token_ids),
        num_resumes=generation.num_resumes,
        longest_pause_s=longest_s,
    )


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    pairs = zip(ours, theirs, strict=False)
    return next((number for number, (one, other) in enumerate(pairs) if one != other), None)
