"""The code that is continued: the prompts that ship with the command, then more of the same kind; and requests to a
service that is used.

Eight are too few for an interval that means much. The others are places of further files of Python's library that were
held out of the training: the same for a version of Python.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from outrider.models.demo.training.corpus import Corpus, code_prompts, load_corpus
from outrider_bench.drivers import GenerationFailed
from outrider_cli.prompts import Prompt, choose, default_prompts

CODE = "code"
NEW, NEAR = "new", "near-repeat"
"""Categories of the requests to a service that is used."""
NUM_TOPICS = 12
MAX_PLACES = 400
_SHORTEST_REQUEST, _LONGEST_REQUEST = 100, 180
"""Characters of such a request: about forty tokens."""
_SEED = 0
_SHORTEST, _LONGEST = 250, 450
"""Characters of a prompt: those of the ones that ship."""


@cache
def code(count: int) -> tuple[Prompt, ...]:
    """Return `count` prompts of held-out code, those that ship first; fewer where this Python's library has no source.

    The first ones are the same for every count.
    """
    shipped = choose(default_prompts(), [CODE], count)
    return (*shipped, *_further(max(0, count - len(shipped))))


def _further(count: int) -> list[Prompt]:
    """Choose places of held-out files from which no prompt ships; the files take turns."""
    if not count:
        return []
    known = [prompt.text for prompt in default_prompts() if prompt.category == CODE]
    # Without training text: held-out files are known to be none of it, and searching it takes seconds.
    files = tuple(one for one in load_corpus().heldout if not any(text in one.text for text in known))
    found = code_prompts(Corpus((), files), count, shortest=_SHORTEST, longest=_LONGEST)
    return [Prompt(text, CODE) for text in found]


@cache
def replay_requests(count: int, num_cold: int, near_share: float) -> tuple[Prompt, ...]:
    """Returns requests to a service that is used, in their order: somebody works on a few modules, and some ask again
    what was asked before, from a line further down.

    Those of the cold start are all new, as far as there are places. The same for a version of Python.

    Args:
        count: Number of requests.
        num_cold: Those at the beginning that are the cold start.
        near_share: Share of near-repeats among the others, in [0, 1].

    Raises:
        GenerationFailed: This Python has no source to ask about.
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
    places = (code_prompts(file, MAX_PLACES, shortest=_SHORTEST_REQUEST, longest=_LONGEST_REQUEST) for file in files)
    # A place needs a second line, to be asked for again without its first one; and files repeat themselves.
    usable = (list(dict.fromkeys(place for place in group if place.count("\n") > 1)) for group in places)
    return sorted(filter(None, usable), key=len, reverse=True)[:NUM_TOPICS]
