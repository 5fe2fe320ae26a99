"""One chain: `speculative` (Leviathan et al. 2023), `pearl` (Liu et al. 2024) and `double`.

The first stops after gamma tokens and begins again with the next commit; the others go on to their lookahead while the
target verifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.growth.policy import Candidate, Child, Expansion, all_children, reach
from outrider.core.tree import DraftTree, Node


@dataclass(slots=True)
class ChainGrowth:
    """One chain, each node the draft model's most probable draw."""

    lookahead: int
    """Most nodes below the root."""
    min_path_logprob: float
    """Growth stops at a node whose path is less probable."""
    chain_len: int
    """Length of the chain that the target verifies at once: a message holds one."""
    min_chain_logprob: float
    """The target's chain ends where its path falls below this, so a first message need not go further."""
    max_depth: int = field(init=False)
    """Nodes below the root, by what is known of the distance."""

    def __post_init__(self) -> None:
        self.max_depth = self.lookahead

    def next_expansion(self, tree: DraftTree) -> Expansion | None:
        """The end of the chain, until it is long or improbable enough."""
        tip, depth, path_logprob = _tip(tree)
        if depth >= self.max_depth or path_logprob < self.min_path_logprob:
            return None
        return Expansion((tip,), 1, self.max_depth - depth)

    def children(self, tree: DraftTree, expansion: Expansion, found: Sequence[Sequence[Candidate]]) -> list[Child]:
        """The best one."""
        return all_children(expansion, found)

    def committed(self, tree: DraftTree, num_tokens: int, num_known: int) -> None:
        """Nothing is kept between commits."""

    def known_children(self, tree: DraftTree) -> list[Child]:
        """None: everything that was found and wanted is in the tree already."""
        return []

    def foresee(self, stale_tokens: float) -> None:
        """A chain has no choice but where it ends."""
        self.max_depth = reach(self.lookahead, self.chain_len, stale_tokens)

    def is_message(self, tree: DraftTree, num_unsent: int) -> bool:
        """A whole chain; and, right after a miss, as soon as the target would not verify more."""
        if num_unsent >= self.chain_len:
            return True
        _, depth, path_logprob = _tip(tree)
        return depth == num_unsent and path_logprob < self.min_chain_logprob


def _tip(tree: DraftTree) -> tuple[Node, int, float]:
    """The end of the most probable chain, its depth and the log-probability of its path."""
    node, depth, path_logprob = tree.root, 0, 0.0
    while node.children:
        node = next(iter(node.children.values()))
        depth += 1
        path_logprob += node.logprob
    return node, depth, path_logprob
