"""The code that is continued: the command's own prompts, then more of the same kind; and requests to a service in use.

Eight prompts are too few for a meaningful interval. The others are places in further files of Python's library that
were held out of the training: the same for a version of Python.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from outrider.models.demo.training.corpus import Corpus, code_prompts, load_corpus
from outrider_bench.drivers import GenerationFailed
from outrider_cli.prompts import Prompt, choose, load_prompts

CODE = "code"
NEW, NEAR = "new", "near-repeat"
"""Categories of the requests to a service in use."""
NUM_TOPICS = 12
MAX_PLACES = 400
_SHORTEST_REQUEST, _LONGEST_REQUEST = 100, 180
"""Characters of such a request: about forty tokens."""
_SEED = 0
_SHORTEST, _LONGEST = 250, 450
"""Characters of a prompt, as in the command's own ones."""


@cache
def code(count: int) -> tuple[Prompt, ...]:
    """Returns `count` prompts of held-out code, the command's own first; fewer if this Python's library has no source.

    The first ones are the same for every count.
    """
    shipped = choose(load_prompts("demo"), [CODE], count)
    return (*shipped, *_further(max(0, count - len(shipped))))


def _further(count: int) -> list[Prompt]:
    """Chooses places of held-out files that none of the command's own prompts come from; the files take turns."""
    if not count:
        return []
    known = [prompt.text for prompt in load_prompts("demo") if prompt.category == CODE]
    # Without training text: held-out files are known not to be part of it, and searching it takes seconds.
    files = tuple(one for one in load_corpus().heldout if not any(text in one.text for text in known))
    found = code_prompts(Corpus((), files), count, shortest=_SHORTEST, longest=_LONGEST)
    return [Prompt(text, CODE) for text in found]


@cache
def replay_requests(count: int, num_cold: int, near_share: float) -> tuple[Prompt, ...]:
    """Returns requests to a service in use, in order: a user works on a few modules, and some requests repeat earlier
    ones from a line further down.

    Those of the cold start are all new, while there are places left. The same for a version of Python.

    Args:
        count: Number of requests.
        num_cold: Number of requests at the beginning that are the cold start.
        near_share: Share of near-repeats among the others, in [0, 1].

    Raises:
        GenerationFailed: This Python's library has no source.
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
        # An earlier request exists: the cold start has only new requests, while there are places left.
        if is_near or not places:
            earlier = asked[random.integers(len(asked))]
            requests.append(Prompt(earlier.partition("\n")[2], NEAR))  # without its first line
        else:
            asked.append(places.pop(0))
            requests.append(Prompt(asked[-1], NEW))
    return tuple(requests)


def _topics(count: int) -> list[list[str]]:
    """Lists the places of each topic, from the beginning of its file. Files with many places come first."""
    # Without training text: held-out files are known not to be part of it, and searching it takes seconds.
    files = (Corpus((), (source,)) for source in load_corpus().heldout)
    places = (code_prompts(file, MAX_PLACES, shortest=_SHORTEST_REQUEST, longest=_LONGEST_REQUEST) for file in files)
    # A near-repeat leaves out the first line, so a place needs a second one; and files contain repetitions.
    usable = (list(dict.fromkeys(place for place in group if place.count("\n") > 1)) for group in places)
    return sorted(filter(None, usable), key=len, reverse=True)[:NUM_TOPICS]
