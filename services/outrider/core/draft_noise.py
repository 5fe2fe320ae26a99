"""The noise with which a draft model samples under the ratio rule: a pure function of (seed, context).

It is independent of everything that the target draws with. It is keyed by the whole context, not by the position alone:
two nodes of one position (siblings' children, or what is drafted there again after another token was committed) must
not share noise. Otherwise whatever a growth policy does after it has seen one of them would tell something about
the other, and the ratio rule needs drafts whose testing has nothing to do with their own value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from outrider.core.growth.policy import Expansion
from outrider.core.tree import DraftTree, Node, TokenId


class DraftNoise:
    """The noise of one session. The same context has the same noise, whatever of it is committed."""

    def __init__(self, seed: int) -> None:
        key = seed.to_bytes(8, "little")
        self._hash = hashlib.blake2b(digest_size=8, key=key, person=b"outrider draft")
        self._num_hashed = 0

    def words(self, tree: DraftTree, expansion: Expansion) -> list[int]:
        """A word for each draw that an expansion's logits are for: uniform in [0, 2**64).

        The first ones are for the nodes, one each, then one for each token of the phrase.
        """
        committed = tree.committed
        if self._num_hashed < len(committed):
            self._hash.update(_bytes(committed[self._num_hashed :]))
            self._num_hashed = len(committed)
        words, path = [], list[TokenId]()
        for node in expansion.nodes:
            path = _path(tree.root, node)
            words.append(self._word(path))
        for token_id in expansion.phrase:
            path.append(token_id)
            words.append(self._word(path))
        return words

    def _word(self, path: Sequence[TokenId]) -> int:
        if not path:
            return int.from_bytes(self._hash.digest(), "little")
        context = self._hash.copy()
        context.update(_bytes(path))
        return int.from_bytes(context.digest(), "little")


def _bytes(token_ids: Sequence[TokenId]) -> bytes:
    return np.asarray(token_ids, dtype="<u4").tobytes()


def _path(root: Node, node: Node) -> list[TokenId]:
    """The tokens below the root down to a node."""
    path: list[TokenId] = []
    above: Node | None = node
    while above is not None and above is not root:
        path.append(above.token_id)
        above = above.parent
    path.reverse()
    return path
