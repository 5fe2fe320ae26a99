"""One chain: `speculative` (Leviathan et al. 2023), `pearl` (Liu et al. 2024) and `double`.

The first stops after gamma tokens and begins again with the next commit; the others go on to their lookahead while the
target verifies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.drafting.fan_out import AcceptanceRate
from outrider.core.drafting.policy import Candidate, Child, Expansion, all_children, reach
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
        tip, self._depth = _sampled_tip(tree)
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


def _sampled_tip(tree: DraftTree) -> tuple[Node, int]:
    """The end of the chain, and its depth."""
    node, depth = tree.root, 0
    while node.children:
        node = next(iter(node.children.values()))
        depth += 1
    return node, depth
