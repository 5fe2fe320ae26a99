"""A tier of n-grams and the tokens that followed them, and the continuation that a lookup in it returns.

The retrieval of DOUBLE (Algorithm 3) without its gaps: streams are indexed as they are, continuations may be short, and
followers are ranked by how often and how lately they came. `prior.py` has the tier that never changes, and
`outrider.core.retrieval.tiers` puts a session's tiers in order.

Pure: token ids in, token ids out. A guess may be wrong; an unknown context never raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from outrider.core.params import Source, check

TokenId = int
Ngram = tuple[TokenId, ...]
Follower = tuple[TokenId, int]
"""A token that followed an n-gram, and how often."""

MAX_FOLLOWERS = 8
"""Next tokens kept for one n-gram. A newcomer takes the place of the least counted: no list grows without bound."""

FANOUT = (4, 2)
"""Followers returned at the first positions of a continuation, the most counted included. Later positions: one each."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A small tree of tokens that followed a context. The three lists run in parallel.

    The most counted path comes first, its nodes in order; the alternatives at its first positions come after it.
    """

    match_len: int
    """Length of the suffix that matched. 0 means that nothing was found, and there are no nodes."""
    tier: Source | None
    """The tier that matched."""
    parent_offsets: tuple[int, ...]
    """Distance from a node to its parent. 0 means that it follows the context directly."""
    token_ids: tuple[TokenId, ...]
    counts: tuple[int, ...]
    """Number of times that each token followed the n-gram before it."""

    def chain(self) -> tuple[TokenId, ...]:
        """Returns the most counted path."""
        return self.token_ids[: num_chained(self)]


NOTHING = Continuation(0, None, (), (), ())


def num_chained(continuation: Continuation) -> int:
    """Returns the length of the most counted path."""
    return _num_chained(continuation.parent_offsets)


@lru_cache(1024)
def _num_chained(parent_offsets: tuple[int, ...]) -> int:
    # An alternative's parent is never the node just before it: only nodes of the path follow their parents directly.
    length = min(1, len(parent_offsets))
    while length < len(parent_offsets) and parent_offsets[length] == 1:
        length += 1
    return length


def continuation_of(
    match_len: int,
    tier: Source,
    token_ids: Sequence[TokenId],
    counts: Sequence[int],
    alternatives: Iterable[tuple[int, Follower]],
) -> Continuation:
    """Returns a continuation from a path and its alternatives.

    Args:
        token_ids: The most counted path; one token at least.
        counts: In parallel.
        alternatives: Other followers with their place on that path, counted from 0, in order.
    """
    all_ids, all_counts, offsets = [*token_ids], [*counts], [1] * len(token_ids)
    offsets[0] = 0
    for place, (token_id, count) in alternatives:
        # A parent's number is the place of its children: nodes are numbered from 1, places from 0.
        offsets.append(len(all_ids) + 1 - place if place else 0)
        all_ids.append(token_id)
        all_counts.append(count)
    return Continuation(match_len, tier, tuple(offsets), tuple(all_ids), tuple(all_counts))


class NgramTier:
    """Counts what follows each n-gram of one to max_match_len tokens.

    One thread writes; others may read at the same time. All values that they read were true at some time: the followers
    of an n-gram are one immutable tuple, replaced as a whole. From one step of a walk to the next the tier may change.

    With max_ngrams the n-grams that were first seen longest ago are dropped, the shorter ones of a position before the
    longer ones, however often they came since. One that comes again afterwards is new.
    """

    def __init__(self, max_match_len: int, max_ngrams: int | None = None) -> None:
        check(max_match_len >= 1, "max_match_len", ">= 1", max_match_len)
        check(max_ngrams is None or max_ngrams >= 1, "max_ngrams", ">= 1, or None", max_ngrams)
        self.max_match_len = max_match_len
        self.max_ngrams = max_ngrams
        self._followers: dict[Ngram, tuple[Follower, ...]] = {}
        # A dictionary keeps this order too, but finding its first key again and again takes time in proportion to its
        # size.
        self._by_age: deque[Ngram] = deque()  # only with max_ngrams
        self._tail: Ngram = ()

    def __len__(self) -> int:
        """Number of n-grams."""
        return len(self._followers)

    def record(self, token_ids: Sequence[TokenId]) -> None:
        """Adds the next tokens of the tier's stream. N-grams that span two calls count like any other."""
        stream = (*self._tail, *token_ids)
        self.learn(stream, len(self._tail))
        self._tail = stream[-self.max_match_len :]

    def learn(self, token_ids: Sequence[TokenId], start: int = 0) -> None:
        """Counts token_ids[start:] as followers of the n-grams before them, outside the stream of `record`.

        Under a microsecond for each token and n-gram length. With max_ngrams no more is dropped than added.
        """
        stream, table, by_age = tuple(token_ids), self._followers, self._by_age
        max_match_len, max_ngrams = self.max_match_len, self.max_ngrams
        for end in range(max(start, 1), len(stream)):
            token_id = stream[end]
            alone = ((token_id, 1),)  # immutable, so n-grams of all lengths can share it
            # From the shortest on: that is the order in which a bounded tier drops them.
            for first in range(end - 1, max(end - max_match_len, 0) - 1, -1):
                ngram = stream[first:end]
                known = table.get(ngram)
                if known is not None:
                    best, count = known[0]
                    if best == token_id:  # half the cases, and quick
                        table[ngram] = ((token_id, count + 1), *known[1:])
                    else:
                        table[ngram] = _counted(known, token_id)
                else:
                    table[ngram] = alone
                    if max_ngrams is not None:
                        by_age.append(ngram)
                        if len(by_age) > max_ngrams:
                            # by_age has every n-gram of the table once, so the key is there.
                            del table[by_age.popleft()]

    def followers(self, ngram: Ngram) -> tuple[Follower, ...]:
        """Returns the followers of the n-gram: the most counted first, the latest first among equals."""
        return self._followers.get(ngram, ())

    def longest(self, tail: Ngram, min_len: int = 1) -> tuple[Ngram, tuple[Follower, ...]] | None:
        """Returns the longest known n-gram of at least min_len tokens that the tail ends with, and its followers."""
        table = self._followers
        for first in range(len(tail) - min_len + 1):
            ngram = tail[first:]
            followers = table.get(ngram)
            if followers is not None:
                return ngram, followers
        return None

    def walk(self, tier: Source, ngram: Ngram, followers: Sequence[Follower], max_len: int) -> Continuation:
        """Follows the most counted tokens, from an n-gram and its followers; there is at least one follower.

        Every step looks at as many tokens as are known, up to the tier's max_match_len and never fewer than matched at
        first.

        Args:
            tier: The source that the continuation names.
            max_len: Tokens on the most counted path, at least 1.
        """
        table, max_match_len, match_len = self._followers, self.max_match_len, len(ngram)
        token_ids: list[TokenId] = []
        counts: list[int] = []
        alternatives: list[tuple[int, Follower]] = []
        known: Sequence[Follower] | None = followers
        tail = ngram
        for place in range(max_len):
            if known is None:
                break
            if place < len(FANOUT) and len(known) > 1:
                alternatives += [(place, follower) for follower in known[1 : FANOUT[place]]]
            token_id, count = known[0]
            token_ids.append(token_id)
            counts.append(count)
            tail = (*tail, token_id)[-max_match_len:]
            known = table.get(tail)
            if known is None:
                for length in range(len(tail) - 1, match_len - 1, -1):
                    known = table.get(tail[-length:])
                    if known is not None:
                        break
        return continuation_of(match_len, tier, token_ids, counts, alternatives)


def _counted(followers: tuple[Follower, ...], token_id: TokenId) -> tuple[Follower, ...]:
    """Returns the followers with one of them counted once more. There must be one at least."""
    # A newcomer goes after the last one, or takes its place if the list is full.
    index, count = min(len(followers), MAX_FOLLOWERS - 1), 1
    for number, (other, times) in enumerate(followers):
        if other == token_id:
            index, count = number, times + 1
            break
    # Before all with no greater count: so the order itself shows which came last.
    place = index
    while place and followers[place - 1][1] <= count:
        place -= 1
    return (*followers[:place], (token_id, count), *followers[place:index], *followers[index + 1 :])
