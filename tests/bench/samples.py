"""Made-up measurements: round numbers, so that a test can state the results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider_bench.config import BenchConfig
from outrider_bench.environment import Machine, describe_config
from outrider_bench.samples import TIME_NAMES, Block, Chunk, Condition, GenerationSample, Rounds, Sample
from outrider_bench.statistics import rows_of
from outrider_cli.prompts import Prompt

PROMPTS = (Prompt("a", "code"), Prompt("b", "prose"))


def generation(num_chunks: int, per_chunk: int, *, prefill_s: float = 0.1, round_s: float = 0.1) -> GenerationSample:
    """Chunks at even times; token ids count up from 0."""
    num_tokens = num_chunks * per_chunk
    chunks = tuple(Chunk(prefill_s + index * round_s, per_chunk) for index in range(num_chunks))
    times = {name: 10.0 * (place + 1) for place, name in enumerate(TIME_NAMES)}
    is_off = per_chunk == 1
    rounds = Rounds(
        num_rounds=num_chunks,
        num_drafted=0 if is_off else 4 * num_chunks,
        num_accepted=num_tokens - num_chunks,
        num_empty=num_chunks if is_off else 1,
        num_hits=0 if is_off else num_chunks // 2,
        num_ready_hits=0 if is_off else num_chunks // 2,
        times_p50=times,
    )
    return GenerationSample(3, tuple(range(num_tokens)), chunks, chunks[-1].at_s, rounds)


def block(condition: Condition, made: GenerationSample | None, *, repeat: int = 0, prompt: int = 0) -> Block:
    """One generation that ran alone; None = it failed."""
    error = "" if made is not None else "UNAVAILABLE: gone"
    sample = Sample(condition, repeat, prompt, PROMPTS[prompt].category, made, error)
    return Block(condition, repeat, made.duration_s if made is not None else 0.5, (sample,))


def full_run(repeats: int = 2) -> list[Block]:
    """off, pearl, and assisted generation in two settings, at two temperatures, over both prompts."""
    contenders = {
        ("off", ""): generation(12, 1),
        ("pearl", ""): generation(4, 3),
        ("hf-assisted", "constant 3"): generation(6, 2),
        ("hf-assisted", "constant 5"): generation(4, 3, round_s=0.12),
    }
    blocks = []
    for repeat in range(repeats):
        for temperature in (0.0, 0.7):
            for (method, setting), made in contenders.items():
                condition = Condition(method, setting, temperature)
                for prompt in range(len(PROMPTS)):
                    slower = replace(made, duration_s=made.duration_s * (1 + 0.1 * repeat))
                    blocks.append(block(condition, slower, repeat=repeat, prompt=prompt))
    return blocks


def results(blocks: list[Block], *, repeats: int = 2) -> dict[str, Any]:
    """The content of results.json."""
    config = BenchConfig(prompts=PROMPTS, repeats=repeats, cores=(0, 1))
    machine = Machine({1: 10.0, 2: 11.0, 4: 12.0, 8: 14.0, 16: 18.0, 32: 40.0}, {1: 0.5, 16: 1.25})
    target = {"model_id": "demo/target-100m", "num_parameters": 99_000_000, "dtype": "bfloat16", "inflated": True}
    return {
        "environment": {
            "cpu": "A CPU",
            "num_cores": 2,
            "memory_gib": 8.0,
            "versions": {"outrider": "0.1.0", "torch": None},
            "pinning": {"target": 0, "everything_else": 1},
            "models": {"target": target | {"note": "The cost of demo/target-100m is inflated."}},
        },
        "config": describe_config(config),
        "interrupted": False,
        "rows": rows_of(blocks, len(PROMPTS), repeats),
        "machine": machine.to_json(),
    }
