"""Token streams to measure with: made-up ones that repeat themselves as source code does, and Python's own library.

The made-up ones depend on their seed alone. They are phrases, drawn again and again, the frequent ones far more often
(Zipf), of tokens that are drawn likewise: long matches exist, and so do contexts that never came before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from outrider.models.demo.training.corpus import SourceFile, load_corpus

VOCAB_SIZE = 4096
DOCUMENT_LEN = 512
MAX_PHRASE_LEN = 16
NUM_PHRASES = 20_000
_MAX_TEXT_LEN = 8000
"""Characters taken of one file: many files say more than a few long ones."""

Tokens = npt.NDArray[np.int32]


def made_up_tokens(num_tokens: int, seed: int) -> Tokens:
    """Make a stream of token ids below VOCAB_SIZE."""
    random = np.random.default_rng(seed)
    lengths = random.integers(2, MAX_PHRASE_LEN + 1, NUM_PHRASES)
    ends = np.cumsum(lengths)
    phrases = _zipf(random, VOCAB_SIZE, int(ends[-1]))
    pieces: list[Tokens] = []
    missing = num_tokens
    while missing > 0:
        # Hardly more tokens than are missing, even if all phrases are of the longest kind; the loop fetches the rest.
        chosen = _zipf(random, NUM_PHRASES, missing // MAX_PHRASE_LEN + 1)
        sizes = lengths[chosen]
        # Places of the chosen phrases' tokens, one phrase behind the other.
        starts = np.repeat(ends[chosen] - np.cumsum(sizes), sizes)
        piece = phrases[starts + np.arange(len(starts))]
        pieces.append(piece)
        missing -= len(piece)
    return np.concatenate(pieces)[:num_tokens].astype(np.int32)


def _zipf(random: np.random.Generator, count: int, size: int) -> npt.NDArray[np.int64]:
    """Draw numbers below count, number n with a probability in 1 / (n + 1)."""
    weights = np.cumsum(1 / np.arange(1, count + 1))
    drawn: npt.NDArray[np.int64] = np.searchsorted(weights, random.random(size) * weights[-1]).clip(max=count - 1)
    return drawn


def documents_of(tokens: Tokens, length: int = DOCUMENT_LEN) -> list[list[int]]:
    """A stream cut into documents; what is left at its end is left out if it is no document."""
    ends = range(0, len(tokens) + 1, length)
    return [tokens[start:end].tolist() for start, end in pairwise(ends)] or [tokens.tolist()]


def contexts_of(tokens: Tokens, count: int, length: int) -> list[list[int]]:
    """Contexts at even distances in a stream that is longer than one of them."""
    ends = np.linspace(length, len(tokens), count).astype(int)
    return [tokens[end - length : end].tolist() for end in ends]


def library_texts() -> tuple[list[str], list[str]]:
    """Sources of Python's library, to learn from and held out, in an order that mixes the packages.

    The prompts of the benchmark come from the held-out files: none of what is learned here knows how they go on.
    """
    corpus = load_corpus()
    return list(_mixed(corpus.train)), list(_mixed(corpus.heldout))


def _mixed(files: Sequence[SourceFile]) -> Iterator[str]:
    order = np.random.default_rng(0).permutation(len(files))
    return (files[index].text[:_MAX_TEXT_LEN] for index in order)
