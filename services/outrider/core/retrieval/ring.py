"""The ring: the latest documents, and the continuations of a context in them.

Spacelike speculative decoding (Doubleword 2025): all outputs go into a circular buffer, a suffix array is built of it
now and then, and a lookup takes the most frequent continuation of the longest context that occurs. Here the tokens
since the last build are searched as well, by chains of positions with equal last tokens (as in LZ77 coders).

Pure. One owner, such as an event loop, calls everything in this module; only `ContextIndex.build` runs elsewhere:

    snapshot = ring.snapshot()
    index = await in_a_thread(ContextIndex.build, snapshot.tokens)
    ring.swap(snapshot, index)
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.core.params import Source, check
from outrider.core.retrieval.ngrams import FANOUT, NOTHING, Continuation, Follower, TokenId, continuation_of
from outrider.core.retrieval.suffix_index import (
    INDEX_DEPTH,
    MAX_MATCHES,
    MAX_TOKEN_ID,
    NO_MATCHES,
    SEPARATOR,
    ContextIndex,
    Tokens,
    decode_run,
    known_tail,
)

MAX_FRESH_TOKENS = 2**19
"""Most tokens that are searched without an index; `wants_build` is true long before."""

MIN_FRESH_TOKENS = 4096
"""Fewer fresh tokens are not worth a build."""

_POWERS = tuple(pow(0x9E3779B97F4A7C15, exponent, 2**64) for exponent in range(9))
"""Factors of the keys' hashes: odd, of 2**64 / golden ratio (Knuth, section 6.4). The top bits are the hash."""


@dataclass(frozen=True, eq=False, slots=True)
class Snapshot:
    """A ring's text at one time."""

    tokens: Tokens
    """A copy: the documents, oldest first, SEPARATOR before each. Read-only."""
    start: int
    """Position of the first of these tokens among all that the ring has ever held."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)


class TokenRing:
    """A circular buffer of documents that answers lookups.

    Tokens that fall out of the buffer may still be found until the next build: the index keeps the text that it was
    built of. Appended tokens are found at once; if more than MAX_FRESH_TOKENS are not indexed, the latest of them.

    Memory: 4 bytes for a token of capacity and 8 for an indexed one; 12 more of them while a build runs, besides what
    the build itself takes. 48 for a token that may be fresh (capacity, MAX_FRESH_TOKENS at most): 25 MB at most.
    """

    def __init__(self, capacity: int, max_match_len: int = 10) -> None:
        """capacity: tokens, with one separator for each document. max_match_len: longest match of any lookup."""
        check(capacity >= 1, "capacity", ">= 1", capacity)
        check(1 <= max_match_len <= INDEX_DEPTH, "max_match_len", f"in [1, {INDEX_DEPTH}]", max_match_len)
        self.capacity = capacity
        self.max_match_len = max_match_len
        self._text = np.empty(capacity, np.int32)  # the token at a position is at position % capacity
        self._bytes = self._text.data.cast("B")
        self._end = 0  # tokens ever appended
        self._index: ContextIndex | None = None
        self._index_start = self._index_end = 0
        self._fresh = _FreshContexts(min(capacity, MAX_FRESH_TOKENS))

    @property
    def num_tokens(self) -> int:
        """Tokens in the buffer, separators included."""
        return min(self._end, self.capacity)

    @property
    def num_indexed_tokens(self) -> int:
        """Tokens in the index, separators included."""
        return self._index_end - self._index_start

    @property
    def wants_build(self) -> bool:
        """True if enough tokens are not indexed for a build to be worth its time: an eighth of those that are."""
        most = self._fresh.size // 2  # the rest of it is for what comes during the build
        return self._end - self._index_end > min(max(MIN_FRESH_TOKENS, self.num_indexed_tokens // 8), most)

    def append(self, document: Sequence[TokenId] | Tokens) -> None:
        """Adds a finished document in place of the oldest tokens. Only the last part stays of a document that is longer
        than the ring.

        Takes about 0.3 us a token.
        """
        tokens = np.asarray(document, np.int32)
        if not len(tokens):
            return
        for extreme in (int(tokens.min()), int(tokens.max())):
            check(0 <= extreme <= MAX_TOKEN_ID, "document", f"token ids in [0, {MAX_TOKEN_ID}]", extreme)
        self._end += 1 + len(tokens)
        kept = np.concatenate((np.array([SEPARATOR], np.int32), tokens))[-self.capacity :]
        self._text[np.arange(self._end - len(kept), self._end) % self.capacity] = kept
        self._fresh.add(tokens, self._end - len(tokens))

    def snapshot(self) -> Snapshot:
        """Returns a copy of the text, for a build. 4 bytes a token: 10 M tokens take about 10 ms."""
        start = self._end - self.num_tokens
        seam = start % self.capacity
        tokens = np.concatenate((self._text[seam : self.num_tokens], self._text[:seam]))
        tokens.flags.writeable = False
        return Snapshot(tokens, start)

    def swap(self, snapshot: Snapshot, index: ContextIndex) -> None:
        """Replaces the index by one that was built of this snapshot of this ring.

        Tokens that were appended since the snapshot stay fresh. Raises InvalidParameter for an index of another text,
        and for a snapshot older than the one in use.
        """
        check(index.num_tokens == len(snapshot.tokens), "index", "built of this snapshot", index.num_tokens)
        check(self._index_end <= snapshot.end <= self._end, "snapshot", "newer than the last", snapshot.end)
        self._index = index
        self._index_start, self._index_end = snapshot.start, snapshot.end

    def lookup(
        self,
        context: Sequence[TokenId],
        max_match_len: int,
        max_continuation_len: int,
        *,
        whole_runs: bool = False,
    ) -> Continuation:
        """Returns the most frequent continuation of the longest known suffix of a context.

        Args:
            context: The last tokens.
            max_match_len: Longest suffix, in tokens; at most the ring's own limit counts.
            max_continuation_len: Tokens of the chain; it is shorter where the documents end.
            whole_runs: True to take the most frequent continuation as a whole, cut to this length (spacelike
                speculative decoding, Doubleword 2025). False to take the most frequent token at each step.

        Counts are numbers of matches: MAX_MATCHES in the index at most (an even sample) and as many fresh ones (the
        latest).
        """
        check(max_match_len >= 1, "max_match_len", ">= 1", max_match_len)
        check(max_continuation_len >= 1, "max_continuation_len", ">= 1", max_continuation_len)
        tail = known_tail(context[-min(max_match_len, self.max_match_len) :])
        if not tail:
            return NOTHING
        index = self._index
        indexed = index.matches(tail, len(tail)) if index else NO_MATCHES
        # Fresh matches that are as long as the indexed ones are counted together with them.
        match_len, fresh = self._fresh_matches(tail, max(indexed.match_len, 1))
        runs: list[tuple[TokenId, ...]] = []  # oldest first
        if index and match_len <= indexed.match_len:
            match_len = indexed.match_len
            # Sorted, because the index has them in the order of their contexts, not of the text.
            runs += [index.following(position, max_continuation_len) for position in sorted(indexed.positions)]
        for position in reversed(fresh):
            runs.append(decode_run(self._read(position, min(position + max_continuation_len, self._end))))
        if not runs:
            return NOTHING
        return _most_frequent_run(runs, match_len) if whole_runs else _most_frequent(runs, match_len)

    def _fresh_matches(self, tail: Sequence[TokenId], min_match_len: int) -> tuple[int, list[int]]:
        """Returns the longest match of at least min_match_len tokens that is not indexed, and its positions, latest
        first."""
        tail_len = len(tail)
        tail_number = int.from_bytes(struct.pack(f"<{tail_len}i", *tail), "little")  # its last token is highest
        buffer_start = self._end - self.num_tokens
        for key_len, positions in self._fresh.candidates(tail, max(self._index_end, buffer_start), self._end):
            match_len, found = max(min_match_len, key_len), []
            for position in positions:
                read_len = min(tail_len, position - buffer_start)
                before = int.from_bytes(self._read(position - read_len, position), "little")
                differing = (before << 32 * (tail_len - read_len) ^ tail_number).bit_length()
                # Tokens that have left the buffer were read as zeros, which are valid token ids: they must not count.
                common = min(tail_len - (differing + 31) // 32, read_len)
                if common > match_len:
                    match_len, found = common, [position]
                elif common == match_len:
                    found.append(position)
            if found:
                return match_len, found
            # Every match that is long enough shares this key, so shorter keys would find no other.
            if key_len <= min_match_len:
                break
        return 0, []

    def _read(self, start: int, end: int) -> bytes:
        """Returns the tokens between two positions, little-endian; the buffer holds all of them."""
        first = start % self.capacity
        last = first + end - start
        if last <= self.capacity:
            return bytes(self._bytes[4 * first : 4 * last])
        return bytes(self._bytes[4 * first :]) + bytes(self._bytes[: 4 * (last - self.capacity)])


class _FreshContexts:
    """Positions by the tokens before them, the latest first, for the latest tokens; no text.

    For each of a few key lengths a hash table holds the latest position after each key, and each position the distance
    back to the one before. Keys that share a place in the table share a chain, so positions are only candidates.
    Nothing is ever removed: chains go back in time, and a walk stops at the oldest position that it was given.
    """

    KEY_LENS = (8, 4, 2, 1)
    """A match is found among the latest MAX_MATCHES positions that have the longest possible one of these in common
    with the context. Short keys alone would not do: a frequent token has too many positions."""

    def __init__(self, capacity: int) -> None:
        """capacity: positions to remember; the next power of two holds."""
        bits = max((capacity - 1).bit_length(), 1)
        self.size = 1 << bits
        self._shift = 64 - bits
        levels = len(self.KEY_LENS)
        # Zeros: memory that is not touched is not used.
        self._latest = np.zeros((levels, self.size), np.int64)  # by hash; 0 = none: no context precedes position 0
        self._distance = np.zeros((levels, self.size), np.int32)  # by position % size; 0 = the chain ends
        self._latest_rows = [row.data for row in self._latest]
        self._distance_rows = [row.data for row in self._distance]

    def add(self, tokens: Tokens, start: int) -> None:
        """Adds a document whose first token is at a position."""
        skipped = max(len(tokens) - self.size, 0)
        tokens, start = tokens[skipped:], start + skipped
        # A key's hash: the sum of its tokens times rising powers, the last token times the first.
        hashes = tokens.astype(np.uint64) * np.uint64(_POWERS[1])
        for level, key_len in reversed([*enumerate(self.KEY_LENS)]):
            if key_len > 1:
                half = key_len // 2
                hashes = hashes[half:] + hashes[:-half] * np.uint64(_POWERS[half])
            if len(hashes) < 2:
                return
            self._link(level, hashes[:-1], start + key_len)  # no token after the last

    def _link(self, level: int, hashes: npt.NDArray[np.uint64], start: int) -> None:
        """Puts positions from start on before the chains of their hashes."""
        count = len(hashes)
        # One sort by place and order: the order fits below the place, as there are at most MAX_FRESH_TOKENS of them.
        by_place = np.sort((hashes >> np.uint64(self._shift)).astype(np.int64) << 32 | np.arange(count))
        places, positions = by_place >> 32, start + (by_place & 0xFFFFFFFF)
        is_first = np.ones(count, bool)
        np.not_equal(places[1:], places[:-1], out=is_first[1:])
        before = np.empty(count, np.int64)
        before[1:] = positions[:-1]
        # 0 where there is none: such a chain ends at position 0, which is older than any `oldest`.
        before[is_first] = self._latest[level, places[is_first]]
        distances = positions - before
        distances[distances >= self.size] = 0  # forgotten by now, or none
        self._distance[level, positions & (self.size - 1)] = distances
        is_last = np.append(is_first[1:], True)
        self._latest[level, places[is_last]] = positions[is_last]

    def candidates(self, tail: Sequence[TokenId], oldest: int, end: int) -> Iterator[tuple[int, list[int]]]:
        """Yields (key length, MAX_MATCHES positions at most, not before the oldest), for falling key lengths.

        end: position after the last token that was added.
        """
        # The distances of positions before end - size have been overwritten; 0 stands for no position.
        oldest = max(oldest, end - self.size, 1)
        places = self._places(tail)
        for level, key_len in enumerate(self.KEY_LENS):
            if key_len <= len(tail):
                latest, distances = self._latest_rows[level], self._distance_rows[level]
                yield key_len, self._chain(latest[places[key_len]], distances, oldest)

    def _chain(self, position: int, distances: memoryview[int], oldest: int) -> list[int]:
        mask = self.size - 1
        found: list[int] = []
        while position >= oldest and len(found) < MAX_MATCHES:
            found.append(position)
            position -= distances[position & mask] or position  # 0: none before
        return found

    def _places(self, tail: Sequence[TokenId]) -> dict[int, int]:
        """Finds where the keys at the end of a context are in the tables, by key length."""
        places = {}
        total = 0
        for length in range(1, min(len(tail), self.KEY_LENS[0]) + 1):
            total += tail[-length] * _POWERS[length]
            if length in self.KEY_LENS:
                places[length] = (total & 0xFFFFFFFFFFFFFFFF) >> self._shift
        return places


def _most_frequent_run(runs: Sequence[tuple[TokenId, ...]], match_len: int) -> Continuation:
    """Returns the most frequent run, the latest one among equals; `runs` are given oldest first."""
    latest = {run: index for index, run in enumerate(runs)}
    counts = Counter(runs)
    best = max(latest, key=lambda run: (counts[run], latest[run]))
    return continuation_of(match_len, Source.RING, best, [counts[best]] * len(best), ())


def _most_frequent(runs: Sequence[tuple[TokenId, ...]], match_len: int) -> Continuation:
    """Returns the tree of the most frequent followers, by the continuation of each match, oldest first; at least one
    token.

    Each step takes the token that follows most often, the latest one among equals, and goes on with the matches that
    agree.
    """
    weights: dict[tuple[TokenId, ...], int] = {}
    for run in runs:
        weights[run] = weights.pop(run, 0) + 1  # now in the order of their latest occurrence
    agreeing = list(weights.items())[::-1]
    chain: list[Follower] = []
    alternatives: list[tuple[int, Follower]] = []
    while len(agreeing) > 1:
        place = len(chain)
        counts: dict[TokenId, int] = {}  # the latest first
        # All have a token in this place: runs that had ended were left out one step before.
        for run, weight in agreeing:
            counts[run[place]] = counts.get(run[place], 0) + weight
        # The sort is stable: of equal counts the latest stays first.
        ranked = sorted(counts.items(), key=lambda follower: -follower[1]) if len(counts) > 1 else [*counts.items()]
        if place < len(FANOUT):
            alternatives += [(place, follower) for follower in ranked[1 : FANOUT[place]]]
        chain.append(ranked[0])
        best = ranked[0][0]
        agreeing = [(run, weight) for run, weight in agreeing if run[place] == best and len(run) > place + 1]
    for run, weight in agreeing:
        chain += [(token_id, weight) for token_id in run[len(chain) :]]
    token_ids, counted = zip(*chain, strict=True)
    return continuation_of(match_len, Source.RING, token_ids, counted, alternatives)
