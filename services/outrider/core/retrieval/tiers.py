"""One session's n-gram tiers in one process, in the order of DOUBLE (Algorithm 3).

The datastore answers exactly as `LocalTiers` does, from Redis. The class is its reference and, fed with the same
tokens, a copy of it that needs no message.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.params import Source
from outrider.core.retrieval.ngrams import MAX_FOLLOWERS, NOTHING, Continuation, Ngram, NgramTier, TokenId
from outrider.core.retrieval.prior import PriorTable


class LocalTiers:
    """Looks up the tiers of one session. The longest match counts; at equal length prior, dynamic, shared, then
    rejected.

    A follower in the prior tier is passed over where this session's target has refused it, after the same max_match_len
    tokens: what others said must not be guessed again and again after the target has refused it.

    The dynamic and the rejected tier are the session's own. `prior` and `shared` are kept by others, may be replaced at
    any time, and `shared` may grow meanwhile in another thread. The methods are called by one thread.
    """

    def __init__(self, max_match_len: int, prior: PriorTable | None = None, shared: NgramTier | None = None) -> None:
        self.max_match_len = max_match_len
        self.prior = prior
        self.shared = shared
        self.dynamic = NgramTier(max_match_len)
        self.rejected = NgramTier(max_match_len)
        self._refused: dict[Ngram, tuple[TokenId, ...]] = {}

    def record(self, accepted: Sequence[TokenId]) -> None:
        """Adds the next accepted tokens to the dynamic tier."""
        self.dynamic.record(accepted)

    def reject(self, context: Sequence[TokenId], rejected: Sequence[TokenId], continuation: Sequence[TokenId]) -> None:
        """Adds what the target said instead of a refused draft, and marks the token that it refused.

        Only the first rejected token is marked: the target never judged those behind it.
        """
        tail = tuple(context[-self.max_match_len :])
        self.rejected.learn((*tail, *continuation), len(tail))
        self.refuse(tail, rejected[0])

    def refuse(self, context: Sequence[TokenId], token_id: TokenId) -> None:
        """Marks a token that the target refused. Enough where the dynamic tier learns what it said instead."""
        tail = tuple(context[-self.max_match_len :])
        others = (other for other in self._refused.get(tail, ()) if other != token_id)
        # The latest first: where there are too many, the oldest is forgotten.
        self._refused[tail] = (token_id, *others)[:MAX_FOLLOWERS]

    def lookup(self, context: Sequence[TokenId], max_match_len: int, max_continuation_len: int) -> Continuation:
        """Returns what followed the longest suffix of the context that a tier knows, `NOTHING` if none knows one.

        Args:
            context: The last tokens of the session.
            max_match_len: Longest suffix. It limits the match, not the steps of the walk behind it.
            max_continuation_len: Most tokens of the most counted path.
        """
        if max_match_len < 1 or max_continuation_len < 1:
            return NOTHING
        tail = tuple(context[-min(max_match_len, self.max_match_len) :])
        prior, shared = self.prior, self.shared  # read once: they may be replaced meanwhile
        refused = self._refused.get(tail, ())
        match_len, node = (0, -1) if prior is None else prior.longest(tail, refused)
        best = None
        # Each of these counts only with a longer match than all before it.
        for source, tier in ((Source.DYNAMIC, self.dynamic), (Source.SHARED, shared), (Source.REJECTED, self.rejected)):
            found = None if tier is None else tier.longest(tail, match_len + 1)
            if tier is not None and found is not None:
                best = source, tier, *found
                match_len = len(found[0])
        if best is not None:
            source, tier, ngram, followers = best
            return tier.walk(source, ngram, followers, max_continuation_len)
        if prior is None or not match_len:
            return NOTHING
        if refused:
            return prior.walk_past(refused, tail[-match_len:], node, max_continuation_len)
        return prior.walk(match_len, node, max_continuation_len)
