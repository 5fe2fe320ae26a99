"""Requests to a service that is used: what spacelike decoding lives on (Takeoff, "spacelike" speculative decoding).

Somebody works on a few modules: requests come from places of the same files, one after the other, and some ask again
what was asked before, from a line further down. The modules are held-out files of Python's library.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from outrider.models.demo.training.corpus import Corpus, code_prompts, load_corpus
from outrider_bench.bootstrap import draw
from outrider_bench.drivers import GenerationFailed
from outrider_bench.experiment import OFF
from outrider_bench.samples import Block, GenerationSample
from outrider_cli.prompts import Prompt

NEW, NEAR = "new", "near-repeat"
NUM_TOPICS = 12
NEAR_SHARE = 0.4
"""Share of near-repeats among the requests after the cold start."""
GROUP_LEN = 20
"""Requests that make a point of the curve."""
MAX_PLACES = 400
_SHORTEST, _LONGEST = 100, 180
"""Characters of a request: about forty tokens."""
_SEED = 0


@cache
def replay_requests(count: int, num_cold: int, near_share: float = NEAR_SHARE) -> tuple[Prompt, ...]:
    """The requests, in their order; those of the cold start are all new, as far as there are places. The same for a
    version of Python. GenerationFailed if it has no source to ask about.

    Args:
        count: Number of requests.
        num_cold: Those at the beginning that are the cold start.
        near_share: Share of near-repeats among the others, in [0, 1].
    """
    random = np.random.default_rng(_SEED)
    topics = _topics(count)
    if not topics:
        raise GenerationFailed("this Python's library has no source code among the files that were held out")
    asked: list[str] = []
    requests: list[Prompt] = []
    while len(requests) < count:
        places = topics[random.integers(len(topics))]
        is_cold = len(requests) < num_cold
        if is_cold and not places:
            places = next(filter(None, topics), [])
        is_near = not is_cold and random.random() < near_share
        # Something has been asked by then: the cold start has only new requests, as long as there are places.
        if is_near or not places:
            earlier = asked[random.integers(len(asked))]
            requests.append(Prompt(earlier.partition("\n")[2], NEAR))  # without its first line
        else:
            asked.append(places.pop(0))
            requests.append(Prompt(asked[-1], NEW))
    return tuple(requests)


def _topics(count: int) -> list[list[str]]:
    """List the places of each topic, from the beginning of its file. Files with many places come first."""
    # Without training text: held-out files are known to be none of it, and searching it takes seconds.
    files = (Corpus((), (source,)) for source in load_corpus().heldout)
    places = (code_prompts(file, MAX_PLACES, shortest=_SHORTEST, longest=_LONGEST) for file in files)
    # A place needs a second line, to be asked for again without its first one; and files repeat themselves.
    usable = (list(dict.fromkeys(place for place in group if place.count("\n") > 1)) for group in places)
    return sorted(filter(None, usable), key=len, reverse=True)[:NUM_TOPICS]


@dataclass(frozen=True, slots=True)
class Replay:
    """Holds what a replay found. Speed-ups are those of tokens a second, prefill included."""

    cold: float
    """Speed-up of the cold start, on the requests that both took."""
    last_third: float
    near: float | None
    """Speed-up of the near-repeats; None means that no near-repeat was measured."""
    points: tuple[tuple[int, float], ...]
    """A point for every GROUP_LEN requests: the number of the last one, and the speed-up."""
    requests: tuple[tuple[int, str, float], ...]
    """An entry for every request: its number, its category, the speed-up."""


def analyse(
    blocks: Sequence[Block], num_requests: int, num_cold: int, random: np.random.Generator | None = None
) -> Replay | None:
    """Return the replay's numbers, as far as they were measured; None if it did not come to its end.

    `off` took a part of the requests: its time for another one is the mean of its times in the same third. With a
    generator the numbers are those of requests that it draws, with repetition, from those that there are.
    """
    plain, ours = _by_request(blocks, is_off=True), _by_request(blocks, is_off=False)
    thirds = [range(num_requests * k // 3, num_requests * (k + 1) // 3) for k in range(3)]
    cold = [index for index in range(num_cold) if index in plain and index in ours]
    if len(ours) < num_requests or not cold or any(plain.keys().isdisjoint(third) for third in thirds):
        return None
    categories = {sample.prompt_index: sample.category for block in blocks for sample in block.samples}
    times = {} if random is None else _drawn(thirds, num_cold, plain, categories, random)
    means = [_mean(_repeated([index for index in third if index in plain], plain, times)) for third in thirds]
    # By thirds, not over all: a machine that gets slower in between slows `off` and ours in the same third.
    usual = {index: mean for third, mean in zip(thirds, means, strict=True) for index in third}

    def speedup(indices: Sequence[int]) -> float:
        # Times stand for tokens a second: all texts are equally long.
        usually = sum(usual[index] * times.get(index, 1) for index in indices)
        return usually / sum(_repeated(indices, ours, times))

    groups = [range(end - GROUP_LEN, end) for end in range(GROUP_LEN, num_requests + 1, GROUP_LEN)]
    near = [index for index in range(num_requests) if categories[index] == NEAR]
    return Replay(
        cold=sum(_repeated(cold, plain, times)) / sum(_repeated(cold, ours, times)),
        last_third=speedup(thirds[2]),
        near=speedup(near) if near else None,
        # A draw is for intervals, which the curves have none of.
        points=() if times else tuple((group[-1] + 1, speedup(group)) for group in groups),
        requests=() if times else tuple((index, categories[index], speedup([index])) for index in range(num_requests)),
    )


def to_json(replay: Replay) -> dict[str, Any]:
    """Return the object that results.json keeps."""
    return {
        "cold": replay.cold,
        "last_third": replay.last_third,
        "near": replay.near,
        "points": [list(point) for point in replay.points],
        "requests": [list(request) for request in replay.requests],
    }


def _by_request(blocks: Sequence[Block], *, is_off: bool) -> dict[int, GenerationSample]:
    return {
        sample.prompt_index: sample.generation
        for block in blocks
        if (block.condition.method == OFF) == is_off
        for sample in block.samples
        if sample.generation is not None
    }


def _drawn(
    thirds: Sequence[range],
    num_cold: int,
    plain: Mapping[int, GenerationSample],
    categories: Mapping[int, str],
    random: np.random.Generator,
) -> dict[int, int]:
    """Return how often each request was drawn: those that numbers are about are drawn among their own kind."""
    strata: dict[tuple[bool, int, bool, str], list[int]] = defaultdict(list)
    for place, third in enumerate(thirds):
        for index in third:
            strata[index < num_cold, place, index in plain, categories[index]].append(index)
    return draw(strata.values(), random)


def _repeated(indices: Iterable[int], found: Mapping[int, GenerationSample], times: Mapping[int, int]) -> list[float]:
    """Return the duration of each generation, as often as it was drawn."""
    return [found[index].duration_s for index in indices for _ in range(times.get(index, 1))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
