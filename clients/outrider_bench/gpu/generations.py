"""Generations of a cell: the requests, and the rates, times and texts of the answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from outrider.core.params import Source
from outrider.v1 import types_pb2
from outrider_bench.config import GpuConfig
from outrider_bench.drivers import Driver
from outrider_bench.gpu.cells import Cell
from outrider_bench.samples import GenerationSample, Request

NUM_ALONE = 4
"""Prompts of a cell with one generation at a time, run one after the other."""
_OWN_SOURCES = (types_pb2.SOURCE_RECYCLED, types_pb2.SOURCE_POOL)
"""Sources in the session itself: a datastore would remember the texts of earlier cells."""


def requests_of(cell: Cell, prompts: Sequence[str], config: GpuConfig) -> list[Request]:
    """Returns the generations of a cell: the same ones for all methods and repeats.

    Args:
        cell: One of services or peers.
        prompts: Prompts of the cell's context: as many as the most sessions, and at least NUM_ALONE.
        config: Of the run.
    """
    count = max(cell.sessions, NUM_ALONE) if cell.sessions == 1 else cell.sessions
    return [
        Request(prompt, cell.temperature, config.seed + index, config.max_tokens)
        for index, prompt in enumerate(prompts[:count])
    ]


def options_of(method: str) -> dict[str, Any]:
    """Returns a method as options of a request to the services."""
    options: dict[str, Any] = {"method": method.removesuffix("+retrieval")}
    if method.endswith("+retrieval"):
        options["retrieval"] = True
    if method in ("retrieval", "auto") or method.endswith("+retrieval"):
        options["retrieval_params"] = types_pb2.RetrievalParams(sources=_OWN_SOURCES)
    return options


async def run_cell(
    cell: Cell, requests: Sequence[Request], driver: Driver, options: Mapping[str, Any]
) -> list[GenerationSample]:
    """Runs the generations of a cell: one after the other for one session, otherwise at once. Raises
    GenerationFailed."""
    if cell.sessions == 1:
        return [await driver.generate(request, options) for request in requests]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(driver.generate(request, options)) for request in requests]
    return [task.result() for task in tasks]


def value_of(cell: Cell, samples: Sequence[GenerationSample], alone: Sequence[Sequence[int]] | None) -> dict[str, Any]:
    """Returns the result that is kept for a cell.

    Args:
        cell: The cell.
        samples: Its generations, in the order of the prompts.
        alone: Tokens of the first prompts as `off` says them alone; None if they are not known.
    """
    decode_s = sum(sample.decode_s for sample in samples)
    num_decoded = sum(sample.num_decoded for sample in samples)
    num_rounds = sum(sample.rounds.num_rounds for sample in samples)
    names = samples[0].rounds.times_p50
    texts = [list(sample.token_ids) for sample in samples[:NUM_ALONE]]
    return {
        # Of all sessions together, decoding alone.
        "tokens_per_s": cell.sessions * num_decoded / decode_s if decode_s else None,
        "times_ms": {name: median(sample.rounds.times_p50[name] for sample in samples) for name in names},
        # Each forward brings one token of the target's own.
        "tokens_per_round": 1 + sum(sample.rounds.num_accepted for sample in samples) / max(1, num_rounds),
        "ttft_ms": 1e3 * median(sample.ttft_s for sample in samples),
        "num_prompt_tokens": median(sample.num_prompt_tokens for sample in samples),
        "num_equal": None if alone is None else sum(text == list(one) for text, one in zip(texts, alone, strict=False)),
        "num_compared": None if alone is None else min(len(texts), len(alone)),
        # Rounds by `auto`'s choice for them.
        "decisions": dict(sum((Counter(sample.rounds.decisions) for sample in samples), Counter[str]())),
        "degraded": any(sample.rounds.degraded for sample in samples),
        "token_ids": texts,
    }


def sources_in_words() -> str:
    """Names the sources that `retrieval` uses here."""
    return " and ".join(Source(number).name.lower() for number in _OWN_SOURCES)
