"""A pool of n-grams by their first token, as in Lookahead decoding (Fu et al. 2024, section 3.2) and Ouroboros' phrase
pool (Zhao et al. 2024, sections 3.2 and 3.3).

The n-grams of the last committed token are verified, several candidates as branches side by side. The pool is filled
from verdicts and draft trees: with the prompt and the accepted tokens, and with those parts of refused drafts that the
target agreed with. Lookahead decoding also fills it by Jacobi iteration; its window needs rows of the target that
verify nothing, and there are none here.

A pool belongs to one session, and its newest n-grams come first.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.params import Source, check
from outrider.core.retrieval.guess import Followers
from outrider.core.retrieval.ngrams import Ngram
from outrider.core.tree import Node, TokenId

NGRAM_LEN = 6
"""Tokens of an n-gram, its key included."""
MAX_PER_KEY = 8
"""N-grams that are kept for one first token: an older one makes room for a newer one."""


class NgramPool:
    """Knows the latest n-grams that begin with each token. One thread owns it."""

    max_num_nodes = MAX_PER_KEY * (NGRAM_LEN - 1)

    def __init__(self, ngram_len: int = NGRAM_LEN, max_per_key: int = MAX_PER_KEY) -> None:
        check(ngram_len >= 2, "ngram_len", ">= 2", ngram_len)
        check(max_per_key >= 1, "max_per_key", ">= 1", max_per_key)
        self.ngram_len, self.max_per_key = ngram_len, max_per_key
        self.max_num_nodes = max_per_key * (ngram_len - 1)
        self._ngrams: dict[TokenId, tuple[Ngram, ...]] = {}
        """N-grams by the token that they follow, the newest first."""
        self._tail: list[TokenId] = []

    def ngrams(self, key: TokenId) -> tuple[Ngram, ...]:
        """Returns the n-grams that begin with a token, without that token, the newest first."""
        return self._ngrams.get(key, ())

    def record(self, token_ids: Sequence[TokenId]) -> None:
        """Adds the next accepted tokens. N-grams that span two calls count like any other; an n-gram at the end that
        still lacks tokens is added with the call that brings them."""
        stream, length = [*self._tail, *token_ids], self.ngram_len
        for end in range(length, len(stream) + 1):
            self._add(tuple(stream[end - length : end]))
        self._tail = stream[-(length - 1) :]

    def learn(self, phrase: Sequence[TokenId]) -> None:
        """Adds consecutive tokens that were not accepted, but that the target agreed with one after the other. Phrases
        of fewer than two tokens are ignored."""
        if len(phrase) < 2:
            return
        for start in range(max(1, len(phrase) - self.ngram_len + 1)):
            self._add(tuple(phrase[start : start + self.ngram_len]))

    def _add(self, ngram: Ngram) -> None:
        key, tail = ngram[0], ngram[1:]
        # An n-gram contains its beginnings, so a shorter one of the same tokens would waste a place.
        others = [known for known in self.ngrams(key) if known[: len(tail)] != tail and tail[: len(known)] != known]
        longer = next(
            (known for known in self.ngrams(key) if len(known) > len(tail) and known[: len(tail)] == tail), tail
        )
        self._ngrams[key] = (longer, *others)[: self.max_per_key]

    def followers(self, path: Sequence[TokenId], depth: int) -> Followers | None:
        """Returns the next tokens of the n-grams that begin with the last committed token and the guessed ones; see
        `Branches`."""
        if depth >= len(path):
            return None
        begun = tuple(path[len(path) - depth :])
        weights: dict[TokenId, int] = {}
        for age, ngram in enumerate(self.ngrams(path[-1 - depth])):
            if len(ngram) > depth and ngram[:depth] == begun:
                # The oldest n-gram counts least; each newer place adds one.
                weights[ngram[depth]] = weights.get(ngram[depth], 0) + self.max_per_key - age
        if not weights:
            return None
        # Stable, so that the newer one of equals stays first.
        ordered = sorted(weights.items(), key=lambda follower: -follower[1])
        return Followers(Source.POOL, depth + 1, ordered)

    def num_children(self, depth: int, rank: int) -> int:
        """Returns as many as there are n-grams; see `Branches`."""
        return self.max_per_key


def agreed_phrases(root: Node, nodes: Sequence[Node], draws: Sequence[TokenId]) -> list[list[TokenId]]:
    """Returns the parts of refused drafts that the target agreed with (Ouroboros, section 3.3).

    The target has drawn after refused tokens, too, as if they were accepted. If its draw equals the next drafted token,
    the two are a phrase. The phrase goes on as far as they agree, and the target's own next token ends it.

    Args:
        root: Root of the tree that the nodes are of, before the verdict.
        nodes: Verified nodes, parents before children.
        draws: The target's token for the root and for each node; those of the last nodes may be missing, as they are
            under the ratio rule.
    """
    rows = {root: 0} | {node: row for row, node in enumerate(nodes, start=1)}
    phrases = []
    for node in nodes:
        parent = node.parent
        if parent is None or (rows[parent] < len(draws) and draws[rows[parent]] == node.token_id):
            continue  # accepted, or a later token of a phrase
        phrase, tip = [node.token_id], node
        while rows[tip] < len(draws):
            phrase.append(draws[rows[tip]])
            child = tip.children.get(phrase[-1])
            if child is None or child not in rows:
                break
            tip = child
        if tip is not node:
            phrases.append(phrase)
    return phrases
