"""The code that is continued: the prompts that ship with the command, then more of the same kind.

Eight are too few for an interval that means much. The others are places of further files of Python's library that were
held out of the training, as those of the replay are: the same for a version of Python.
"""

from __future__ import annotations

from functools import cache

from outrider.models.demo.training.corpus import Corpus, code_prompts, load_corpus
from outrider_cli.prompts import Prompt, choose, default_prompts

CODE = "code"
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
