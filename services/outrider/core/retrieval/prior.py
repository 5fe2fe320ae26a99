"""A prior as a compact table that never changes, for processes that hold a copy of it next to their engine.

The same n-grams and followers as an `NgramTier` that has learned the same documents, in a tenth of the memory. Two
things are computed ahead. N-grams are found by a 64-bit hash, in arrays sorted by it. And each n-gram knows the n-gram
that a walk goes on with (the `goto` of Aho and Corasick 1975), so that a step of a walk is an index into an array.

An n-gram is known if a token followed it. Then all n-grams that it begins or ends with are known, too, since they occur
in the same places. So a walk need only remember the longest known suffix of an n-gram and its follower.

A lookup does not compare tokens: an n-gram that is not in the table may be taken for one with the same hash, with a
probability of about 5e-14 for a table of a million. That only makes a bad guess.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from outrider.core.noise import GOLDEN_64, MASK_64
from outrider.core.params import Source, check
from outrider.core.retrieval.ngrams import (
    FANOUT,
    MAX_FOLLOWERS,
    Continuation,
    Follower,
    Ngram,
    TokenId,
    continuation_of,
)

_Words = npt.NDArray[np.uint64]

_SEED = 0x2545F4914F6CDD1D
"""Hash of no tokens."""
_FACTOR = GOLDEN_64
"""Multiplies the hash at each token. Odd, so that no two hashes become one."""
_WIDTH = 4
"""Items of a node: the node to go on with after the first follower, or -1; that follower, and its count; the index of
the other followers. Side by side, so that a step of a walk waits for memory once: little of the table is in a cache."""


class PriorTable:
    """Knows what followed each n-gram of some documents. Immutable; any number of threads may read it.

    Gives the answers of an `NgramTier` that has learned the same documents, save where an n-gram has more than
    MAX_FOLLOWERS different followers: the table counts them all and keeps the most counted, then the latest. The tier
    drops one for each newcomer, and counts from 1 again when it comes back.

    36 bytes an n-gram, on source code.
    """

    __slots__ = (
        "_directories",
        "_ends",
        "_first_nodes",
        "_hashes",
        "_nodes",
        "_others",
        "_shifts",
        "_tokens",
        "max_match_len",
        "num_ngrams",
        "num_tokens",
    )

    def __init__(self, text: Text, levels: Sequence[_Level]) -> None:
        """Called by `build`; levels[n - 1] has the n-grams of n tokens."""
        self.max_match_len = len(levels)
        self.num_tokens = len(text)
        sizes = [len(level.hashes) for level in levels]
        self.num_ngrams = sum(sizes)
        self._tokens = text.tokens.astype("<i4").tobytes()
        # All lengths in a row, the shortest first; the n-grams of n tokens begin at _first_nodes[n].
        self._first_nodes = [0, 0, *(_WIDTH * np.cumsum(sizes)).tolist()]
        self._hashes = _array("Q", [level.hashes for level in levels])
        self._ends = _array("I", [level.ends for level in levels])
        self._others = _array("I", [level.others.ravel() for level in levels])
        offsets = np.cumsum(np.concatenate([[0], *(2 * level.num_others for level in levels)]))
        nodes = np.concatenate([np.column_stack([level.gotos, level.bests]) for level in levels])
        nodes = np.column_stack([np.append(nodes, [[-1, 0, 0]], axis=0), offsets])  # one more: where the others end
        self._nodes = _array("i", [nodes.ravel()])
        # Index at which the hashes with the same first bits begin: about three hashes each, so that a search takes two
        # steps.
        self._shifts = [64, *(64 - max(1, size.bit_length() - 2) for size in sizes)]
        self._directories = [array("I")]
        for n, level in enumerate(levels, 1):
            bounds = np.arange(2 ** (64 - self._shifts[n]), dtype=np.uint64) << np.uint64(self._shifts[n])
            begins = np.append(np.searchsorted(level.hashes, bounds), len(level.hashes))
            self._directories.append(_array("I", [begins + self._first_nodes[n] // _WIDTH]))

    @classmethod
    def build(cls, documents: Sequence[Sequence[TokenId]], max_match_len: int = 4) -> PriorTable:
        """Counts the followers of each n-gram of one to max_match_len tokens. No n-gram spans two documents; documents
        of fewer than two tokens are ignored, also in `num_tokens`.

        Half a second for 400 000 tokens, most of it in numpy's sorts, where other threads may run.

        Raises:
            InvalidParameter: max_match_len is below 1, or a token id is not in [0, 2**31).
        """
        check(max_match_len >= 1, "max_match_len", ">= 1", max_match_len)
        text = join(documents)
        return cls(text, _levels_of(text, max_match_len))

    @property
    def num_bytes(self) -> int:
        """Memory that the table takes."""
        arrays = (self._hashes, self._ends, self._nodes, self._others, *self._directories)
        return len(self._tokens) + sum(len(items) * items.itemsize for items in arrays)

    def followers(self, ngram: Ngram) -> tuple[Follower, ...]:
        """Returns the followers of the n-gram: the most counted first, the latest first among equals."""
        match_len, node = self.longest(ngram)
        return self.followers_at(node) if ngram and match_len == len(ngram) else ()

    def longest(self, tail: Ngram) -> tuple[int, int]:
        """Finds the longest known n-gram that the tail ends with.

        Returns:
            Its length, and its node for `walk`; 0 and -1 if there is no such n-gram.
        """
        # From the end backwards: the hash of each length goes on from that of the next shorter one.
        word, words = _SEED, []
        for token_id in reversed(tail[-self.max_match_len :]):
            word = ((word ^ token_id) * _FACTOR) & MASK_64
            words.append(word)
        for n in range(len(words), 0, -1):
            node = self._find(words[n - 1], n)
            if node >= 0:
                return n, node
        return 0, -1

    def walk(self, match_len: int, node: int, max_len: int) -> Continuation:
        """Follows the most counted tokens from an n-gram on, as `NgramTier.walk` does.

        Args:
            match_len: Length of the n-gram.
            node: Its node.
            max_len: Tokens on the most counted path, at least 1.
        """
        token_ids: list[TokenId] = []
        counts: list[int] = []
        alternatives: list[tuple[int, Follower]] = []
        nodes, others = self._nodes, self._others
        least = self._first_nodes[match_len]  # nodes before it are of shorter n-grams; -1, too, is less
        for place in range(max_len):
            if node < least:
                break
            if place < len(FANOUT):
                # The others end where those of the next row begin; there is one more row after the last node for that.
                begin, end = nodes[node + 3], nodes[node + _WIDTH + 3]
                # Two items each, and one less than FANOUT: the first follower is in the node itself.
                for at in range(begin, min(end, begin + 2 * FANOUT[place] - 2), 2):
                    alternatives.append((place, (others[at], others[at + 1])))
            token_ids.append(nodes[node + 1])
            counts.append(nodes[node + 2])
            node = nodes[node]
        return continuation_of(match_len, Source.PRIOR, token_ids, counts, alternatives)

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields each n-gram, the shorter ones first: its tokens (4 bytes each) and its followers (token id and count,
        4 bytes each; the most counted first, then the latest), all little-endian."""
        tokens = self._tokens
        bests = np.frombuffer(self._nodes, np.int32).reshape(-1, _WIDTH)[:, 1:3].astype("<u4").tobytes()
        others = np.frombuffer(self._others, np.uint32).astype("<u4").tobytes()
        # strict=False: `bests` also has the row after the last node, which is no n-gram.
        rows = zip(self._ends, range(0, len(bests), 8), pairwise(self._nodes[3::_WIDTH]), strict=False)
        for n, (first, last) in enumerate(pairwise(self._first_nodes[1:]), 1):
            for end, best, (begin, stop) in islice(rows, (last - first) // _WIDTH):
                yield tokens[4 * (end - n) : 4 * end], bests[best : best + 8] + others[4 * begin : 4 * stop]

    def _find(self, word: int, n: int) -> int:
        """Returns the node of the n-gram of n tokens with that hash, or -1."""
        bucket = word >> self._shifts[n]
        directory, hashes = self._directories[n], self._hashes
        end = directory[bucket + 1]  # there is one item more than buckets
        index = bisect_left(hashes, word, directory[bucket], end)
        return _WIDTH * index if index < end and hashes[index] == word else -1

    def followers_at(self, node: int) -> tuple[Follower, ...]:
        """Returns the followers of the n-gram of a node that `longest` has found."""
        nodes = self._nodes
        others = self._others[nodes[node + 3] : nodes[node + _WIDTH + 3]]
        return ((nodes[node + 1], nodes[node + 2]), *zip(others[::2], others[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class _Level:
    """The n-grams of one length, sorted by their hashes. The arrays run in parallel."""

    hashes: _Words
    ends: Ints
    """Position after the n-gram's latest occurrence."""
    gotos: Ints
    """Node to go on with after the first follower, or -1."""
    bests: Ints
    """[n-grams, 2]: the first follower and its count."""
    num_others: Ints
    others: Ints
    """[sum of num_others, 2]: the other followers and their counts."""


def _levels_of(text: Text, max_match_len: int) -> list[_Level]:
    """Returns the n-grams of one to max_match_len tokens.

    A run and its next token are a run of the next length. So followers are the runs of the next length, and a goto is
    the longest n-gram that such a run ends with.
    """
    lengths = runs_of(text, max_match_len + 1)
    node_at = np.full(len(text), -1)  # the longest n-gram so far that ends with each token
    nodes_at, parts = [], []
    num_ngrams = 0
    for n, (runs, longer) in enumerate(pairwise(lengths), 1):
        known = np.flatnonzero(runs.is_followed)
        ends = runs.lasts[known] + 1
        words = np.full(len(known), _SEED, np.uint64)
        for back in range(1, n + 1):  # as in `longest`; the products wrap at 64 bits
            words ^= text.tokens[ends - back].astype(np.uint64)
            words *= np.uint64(_FACTOR)
        order = np.argsort(words)
        ngram_of = np.full(len(runs.counts) + 1, -1)  # the last is for no run
        ngram_of[known[order]] = np.arange(len(known))
        ngram_at = ngram_of[runs.run_at]
        node_at = np.where(ngram_at < 0, node_at, _WIDTH * (num_ngrams + ngram_at))
        nodes_at.append(node_at)
        # The token before the last one of a longer run ends the n-gram that this run continues.
        parts.append((words[order], ends[order], *_followers_of(ngram_at[longer.lasts - 1], longer, len(known))))
        num_ngrams += len(known)
    levels = []
    for n, (words, ends, followers, sizes) in enumerate(parts, 1):
        is_best = np.zeros(len(followers), np.bool_)
        is_best[np.cumsum(sizes) - sizes] = True  # no size is 0: an n-gram is known because something followed it
        lasts = lengths[n].lasts[followers]
        # An n-gram and its follower have n + 1 tokens, so the walk goes on with at most as many. All occurrences of
        # these tokens end with the same n-grams, so looking at the latest one is enough.
        gotos = nodes_at[min(n, max_match_len - 1)][lasts[is_best]]
        pairs = np.column_stack([text.tokens[lasts], lengths[n].counts[followers]])
        levels.append(_Level(words, ends, gotos, pairs[is_best], sizes - 1, pairs[~is_best]))
    return levels


def _followers_of(ngrams: Ints, runs: Runs, num_ngrams: int) -> tuple[Ints, Ints]:
    """Returns the runs by the n-gram that they continue, the most counted first, then the latest, at most MAX_FOLLOWERS
    of each; and the number of runs for each n-gram."""
    # lexsort sorts by its last key first.
    order = np.lexsort((-runs.lasts, -runs.counts, ngrams))
    sizes = np.bincount(ngrams, minlength=num_ngrams)
    ranks = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return order[ranks < MAX_FOLLOWERS], np.minimum(sizes, MAX_FOLLOWERS)


def _array(typecode: str, parts: Sequence[npt.NDArray[np.generic]]) -> array[int]:
    """Returns the parts in a row, as an array whose items are read far more quickly than numpy's."""
    # The platform decides how wide the items of a typecode are, so numpy's type is named after `itemsize`.
    items: array[int] = array(typecode)
    for part in parts:
        items.frombytes(part.astype(f"{'i' if typecode == 'i' else 'u'}{items.itemsize}").tobytes())
    return items


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
    """[number of tokens]: the run that ends with each token. -1 means that its document is too short up to there."""
    counts: Ints
    """Number of occurrences of each run."""
    lasts: Ints
    """Position of the last token of its latest occurrence."""
    is_followed: npt.NDArray[np.bool_]
    """True if a token of the same document comes after one of the occurrences."""


def join(documents: Sequence[Sequence[int]]) -> Text:
    """Concatenates documents, without those of fewer than two tokens.

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
    """Returns the runs of each length from one to max_len tokens."""
    order = _sorted_by_past(text, max_len)
    depths = text.depths[order]
    has_next = np.append(text.depths[1:] > 1, False)[order]
    is_new = np.zeros(len(text), np.bool_)
    is_new[:1] = True
    found = []
    for n in range(1, max_len + 1):
        is_member = depths >= n
        # Runs of n tokens differ if those of n - 1 do, or if their first tokens do. Places that are no members stand
        # before the members of their group, so equal runs are always next to each other.
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
    """Returns the positions, sorted by the last `length` tokens of their documents up to them, the nearest first."""
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
