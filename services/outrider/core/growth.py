"""Growth policies: how a drafter's tree grows below the committed tokens, and when new nodes are sent.

A policy says which nodes go through the next draft forward, and whether the nodes that are not sent yet make a
message. It is pure; the speculator's engine asks it between two forwards. `speculative` (Leviathan et al. 2023) and
`pearl` (Liu et al. 2024) are both one chain: the first stops after gamma tokens and begins again with the next
commit, the second goes on to its lookahead while the target verifies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from outrider.core.params import Method, SpeculationParams
from outrider.core.tree import DraftTree, Node, TokenId


@dataclass(frozen=True, slots=True)
class Expansion:
    """Nodes to send through the next draft forward, and how many children each gets."""

    nodes: tuple[Node, ...]
    num_children: int
    max_len: int = 1
    """How many tokens in a row may be added below each node."""
    phrase: tuple[TokenId, ...] = ()
    """Retrieved tokens behind the only node. The same forward verifies them: as many as the draft model would have
    drawn itself are added, and one more (DOUBLE, section 4.1)."""


class GrowthPolicy(Protocol):
    """How a tree grows."""

    def next_expansion(self, tree: DraftTree) -> Expansion | None:
        """What to expand next; None = nothing until the next commit."""

    def is_message(self, tree: DraftTree, num_unsent: int) -> bool:
        """Whether the unsent nodes are worth a message now, though the tree still grows."""


@dataclass(frozen=True, slots=True)
class ChainGrowth:
    """One chain, each node the draft model's most probable draw."""

    max_depth: int
    """Nodes below the root."""
    min_path_logprob: float
    """Growth stops at a node whose path is less probable."""
    chain_len: int
    """Length of the chain that the target verifies at once: a message holds one."""
    min_chain_logprob: float
    """The target's chain ends where its path falls below this, so a first message need not go further."""

    def next_expansion(self, tree: DraftTree) -> Expansion | None:
        """The end of the chain, until it is long or improbable enough."""
        tip, depth, path_logprob = _tip(tree)
        if depth >= self.max_depth or path_logprob < self.min_path_logprob:
            return None
        return Expansion((tip,), 1, self.max_depth - depth)

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


def growth_policy(params: SpeculationParams) -> GrowthPolicy:
    """The policy of a method. ValueError for a method without a draft model."""
    probability = params.min_path_probability
    min_chain_logprob = math.log(probability) if probability > 0 else -math.inf
    gamma = params.num_speculative_tokens
    if params.method is Method.SPECULATIVE:
        return ChainGrowth(gamma, min_chain_logprob, gamma, min_chain_logprob)
    if params.method is Method.PEARL:
        # After a hit the root moves down the chain and the rest of the path is worth more: twice the logarithm lets
        # the chain that comes after the present one exist already.
        return ChainGrowth(params.lookahead, 2 * min_chain_logprob, gamma, min_chain_logprob)
    raise ValueError(f"method {params.method.value} has no draft model")
