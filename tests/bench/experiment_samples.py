"""Made-up generations for the methods' suite: round numbers, so that a test can say what must come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider_bench.experiment import PLAIN, Experiment, contender
from outrider_bench.measured import Measured
from outrider_bench.samples import Block, Condition, GenerationSample, Rounds, Sample
from outrider_bench.suites.methods.claims import MethodsEvidence
from outrider_bench.suites.methods.experiments import MethodsSizes
from outrider_bench.suites.methods.replay import NEAR, NEW
from outrider_cli.prompts import Prompt


def made(seconds: float, *, tokens: int = 100, **rounds: Any) -> GenerationSample:
    """A generation that took so long."""
    return GenerationSample(3, tuple(range(tokens)), (), seconds, Rounds(**{"num_rounds": 10} | rounds))


def ran(
    label: str,
    temperature: float,
    generation: GenerationSample | None,
    *,
    repeat: int = 0,
    prompt: int = 0,
    category: str = "code",
) -> Block:
    """A contender's turn; None = it failed."""
    method, _, setting = label.partition(" ")
    condition = Condition(method, setting, temperature)
    sample = Sample(condition, repeat, prompt, category, generation, "" if generation else "INTERNAL: no")
    return Block(condition, repeat, generation.duration_s if generation else 0.1, (sample,))


def evidence(blocks: dict[str, list[Block]], **more: Any) -> MethodsEvidence:
    return MethodsEvidence(Measured(blocks), MethodsSizes(), **more)


def replayed(seconds: Sequence[float], *, off_at: Sequence[int], near: Sequence[int] = ()) -> list[Block]:
    """Requests that took so long each; those of `off` take 10 s."""
    blocks = []
    for index, each in enumerate(seconds):
        category = NEAR if index in near else NEW
        blocks.append(ran("spacelike", 0.0, made(each), prompt=index, category=category))
        if index in off_at:
            blocks.append(ran("off", 0.0, made(10.0), prompt=index, category=category))
    return blocks


def small(**changes: Any) -> Experiment:
    """off and two others, two prompts, two repeats."""
    contenders = (PLAIN, contender("pearl"), contender("card", "K = 5", card={"beam_width": 5}))
    settings: dict[str, Any] = {
        "name": "small",
        "part": "card",
        "title": "A small one",
        "contenders": contenders,
        "temperatures": (0.0,),
        "prompts": (Prompt("a", "code"), Prompt("b", "code")),
        "max_tokens": 8,
        "repeats": 2,
    }
    return Experiment(**settings | changes)
