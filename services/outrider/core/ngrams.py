"""N-gram continuations: what followed the last tokens, the times they were seen before.

`OwnText` indexes one session's own prompt and output (prompt lookup, Saxena 2023). `NgramTier` counts what follows each
n-gram of a stream, and `NgramTiers` puts the prior, dynamic and rejected tiers of DOUBLE (Algorithm 3) in order. The
datastore answers exactly as `NgramTiers` does; the class is its reference and, fed with the same tokens, a local copy
of it.

Pure: token ids in, token ids out. A guess may be wrong; it never raises for a context that is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.core.params import Source, check

TokenId = int
Ngram = tuple[TokenId, ...]

MAX_FOLLOWERS = 8
"""Next tokens kept for one n-gram. A newcomer takes the place of the least counted: no list grows without bound."""

FANOUT = (4, 2)
"""Followers returned at the first positions of a continuation, the most counted included. Later positions: one each."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What followed a context: a small tree. The three lists run in parallel.

    The most counted path comes first, its nodes in order; the alternatives at its first positions come after it.
    """

    match_len: int
    """Length of the suffix that matched; 0 = nothing found, and no nodes."""
    tier: Source | None
    """The tier that matched."""
    parent_offsets: tuple[int, ...]
    """Distance from a node to its parent; 0 = follows the context directly."""
    token_ids: tuple[TokenId, ...]
    counts: tuple[int, ...]
    """How often each token followed the n-gram before it."""

    def chain(self) -> tuple[TokenId, ...]:
        """The most counted path."""
        length = 0
        while length < len(self.token_ids) and self.parent_offsets[length] == min(length, 1):
            length += 1
        return self.token_ids[:length]


NOTHING = Continuation(0, None, (), (), ())


class OwnText:
    """One session's committed tokens, indexed by n-gram.

    Keeps the latest occurrence only: on source code and on documentation, a vote over the last 16 occurrences and the
    one with the longest common past had as many tokens accepted, within 2 %. N-grams of 2 to 4: nothing is gained
    beyond 4. Matches of a single token had a quarter more tokens accepted, for 60 to 85 % more proposed ones: worth it
    only where verifying is all but free.
    """

    def __init__(self, min_match_len: int = 2, max_match_len: int = 4) -> None:
        check(1 <= min_match_len <= max_match_len, "min_match_len", f"in [1, {max_match_len}]", min_match_len)
        self._lengths = range(max_match_len, min_match_len - 1, -1)
        self._max_match_len = max_match_len
        self._token_ids: list[TokenId] = []
        self._latest: dict[Ngram, int] = {}  # n-gram -> position of the token that followed it last

    def __len__(self) -> int:
        return len(self._token_ids)

    def append(self, token_ids: Iterable[TokenId]) -> None:
        """Adds committed tokens. Costs one dictionary entry for each token and n-gram length."""
        tokens = self._token_ids
        for token_id in token_ids:
            position = len(tokens)
            for n in self._lengths:
                if n <= position:
                    self._latest[tuple(tokens[position - n :])] = position
            tokens.append(token_id)

    def continuation(self, context: Sequence[TokenId], max_len: int) -> list[TokenId]:
        """Guesses up to max_len tokens that follow the context; fewer, or none, where the text knows no more.

        The context is the end of the committed tokens and of the chain behind them, if any; only its last max_match_len
        tokens matter. Where the copied passage reaches the end of the text, the guess itself is looked up, so that a
        repetition goes on.
        """
        tail = list(context[-self._max_match_len :])
        known = len(tail)
        while (missing := max_len + known - len(tail)) > 0:
            position = self._position_after(tail)
            if position is None:
                break
            tail += self._token_ids[position : position + missing]
        return tail[known:]

    def _position_after(self, tail: Sequence[TokenId]) -> int | None:
        for n in self._lengths:
            if n <= len(tail):
                position = self._latest.get(tuple(tail[-n:]))
                if position is not None:
                    return position
        return None


@dataclass(frozen=True, slots=True)
class Follower:
    """A token that followed an n-gram."""

    token_id: TokenId
    count: int


class NgramTier:
    """Counts what follows each n-gram of one to max_match_len tokens."""

    def __init__(self, max_match_len: int) -> None:
        check(max_match_len >= 1, "max_match_len", ">= 1", max_match_len)
        self.max_match_len = max_match_len
        self._followers: dict[Ngram, list[Follower]] = {}
        self._tail: list[TokenId] = []

    def record(self, token_ids: Sequence[TokenId]) -> None:
        """Adds the next tokens of the tier's stream. N-grams that span two calls count like any other."""
        stream = [*self._tail, *token_ids]
        self.learn(stream, len(self._tail))
        self._tail = stream[-self.max_match_len :]

    def learn(self, token_ids: Sequence[TokenId], start: int = 0) -> None:
        """Counts token_ids[start:] as followers of the n-grams before them; the stream of `record` is not touched."""
        for position in range(max(start, 1), len(token_ids)):
            for n in range(1, min(self.max_match_len, position) + 1):
                self._count(tuple(token_ids[position - n : position]), token_ids[position])

    def followers(self, ngram: Ngram) -> Sequence[Follower]:
        """What followed the n-gram: the most counted first, the latest first among equals."""
        return self._followers.get(ngram, ())

    def _count(self, ngram: Ngram, token_id: TokenId) -> None:
        followers = self._followers.setdefault(ngram, [])
        count = 1
        for index, follower in enumerate(followers):
            if follower.token_id == token_id:
                count += followers.pop(index).count
                break
        else:
            del followers[MAX_FOLLOWERS - 1 :]
        # Ahead of all that are counted no more often: the order itself remembers which came last.
        place = next((i for i, follower in enumerate(followers) if follower.count <= count), len(followers))
        followers.insert(place, Follower(token_id, count))


class NgramTiers:
    """The three tiers of one session. The longest match counts; at equal length prior, then dynamic, then rejected.

    A follower in the prior tier is passed over where this session's target has refused it, after the same max_match_len
    tokens: what others said must not be guessed again and again against the evidence.
    """

    def __init__(self, max_match_len: int, prior: NgramTier | None = None) -> None:
        self.max_match_len = max_match_len
        self.prior = prior or NgramTier(max_match_len)
        self.dynamic = NgramTier(max_match_len)
        self.rejected = NgramTier(max_match_len)
        self._refused: dict[Ngram, list[TokenId]] = {}

    def record(self, accepted: Sequence[TokenId]) -> None:
        """Adds the next accepted tokens to the dynamic tier."""
        self.dynamic.record(accepted)

    def reject(self, context: Sequence[TokenId], rejected: Sequence[TokenId], continuation: Sequence[TokenId]) -> None:
        """Adds what the target said instead of a refused draft, and marks the token that it refused.

        Only the first rejected token is marked: the target never judged those behind it.
        """
        tail = tuple(context[-self.max_match_len :])
        self.rejected.learn([*tail, *continuation], len(tail))
        refused = [token_id for token_id in self._refused.get(tail, ()) if token_id != rejected[0]]
        self._refused[tail] = [rejected[0], *refused][:MAX_FOLLOWERS]

    def lookup(self, context: Sequence[TokenId], max_match_len: int, max_continuation_len: int) -> Continuation:
        """What followed the longest suffix of the context, of at most max_match_len tokens, that a tier knows."""
        tail = tuple(context[-max_match_len:])
        refused = self._refused.get(tail, ())
        for match_len in range(len(tail), 0, -1):
            ngram = tail[-match_len:]
            prior = [follower for follower in self.prior.followers(ngram) if follower.token_id not in refused]
            if prior:
                return _walk(self.prior, Source.PRIOR, ngram, prior, max_match_len, max_continuation_len)
            for source, tier in ((Source.DYNAMIC, self.dynamic), (Source.REJECTED, self.rejected)):
                followers = tier.followers(ngram)
                if followers:
                    return _walk(tier, source, ngram, followers, max_match_len, max_continuation_len)
        return NOTHING


def _walk(
    tier: NgramTier, source: Source, ngram: Ngram, followers: Sequence[Follower], max_match_len: int, max_len: int
) -> Continuation:
    """Follows the most counted tokens within one tier, from an n-gram and its followers.

    Every step looks at as many tokens as are known, up to max_match_len and never fewer than matched at first.
    """
    match_len, tail = len(ngram), ngram
    chain: list[Follower] = []
    alternatives: list[tuple[int, Follower]] = []  # (index of the parent counted from 1; 0 = the context, follower)
    while followers and len(chain) < max_len:
        if len(chain) < len(FANOUT):
            alternatives += [(len(chain), follower) for follower in followers[1 : FANOUT[len(chain)]]]
        chain.append(followers[0])
        tail = (*tail, followers[0].token_id)[-max_match_len:]
        lengths = range(len(tail), match_len - 1, -1)
        followers = next((found for n in lengths if (found := tier.followers(tail[-n:]))), ())
    offsets = [min(index, 1) for index in range(len(chain))]
    for number, (parent, _) in enumerate(alternatives, len(chain) + 1):
        offsets.append(number - parent if parent else 0)
    nodes = [*chain, *(follower for _, follower in alternatives)]
    return Continuation(
        match_len, source, tuple(offsets), tuple(node.token_id for node in nodes), tuple(node.count for node in nodes)
    )
