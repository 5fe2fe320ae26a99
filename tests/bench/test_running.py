"""An experiment: contenders that are refused, fail or hang do not affect the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from outrider_bench.drivers import GenerationFailed
from outrider_bench.experiment import LLAMA_CPP, OFF, PLAIN, Contender, Experiment, contender
from outrider_bench.running import MAX_FAILURES, TimedDriver, run_experiment
from outrider_bench.samples import Block, GenerationSample, Request
from outrider_cli.prompts import Prompt
from tests.bench.samples import generation


class Refusing:
    """A driver that refuses some methods: from the beginning, or from some generation on."""

    def __init__(self, refused: Mapping[str, int]) -> None:
        self._refused = refused
        self.asked: Counter[str] = Counter()

    async def generate(self, request: Request, options: Mapping[str, Any]) -> GenerationSample:
        method = options["method"]
        self.asked[method] += 1
        if self.asked[method] > self._refused.get(method, 1_000_000):
            raise GenerationFailed("INVALID_ARGUMENT: no")
        return generation(4, 1 if method == OFF else 2)


def small(**changes: Any) -> Experiment:
    """off and two others, two prompts, two repeats."""
    contenders = (PLAIN, contender("pearl"), contender("card", "K = 5", card={"beam_width": 5}))
    settings: dict[str, Any] = {
        "name": "small",
        "contenders": contenders,
        "temperatures": (0.0,),
        "prompts": (Prompt("a", "code"), Prompt("b", "code")),
        "max_tokens": 8,
        "repeats": 2,
    }
    return Experiment(**settings | changes)


async def test_a_contender_that_is_refused_is_reported_and_the_others_are_measured() -> None:
    blocks: list[Block] = []
    experiment = small()
    failures = await run_experiment(
        experiment, experiment.config(0, ()), {"stack": Refusing({"card": 0})}, blocks.append
    )
    assert failures == {"card K = 5": "INVALID_ARGUMENT: no"}
    measured = Counter(block.condition.label for block in blocks)
    assert measured == {"off": 4, "pearl": 4}


async def test_a_contender_whose_program_did_not_start_is_reported_and_the_others_are_measured() -> None:
    blocks: list[Block] = []
    experiment = small(contenders=(PLAIN, contender("pearl"), Contender(LLAMA_CPP, "plain", LLAMA_CPP)))
    failures = await run_experiment(experiment, experiment.config(0, ()), {"stack": Refusing({})}, blocks.append)
    assert failures == {"llama.cpp plain": "llama.cpp did not start"}
    assert {block.condition.label for block in blocks} == {"off", "pearl"}


async def test_a_contender_that_fails_again_and_again_leaves_and_what_it_did_before_is_kept() -> None:
    blocks: list[Block] = []
    driver = Refusing({"pearl": 2})  # the warm-up, and one that counts
    experiment = small(repeats=5)
    failures = await run_experiment(experiment, experiment.config(0, ()), {"stack": driver}, blocks.append)
    assert set(failures) == {"pearl"}
    assert driver.asked["pearl"] == 2 + MAX_FAILURES
    done = [sample for block in blocks for sample in block.samples if sample.condition.method == "pearl"]
    assert [sample.generation is not None for sample in done] == [True, False, False]


async def test_where_nobody_but_off_is_left_nothing_is_measured() -> None:
    blocks: list[Block] = []
    experiment = small()
    failures = await run_experiment(
        experiment, experiment.config(0, ()), {"stack": Refusing({"card": 0, "pearl": 0})}, blocks.append
    )
    assert set(failures) == {"pearl", "card K = 5"}
    assert blocks == []


async def test_auto_warms_up_at_every_temperature_and_longer_than_the_others() -> None:
    driver = Refusing({})
    experiment = small(
        contenders=(PLAIN, contender("auto")), temperatures=(0.0, 0.7), prompts=(Prompt("a"),), repeats=1
    )
    await run_experiment(experiment, experiment.config(0, ()), {"stack": driver}, lambda _: None)
    assert driver.asked["auto"] - driver.asked[OFF] >= 2


async def test_a_generation_that_hangs_fails_in_time() -> None:
    class Hanging:
        async def generate(self, request: Request, options: Mapping[str, Any]) -> GenerationSample:
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(GenerationFailed, match=r"it took longer than 0\.01 s"):
        await TimedDriver(Hanging(), timeout_s=0.01).generate(Request("a", 0.0, 0, 8), Contender(OFF).options)
