"""An immutable suffix array that finds where a context has occurred before.

Built over the text read backwards: occurrences that share their last k tokens stand next to one another, and among them
those that share k + 1. One binary search with the whole context therefore ends next to the longest match (Manber and
Myers 1993, read backwards; spacelike speculative decoding, Doubleword 2025).

Pure. `ContextIndex.build` is made for a thread next to an event loop: nearly all of it is numpy calls that release the
GIL.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from outrider.core.params import check
from outrider.core.retrieval.ngrams import TokenId

SEPARATOR = -1
"""Stands between documents. No match and no continuation reaches across it."""

INDEX_DEPTH = 16
"""Longest match, tokens: the text is sorted no deeper, which bounds the sort where one symbol repeats."""

MAX_MATCHES = 64
"""Most positions that are returned. If there are more, a sample: so a frequent context costs no more than others."""

MAX_TOKEN_ID = 2**31 - 2
"""The separator is sorted above all tokens, as one more int32."""

MAX_TOKENS = 2**29 - INDEX_DEPTH
"""Longest text: offsets into its bytes are 32 bits wide."""

Tokens = npt.NDArray[np.int32]

Sort = Callable[[Tokens], npt.NDArray[np.integer]]
"""Suffix array builder: int32 symbols >= 0 in, the start of each suffix in ascending order out."""

_WIDTH = 4  # bytes of a token


class Matches(NamedTuple):
    """The occurrences of the longest known suffix of a context."""

    match_len: int
    """Length of the suffix. 0 means that not even the last token is known."""
    positions: Sequence[int]
    """Positions of the tokens that followed, MAX_MATCHES at most, in no order."""
    num_matches: int
    """Number of all occurrences. If it is greater than the number of positions, these are an even sample."""


NO_MATCHES = Matches(0, (), 0)


class ContextIndex:
    """Every position of a text with a token before it in its document, sorted by the tokens before it.

    Holds 8 bytes for a token: the text and its order. Building takes about 50 more for a while.
    """

    def __init__(self, text: memoryview, order: memoryview) -> None:
        """For `build`; text (bytes) and order (int32) as it makes them."""
        # Not arrays: slices and items of these are several times faster. Not bytes: a copy would hold the GIL.
        self._text = text
        self._order = order
        self._num_tokens = len(text) // _WIDTH - INDEX_DEPTH

    @classmethod
    def build(cls, tokens: Tokens, sort: Sort | None = None) -> ContextIndex:
        """Indexes a text: token ids >= 0, and SEPARATOR between documents; it is copied.

        `sort` is a full suffix array builder, such as pydivsufsort.divsufsort; without one, numpy sorts as deep as
        matters. The answers are the same, except for which matches are in a sample.
        """
        check(len(tokens) <= MAX_TOKENS, "tokens", f"{MAX_TOKENS} tokens at most", len(tokens))
        size = len(tokens)
        # The text is padded with separators at its beginning, so that every context can be read in full length.
        backwards = np.full(size + INDEX_DEPTH, SEPARATOR, np.int32)
        backwards[:size] = tokens[::-1]
        check(int(backwards.min()) >= SEPARATOR, "tokens", "token ids >= 0 or SEPARATOR", int(backwards.min()))
        check(int(backwards.max()) <= MAX_TOKEN_ID, "tokens", f"{MAX_TOKEN_ID} at most", int(backwards.max()))
        # Big-endian bytes compare as the tokens do, the separator above all of them. The sort must agree.
        separator = int(backwards.max()) + 1
        symbols = np.minimum(backwards.view(np.uint32), np.uint32(separator)).view(np.int32)
        places = (sort or _sort)(symbols)
        is_token = backwards[:size] != SEPARATOR
        has_context = np.zeros(len(backwards), bool)
        np.logical_and(is_token[1:], is_token[:-1], out=has_context[1:size])  # a token after it and one before
        order = places[has_context[places]].astype(np.int32)
        order *= _WIDTH  # offsets in bytes from here on, which MAX_TOKENS keeps below 2**31
        return cls(backwards.astype(">i4").view(np.uint8).data, order.data)

    @property
    def num_tokens(self) -> int:
        """Length of the text, separators included."""
        return self._num_tokens

    def matches(self, context: Sequence[TokenId], max_match_len: int) -> Matches:
        """Returns the longest suffix of a context, of at most max_match_len tokens, that a token has followed in the
        text.

        Takes about 2 log2(n) slices of the text, however often the context has occurred.
        """
        check(1 <= max_match_len <= INDEX_DEPTH, "max_match_len", f"in [1, {INDEX_DEPTH}]", max_match_len)
        tail = known_tail(context[-max_match_len:])
        query = struct.pack(f">{len(tail)}i", *reversed(tail))
        text, order, width = self._text, self._order, len(query)
        near = bisect_left(order, query, key=lambda offset: text[offset : offset + width].tobytes())
        # In a sorted list, the two neighbours of the query's place have the longest beginning in common with it.
        neighbours = [text[offset : offset + width].tobytes() for offset in order[max(near - 1, 0) : near + 1]]
        match_len = max((_common_len(query, neighbour) for neighbour in neighbours), default=0)
        if not match_len:
            return NO_MATCHES
        first, last = self._range(near, query[: match_len * _WIDTH])
        count = last - first
        slots = range(first, last) if count <= MAX_MATCHES else self._sample(first, count)
        return Matches(match_len, [self._num_tokens - order[slot] // _WIDTH for slot in slots], count)

    def following(self, position: int, max_len: int) -> tuple[TokenId, ...]:
        """Returns the text from a position on: up to max_len tokens, fewer where the document ends."""
        end = (self._num_tokens - position) * _WIDTH
        # The text stands backwards and big-endian; its bytes, turned around, are the tokens in order, little-endian.
        return decode_run(self._text[max(end - max_len * _WIDTH, 0) : end].tobytes()[::-1])

    def _range(self, near: int, prefix: bytes) -> tuple[int, int]:
        """Returns the first and last (exclusive) slot of the contexts that begin with a prefix; they are around a slot.

        Goes outwards in doubling steps: most ranges are short.
        """
        text, order, width = self._text, self._order, len(prefix)

        def key(offset: int) -> bytes:
            return text[offset : offset + width].tobytes()

        step = 1
        while step <= near and key(order[near - step]) == prefix:
            step *= 2
        # The step before this one, half as long, still matched: the border lies between the two.
        first = bisect_left(order, prefix, max(near - step, 0), near - step // 2, key=key)
        step, end = 1, len(order)
        while near + step <= end and key(order[near + step - 1]) == prefix:
            step *= 2
        last = bisect_right(order, prefix, near + step // 2, min(near + step - 1, end), key=key)
        return first, last

    @staticmethod
    def _sample(first: int, count: int) -> Sequence[int]:
        return [first + count * number // MAX_MATCHES for number in range(MAX_MATCHES)]


@cache
def _tokens_of(num_bytes: int) -> struct.Struct:
    return struct.Struct(f"<{num_bytes // _WIDTH}i")


def decode_run(data: bytes) -> tuple[TokenId, ...]:
    """Returns the tokens of little-endian 4-byte words, up to the first separator."""
    run: tuple[TokenId, ...] = _tokens_of(len(data)).unpack(data)
    return run[: run.index(SEPARATOR)] if SEPARATOR in run else run


def known_tail(context: Sequence[TokenId]) -> Sequence[TokenId]:
    """Returns a context without its last negative token and the tokens before it: they can match nothing."""
    if not context or min(context) >= 0:
        return context
    return context[max(place for place, token_id in enumerate(context) if token_id < 0) + 1 :]


def _common_len(a: bytes, b: bytes) -> int:
    """Returns the number of tokens that two strings of the same length have in common at their start."""
    # Big-endian: the first byte that differs decides the highest bit.
    differing_bits = (int.from_bytes(a, "big") ^ int.from_bytes(b, "big")).bit_length()
    return len(a) // _WIDTH - (differing_bits + 31) // 32


def _sort(symbols: Tokens) -> npt.NDArray[np.int32]:
    """Returns the starts of the suffixes in ascending order of their first INDEX_DEPTH symbols (at least).

    Prefix doubling (Manber and Myers 1993). The first sort takes as many symbols as fit in 64 bits; each later one
    doubles what is sorted, with the ranks of the one before, and looks only at what is not yet unique. A suffix that
    ends is continued with its last symbol: like all symbols after a separator, that need not be sorted.
    """
    size = len(symbols)
    key, depth = _packed(symbols)
    order = np.argsort(key).astype(np.int32)
    key = key[order]
    slots = np.arange(size, dtype=np.int32)
    members = order  # what stands in these slots
    rank = np.empty(size, np.int32)  # filled by the first turn, in which all are members
    while True:
        is_first = np.ones(len(key), bool)
        np.not_equal(key[1:], key[:-1], out=is_first[1:])
        if depth >= INDEX_DEPTH or is_first.all():
            return order
        # The rank of a group of equals is the slot of its first: finer ranks later need not move the others.
        rank[members] = np.maximum.accumulate(np.where(is_first, slots, 0))
        is_shared = ~is_first
        is_shared[:-1] |= is_shared[1:]
        slots = slots[is_shared]
        members = order[slots]
        # Two ranks in one integer, which sorts as the pair does; neither is negative.
        key = rank[members].astype(np.int64) << 32
        key |= rank[np.minimum(members + depth, size - 1)]
        turn = np.argsort(key)
        key, members = key[turn], members[turn]
        order[slots] = members
        depth *= 2


def _packed(symbols: Tokens) -> tuple[npt.NDArray[np.int64], int]:
    """Returns for each place as many symbols from there on as fit in 63 bits, and the number of these symbols."""
    size = len(symbols)
    bits = max(int(symbols.max()).bit_length(), 1)
    depth = min(63 // bits, INDEX_DEPTH)  # 63, because the keys are signed
    padded = np.full(size + depth, symbols[-1], np.int64)
    padded[:size] = symbols
    key = padded[:size].copy()
    for offset in range(1, depth):
        key <<= bits
        key |= padded[offset : offset + size]
    return key, depth
