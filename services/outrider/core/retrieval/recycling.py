"""Token Recycling: tokens that the target computed and did not say are kept (Luo et al. 2024, "Turning Trash into
Treasure: Accelerating Inference of Large Language Models with Token Recycling").

Every verified row says which tokens the target finds probable after one token, whether that was accepted or refused. An
adjacency matrix keeps the latest row of each token (section 3.1). A draft tree grows from it breadth-first, beginning
with the last committed token (section 3.2). The matrix belongs to one session and begins empty; nothing is trained, and
no peer is asked.

The paper keeps only the order of the next tokens. Here their probabilities are kept as well, so that above temperature
0 they are ranked with the target's noise, like the tokens of any other source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.core.params import Source
from outrider.core.retrieval.guess import Followers
from outrider.core.retrieval.ngrams import Follower
from outrider.core.tree import TokenId

NUM_NEXT = 8
"""Next tokens that are kept of each token (k of section 3.1)."""
TREE_SHAPE = (
    (8,),
    (8, 4, 3, 2, 1, 1, 1),
    (5, 3, 2, 1, 1),
    (4, 2, 1),
    (3, 1),
    (2,),
)
"""Children of a node, by its depth and its rank: the sum of the ranks of the tokens on its path. A node beyond the end
has none. 79 nodes in six layers, as about 80 in the paper, the more the nearer to the most probable path."""
NUM_TREE_NODES = 79


class AdjacencyMatrix:
    """Knows the target's own latest next tokens after each token. One thread owns it."""

    max_num_nodes = NUM_TREE_NODES

    def __init__(self) -> None:
        self._rows: dict[TokenId, tuple[Follower, ...]] = {}

    def __len__(self) -> int:
        """Number of tokens whose next tokens are known."""
        return len(self._rows)

    def learn(self, rows: Iterable[tuple[TokenId, Sequence[Follower]]]) -> None:
        """Takes in the tokens that the target found probable after some tokens. A later row replaces an earlier one.

        Args:
            rows: Each token, with at most NUM_NEXT next tokens and their weights, the most probable first.
        """
        for token_id, followers in rows:
            if followers:
                self._rows[token_id] = tuple(followers[:NUM_NEXT])

    def followers(self, path: Sequence[TokenId], depth: int) -> Followers | None:
        """Returns the tokens that the target found probable after the last token; see `Branches`."""
        known = self._rows.get(path[-1])
        # A row depends on one token only, at any depth.
        return None if known is None else Followers(Source.RECYCLED, 1, known)

    def num_children(self, depth: int, rank: int) -> int:
        """Returns the children of a node by TREE_SHAPE; see `Branches`."""
        by_rank = TREE_SHAPE[depth] if depth < len(TREE_SHAPE) else ()
        return by_rank[rank] if rank < len(by_rank) else 0
