"""All runs of one to n tokens in some documents, with their numbers: what n-grams and their followers are made of.

The positions are sorted by the tokens before them. Equal runs are neighbours then, at every length at once. Nothing is
hashed: no two runs are mixed up.

Most of the time is spent in numpy's sorts, where other threads may run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.core.params import check

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Text:
    """Documents in a row."""

    tokens: npt.NDArray[np.int32]
    depths: Ints
    """For each token the number of its document's tokens up to it: 1 for the first."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Runs:
    """The different runs of one length. The last three arrays run in parallel."""

    run_at: Ints
    """[number of tokens]: the run that ends with each token; -1 = its document is too short up to there."""
    counts: Ints
    """How often each run occurs."""
    lasts: Ints
    """Position of the last token of its latest occurrence."""
    is_followed: npt.NDArray[np.bool_]
    """Whether a token of the same document comes after one of the occurrences."""


def join(documents: Sequence[Sequence[int]]) -> Text:
    """Puts documents in a row, those of fewer than two tokens left out.

    Raises:
        InvalidParameter: A token id is not in [0, 2**31).
    """
    kept = [np.asarray(document, dtype=np.int64) for document in documents if len(document) > 1]
    if not kept:
        return Text(np.empty(0, np.int32), np.empty(0, np.int64))
    tokens = np.concatenate(kept)
    least, most = int(tokens.min()), int(tokens.max())
    check(least >= 0 and most < 2**31, "documents", "of token ids in [0, 2**31)", least if least < 0 else most)
    lengths = np.array([len(document) for document in kept])
    starts = np.cumsum(lengths) - lengths
    return Text(tokens.astype(np.int32), np.arange(1, len(tokens) + 1) - np.repeat(starts, lengths))


def runs_of(text: Text, max_len: int) -> list[Runs]:
    """The runs of each length from one to max_len tokens."""
    order = _sorted_by_past(text, max_len)
    depths = text.depths[order]
    has_next = np.append(text.depths[1:] > 1, False)[order]
    is_new = np.zeros(len(text), np.bool_)
    is_new[:1] = True
    found = []
    for n in range(1, max_len + 1):
        is_member = depths >= n
        # Runs of n tokens differ where those of n - 1 do, or where the token farthest back does.
        tokens = np.where(is_member, text.tokens[np.maximum(order - (n - 1), 0)], -1)
        is_new[1:] |= tokens[1:] != tokens[:-1]
        members, begins = order[is_member], is_new[is_member]
        firsts = np.flatnonzero(begins)
        run_at = np.full(len(text), -1)
        run_at[members] = np.cumsum(begins) - 1
        lasts = np.maximum.reduceat(members, firsts)
        is_followed = np.logical_or.reduceat(has_next[is_member], firsts)
        found.append(Runs(run_at, np.diff(firsts, append=len(members)), lasts, is_followed))
    return found


def _sorted_by_past(text: Text, length: int) -> Ints:
    """The positions, sorted by the last `length` tokens of their documents up to them, the nearest first."""
    num_bits = (int(text.tokens.max(initial=0)) + 1).bit_length()
    words, used = np.zeros(len(text), np.uint64), 0
    for back in range(length):
        if used + num_bits > 64:  # the words are full: their ranks take fewer bits and say the same
            order = np.argsort(words)
            words[order] = np.cumsum(np.diff(words[order], prepend=words[order[:1]]) != 0)
            used = len(text).bit_length()
        words <<= np.uint64(num_bits)
        symbols = text.tokens[: max(0, len(text) - back)].astype(np.uint64) + np.uint64(1)
        words[back:] |= np.where(text.depths[back:] > back, symbols, np.uint64(0))  # 0 = before the document
        used += num_bits
    return np.argsort(words)
