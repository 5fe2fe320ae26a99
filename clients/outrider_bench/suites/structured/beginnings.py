"""Beginnings: how long it takes until each of several texts of one prompt has begun."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from outrider_bench.drivers import GenerationFailed
from outrider_bench.result import Measurement, Target
from outrider_bench.suites.structured.experiments import ASKED_METHODS, StructuredSizes
from outrider_cli.prompts import default_prompts
from outrider_client.client import Client
from outrider_client.requests import GenerateOptions

MOST_TIMES = 1.15
"""Limit of the time until all texts have begun, by that until one has."""


class Beginnings:
    """Times until all texts of a prompt have begun, turn by turn."""

    def __init__(self, sizes: StructuredSizes) -> None:
        self.seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        """Seconds of each turn, by method and number of texts."""
        self.num_prompt_tokens = 0
        self._sizes = sizes
        self._body: Sequence[int] = ()
        self._num_asked = 0

    async def run(self, client: Client, seed: int, num_turns: int) -> None:
        """Take turns with one text and with several ones. Raises OutriderError, GenerationFailed."""
        sizes = self._sizes
        self._body = await client.tokenize("\n".join(prompt.text for prompt in default_prompts()))
        info = await client.info()
        room = info.model.max_context_len - sizes.text_tokens
        self.num_prompt_tokens = min(sizes.text_prompt_tokens, len(self._body), room)
        counts = [1, sizes.num_texts]
        for number in range(-1, num_turns):  # the first turn warms up
            for method in ASKED_METHODS:
                turn = {n: await self._begun(client, method, n, seed) for n in counts}
                if number >= 0:
                    for n, seconds in turn.items():
                        self.seconds[method][n].append(seconds)
            counts.reverse()

    def measurements(self, part: str) -> list[Measurement]:
        """Return what was measured: the ratio within each turn, and the times."""
        most, found = self._sizes.num_texts, list[Measurement]()
        for method, by_count in self.seconds.items():
            for n in (1, most):
                name = f"{method}: until all of n = {n} texts have begun"
                found.append(Measurement(name, "s", tuple(by_count[n]), part=part))
            ratios = tuple(several / one for several, one in zip(by_count[most], by_count[1], strict=True))
            found.append(Measurement(f"{method}: n = {most} by n = 1", "", ratios, Target("<=", MOST_TIMES), part=part))
        return found

    async def _begun(self, client: Client, method: str, n: int, seed: int) -> float:
        """Return the seconds from a request of n texts until each of them has a token."""
        # No two prompts begin alike: what is kept of one is of no use for the next.
        self._num_asked += 1
        head = await client.tokenize(f"# {seed * 100_000 + self._num_asked}\n")
        prompt = [*head, *self._body][: self.num_prompt_tokens]
        now, begun = asyncio.get_running_loop().time, set[int]()
        started = last = now()
        options: GenerateOptions = {
            "n": n,
            "method": method,
            "temperature": 0.7,
            "seed": seed,
            "max_tokens": self._sizes.text_tokens,
            "ignore_eos": True,
            "resume": False,
        }
        async with client.generate(prompt, **options) as generation:
            async for chunk in generation:
                if chunk.token_ids and chunk.index not in begun:
                    begun.add(chunk.index)
                    last = now()
        if len(begun) < n:
            raise GenerationFailed(f"{len(begun)} of {n} texts have begun")
        return last - started
