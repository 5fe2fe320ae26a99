"""Applications that stream generations all the time and compare every text with what it must be."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider_client.client import Client
from outrider_client.errors import OutriderError

PROMPTS = (
    "def add(a, b):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\n\ndef read_lines(path):\n",
    "for index, item in enumerate(",
    "def test_the_answer():\n    assert",
    "class Client:\n    async def close(self) -> None:\n",
)
METHODS = ("auto", "pearl", "best-first", "double", "retrieval", "saguaro", "card", "off")
LONG, LONG_SEED = 40, 7
NUM_LONG = 2
"""Applications that stream the long case and nothing else: so one is in its middle when a pod ends, however fast. No
other streams it: that a pod is given work, generations must begin meanwhile, however slow."""
THINKING_S = 0.2
"""Between two generations of an application: two cores must start pods meanwhile, too."""


@dataclass(frozen=True)
class Case:
    """A request whose text is a function of itself."""

    prompt: str
    temperature: float
    seed: int
    max_tokens: int


@dataclass
class Observed:
    """Of one scenario."""

    began_at: float = field(default_factory=time.monotonic)
    duration_s: float = 0.0
    num_requests: int = 0
    failures: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_resumes: int = 0
    longest_pause_s: float = 0.0
    """Without a token, while one was awaited."""
    after: str = ""
    """Where that was."""
    num_undrafted: int = 0
    """Generations by methods that draft which had no drafted token accepted."""

    def __str__(self) -> str:
        return (
            f"{self.duration_s:.0f} s, {self.num_requests} requests, {len(self.failures)} failures, "
            f"{len(self.wrong)} wrong texts, {self.num_resumes} resumes, longest pause {self.longest_pause_s:.2f} s "
            f"({self.after}), {self.num_undrafted} without drafts"
        )


def cases(num_tokens: int) -> list[Case]:
    """Each prompt, greedy and drawn; one is so long that there is always a stream that outlasts the pause before a pod
    is told to end."""
    return [
        Case(prompt, temperature, seed, num_tokens * (LONG if seed == LONG_SEED else 1))
        for seed, (prompt, temperature) in enumerate(itertools.product(PROMPTS, (0.0, 1.0)))
    ]


class Load:
    """Applications at work, until `stop`. Lives on the event loop."""

    def __init__(self, target: str, num_applications: int, num_tokens: int) -> None:
        """`target`: of the verifiers."""
        self._target, self._num_applications = target, num_applications
        self._cases = cases(num_tokens)
        self._texts: dict[Case, str] = {}
        self._observed: dict[str, Observed] = {}
        self._scenario = ""
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Learns what the texts must be, without any draft; then begins."""
        async with Client(self._target, insecure=True) as client:
            for case in self._cases:
                self._texts[case] = (await client.complete(**_options(case, "off"))).text
        self._tasks = [asyncio.create_task(self._apply(number)) for number in range(self._num_applications)]

    def begin(self, scenario: str) -> Observed:
        """What ends from now on counts to that scenario."""
        self._end()
        self._scenario = scenario
        return self._observed.setdefault(scenario, Observed())

    def _end(self) -> None:
        if (observed := self._observed.get(self._scenario)) is not None:
            observed.duration_s = time.monotonic() - observed.began_at

    async def stop(self) -> dict[str, Observed]:
        """Every application ends with what it does; by scenario, what was seen."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        self._end()
        return self._observed

    async def _apply(self, number: int) -> None:
        async with Client(self._target, insecure=True) as client:
            for case, method in self._turns(number):
                if self._is_over:
                    return
                await self._generate(client, case, method)
                await asyncio.sleep(THINKING_S)

    def _turns(self, number: int) -> Iterator[tuple[Case, str]]:
        (long,) = (case for case in self._cases if case.seed == LONG_SEED)
        short = [case for case in self._cases if case is not long]
        for turn in itertools.count(number):
            # Their count is prime to that of the methods: every case meets every method.
            case = long if number < NUM_LONG else short[turn % len(short)]
            yield case, METHODS[turn % len(METHODS)]

    async def _generate(self, client: Client, case: Case, method: str) -> None:
        pauses = [0.0]
        named = f"{method}, {case}"
        try:
            await client.tokenize(case.prompt)
            began = time.monotonic()
            async with client.generate(**_options(case, method)) as generation:
                async for _ in generation:
                    now = time.monotonic()
                    pauses.append(now - began)
                    began = now
        except OutriderError as error:
            self._observed[self._scenario].failures.append(f"{named}: {error.code.name}: {error}")
            return
        observed = self._observed[self._scenario]
        observed.num_requests += 1
        observed.num_resumes += generation.result.num_resumes
        if (pause_s := max(pauses)) > observed.longest_pause_s:
            observed.longest_pause_s = pause_s
            observed.after = f"before chunk {pauses.index(pause_s)} of {len(pauses) - 1}, {method}"
        observed.num_undrafted += method != "off" and not generation.result.summary.num_accepted_tokens
        if generation.result.text != self._texts[case]:
            observed.wrong.append(named)


def _options(case: Case, method: str) -> dict[str, Any]:
    return {
        "prompt": case.prompt,
        "temperature": case.temperature,
        "seed": case.seed,
        "max_tokens": case.max_tokens,
        "ignore_eos": True,
        "method": method,
    }


def drain_times(endings: Sequence[tuple[str, float]]) -> dict[str, str]:
    """Number and longest, by workload."""
    longest: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for workload, drain_s in endings:
        counts[workload] += 1
        longest[workload] = max(drain_s, longest.get(workload, 0.0))
    return {name: f"{counts[name]} pods, {longest[name]:.2f} s at most" for name in counts}
