"""One chain of samples, for the ratio rule: `speculative` and `pearl` where drafts are drawn.

The rule keeps the target's distribution only if the testing of a drafted token has nothing to do with its own value. A
token that is sent when, or because, the tokens of its message have turned out improbable arrives in time for a round
that a more probable one would have missed, and the text is bent. So the length of a message is decided before its first
token is drawn, from what the target has said of earlier ones; what was drawn never decides when it is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.core.growth.fan_out import AcceptanceRate
from outrider.core.growth.policy import Candidate, Child, Expansion, all_children
from outrider.core.tree import DraftTree, Node


class SampledChainGrowth:
    """One chain, each node drawn by the draft model."""

    def __init__(self, max_depth: int, max_chain_len: int, min_path_probability: float, *, goes_on: bool) -> None:
        """
        Args:
            max_depth: Nodes below the root.
            max_chain_len: Most nodes of a message, which is what the target verifies at once.
            min_path_probability: A message is so long that the target keeps its last token with at least this
                probability, at the rate seen so far; 0 = max_chain_len.
            goes_on: Whether the chain grows beyond one message: to twice the length that is worth verifying, so that
                the next chain exists already when this one is kept.
        """
        self._max_depth = max_depth
        self._max_chain_len = max_chain_len
        self._min_path_logprob = math.log(min_path_probability) if min_path_probability > 0 else -math.inf
        self._goes_on = goes_on
        self._acceptance_rate = AcceptanceRate()
        self._depth = 0
        self._worth_len = self._next_worth_len()

    def next_expansion(self, tree: DraftTree) -> Expansion | None:
        """The end of the chain, until it is long enough."""
        tip, self._depth = _tip(tree)
        max_depth = min(self._max_depth, 2 * self._worth_len if self._goes_on else self.message_len)
        return Expansion((tip,), 1, max_depth - self._depth) if self._depth < max_depth else None

    def children(self, tree: DraftTree, expansion: Expansion, found: Sequence[Sequence[Candidate]]) -> list[Child]:
        """The one that was drawn."""
        return all_children(expansion, found)

    def committed(self, tree: DraftTree, num_tokens: int, num_known: int) -> None:
        """Counts what was kept and what was refused. While the chain goes on, all of it is kept, so its length never
        falls below what there is already."""
        is_refused = num_known < min(num_tokens, self._depth)
        self._acceptance_rate.add(num_known, is_refused=is_refused)
        self._worth_len = self._next_worth_len()

    def known_children(self, tree: DraftTree) -> list[Child]:
        """None: everything that was found and wanted is in the tree already."""
        return []

    def foresee(self, stale_tokens: float) -> None:
        """A chain has no choice."""

    def is_message(self, tree: DraftTree, num_unsent: int) -> bool:
        """As many nodes as were meant to be."""
        return num_unsent >= self.message_len

    @property
    def message_len(self) -> int:
        """Nodes of a message."""
        return min(self._max_chain_len, self._worth_len)

    def _next_worth_len(self) -> int:
        """As long as the whole path is expected to be probable enough."""
        if self._min_path_logprob == -math.inf:
            return max(self._max_depth, self._max_chain_len)
        return max(1, int(self._min_path_logprob / math.log(self._acceptance_rate.value)))


def _tip(tree: DraftTree) -> tuple[Node, int]:
    """The end of the chain, and its depth."""
    node, depth = tree.root, 0
    while node.children:
        node = next(iter(node.children.values()))
        depth += 1
    return node, depth
