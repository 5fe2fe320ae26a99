"""One session's n-gram tiers in one process, in the order of DOUBLE (Algorithm 3).

The datastore answers exactly as `LocalTiers` does, from Redis. The class is its reference and, fed with the same
tokens, a copy of it that needs no message.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.params import TIERS, Source
from outrider.core.retrieval.guess import Followers
from outrider.core.retrieval.ngrams import MAX_FOLLOWERS, NOTHING, Continuation, Follower, Ngram, NgramTier, TokenId
from outrider.core.retrieval.prior import PriorTable

MAX_TREE_NODES = 64
"""Most nodes of a tree of continuations, as REST verifies (He et al. 2023, section 4.1)."""
MAX_REJECTED_NGRAMS = 2**14
"""N-grams of the rejected tier, of some hundred bytes each: unlike the text, refused drafts have no bound."""


class LocalTiers:
    """Looks up the tiers of one session. The longest match counts; at equal length, the tier that comes first in the
    given order. The default order is prior, dynamic, shared, rejected.

    Refused tokens are close to what the target says, so the rejected tier offers them again after the same tokens
    (DOUBLE, sections 4.3 and D.5). It does not answer after tokens that the dynamic tier matches equally well, since
    there the target has said something else. It does answer after the refused tokens themselves, which no other tier
    knows.

    The dynamic and the rejected tier are the session's own. `prior` and `shared` belong to others and may be replaced
    at any time; `shared` may also grow in another thread. The methods are called by one thread.
    """

    max_num_nodes = MAX_TREE_NODES

    def __init__(
        self,
        max_match_len: int,
        prior: PriorTable | None = None,
        shared: NgramTier | None = None,
        order: Sequence[Source] = TIERS,
    ) -> None:
        self.max_match_len = max_match_len
        self._order = order
        self.prior = prior
        self.shared = shared
        self.dynamic = NgramTier(max_match_len)
        self.rejected = NgramTier(max_match_len, MAX_REJECTED_NGRAMS)
        self.prediction = NgramTier(max_match_len)
        """A text that the session will probably repeat parts of; looked up if the order names it."""

    def record(self, accepted: Sequence[TokenId]) -> None:
        """Adds the next accepted tokens to the dynamic tier."""
        self.dynamic.record(accepted)

    def reject(self, context: Sequence[TokenId], rejected: Sequence[TokenId]) -> None:
        """Adds consecutive drafted tokens to the rejected tier; the target refused the first one."""
        tail = tuple(context[-self.max_match_len :])
        self.rejected.learn((*tail, *rejected), len(tail))

    def lookup(self, context: Sequence[TokenId], max_match_len: int, max_continuation_len: int) -> Continuation:
        """Returns the continuation of the longest suffix of the context that a tier knows, `NOTHING` if none knows one.

        Args:
            context: The last tokens of the session.
            max_match_len: Longest suffix. It limits the match, not the steps of the walk after it.
            max_continuation_len: Most tokens of the most counted path.
        """
        if max_match_len < 1 or max_continuation_len < 1:
            return NOTHING
        tail = tuple(context[-min(max_match_len, self.max_match_len) :])
        in_prior, in_tier = self._longest(tail)
        if in_tier is not None:
            source, tier, ngram, followers = in_tier
            return tier.walk(source, ngram, followers, max_continuation_len)
        if in_prior is None:
            return NOTHING
        prior, match_len, node = in_prior
        return prior.walk(match_len, node, max_continuation_len)

    def _longest(
        self, tail: Ngram
    ) -> tuple[tuple[PriorTable, int, int] | None, tuple[Source, NgramTier, Ngram, Sequence[Follower]] | None]:
        """Finds the longest match of a tail. The second item is set if the match is in another tier than the prior."""
        prior, shared = self.prior, self.shared  # read once: they may be replaced meanwhile
        tiers = {
            Source.PREDICTION: self.prediction,
            Source.DYNAMIC: self.dynamic,
            Source.SHARED: shared,
            Source.REJECTED: self.rejected,
        }
        match_len, in_prior, in_tier = 0, None, None
        # Each of these counts only with a longer match than all before it.
        for source in self._order:
            if source is Source.PRIOR:
                length, node = (0, -1) if prior is None else prior.longest(tail)
                if prior is not None and length > match_len:
                    match_len, in_prior, in_tier = length, (prior, length, node), None
                continue
            tier = tiers.get(source)
            found = None if tier is None else tier.longest(tail, match_len + 1)
            if tier is not None and found is not None:
                match_len, in_tier = len(found[0]), (source, tier, *found)
        return in_prior, in_tier

    def followers(self, path: Sequence[TokenId], depth: int) -> Followers | None:
        """Returns the followers of the longest suffix of a path that a tier knows; see `Branches`.

        REST (He et al. 2023, section 3.2) gathers all continuations of a context in a trie and weighs its nodes by the
        number of continuations through them. Here counts are of n-grams: a node's weight is the product of the shares
        on its path.
        """
        in_prior, in_tier = self._longest(tuple(path[-self.max_match_len :]))
        if in_tier is not None:
            source, _, ngram, followers = in_tier
            return Followers(source, len(ngram), followers)
        if in_prior is None:
            return None
        prior, match_len, node = in_prior
        return Followers(Source.PRIOR, match_len, prior.followers_at(node))

    def num_children(self, depth: int, rank: int) -> int:
        """Returns as many as are kept; see `Branches`."""
        return MAX_FOLLOWERS
