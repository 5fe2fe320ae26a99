"""The interface of growth policies. They choose the nodes of the next draft forward, the found tokens that become
nodes, and the time at which nodes are worth a message.

A policy sees one session's tree and nothing else: no clock, no model, no stream. The speculator asks it between two
forwards. One policy belongs to one session, and may keep what it needs between calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from outrider.core.tree import DraftTree, Node, SparseRow, TokenId


class Candidate(NamedTuple):
    """A token that may follow a node."""

    token_id: TokenId
    logprob: float
    """Log-probability that the target says it there, by the draft model."""
    q: SparseRow | None = None
    """Distribution that it was drawn from. None means that it was picked. At most one candidate of a node was drawn,
    and it stands first."""


class Child(NamedTuple):
    """A candidate that becomes a node."""

    parent: Node
    candidate: Candidate


class Expansion(NamedTuple):
    """Nodes to send through the next draft forward, and the number of candidates that each wants."""

    nodes: tuple[Node, ...]
    """Each unexpanded, parents before children; the root may be among them."""
    num_children: int
    max_len: int = 1
    """Most tokens in a row that may be added below each node."""
    phrase: tuple[TokenId, ...] = ()
    """Retrieved tokens after the only node. The same forward verifies them: those that the draft model would have drawn
    itself are added, and one token more (DOUBLE, section 4.1)."""
    least_logprob: float = -math.inf
    """Least log-probability of a candidate, by the draft model itself; the best one counts in any case."""


NO_BIAS = (1.0, 0)
"""No token's probability is changed before a draw, see `GrowthPolicy.draw_bias`."""


class GrowthPolicy(Protocol):
    """Decides how one session's tree grows."""

    def next_expansion(self, tree: DraftTree) -> Expansion | None:
        """Returns the nodes to expand next. None means to wait for the next commit."""

    def children(self, tree: DraftTree, expansion: Expansion, found: Sequence[Sequence[Candidate]]) -> list[Child]:
        """Returns the candidates that become nodes, in the order in which they are added.

        Args:
            tree: The session's tree.
            expansion: The expansion that was sent through the draft model.
            found: For each of its nodes the candidates, best first.
        """

    def committed(self, tree: DraftTree, num_tokens: int, num_known: int) -> None:
        """Reacts to a commit, after the tree was re-rooted.

        Args:
            tree: The session's tree.
            num_tokens: Committed tokens.
            num_known: How many of them, from the first, the tree had as nodes.
        """

    def known_children(self, tree: DraftTree) -> list[Child]:
        """Returns the candidates that the last commit turns into nodes without a forward. Called once after each
        commit."""

    def foresee(self, stale_tokens: float, least_awaited: float) -> None:
        """Takes in limits that follow from the times of both sides.

        Until it is called, the tree grows as deep as it may, and the target waits for a whole chain.

        Args:
            stale_tokens: The round trip in tokens: how far the target goes before the present draft arrives.
            least_awaited: Least probability of a path after which another token is worth the wait of a target that has
                missed, see `outrider.core.departure`. 0 means that a whole chain is.
        """

    def is_message(self, tree: DraftTree, num_unsent: int) -> bool:
        """Returns true if the unsent nodes are worth a message now, though the tree still grows."""

    def draw_bias(self, node: Node) -> tuple[float, int]:
        """Returns the factor of the most probable tokens' probabilities before the draw after a node, and their
        number."""
        return NO_BIAS


def reach(lookahead: int, chain_len: int, stale_tokens: float) -> int:
    """Returns the depth to which a tree is worth growing, at most `lookahead`.

    The target's copy of the tree must last for the chain that it verifies now, for the next one, and for all tokens
    that it says before more nodes arrive. After some hits in a row that is several times the usual number.
    """
    return min(lookahead, 3 * chain_len + math.ceil(5 * stale_tokens))


def all_children(expansion: Expansion, found: Sequence[Sequence[Candidate]]) -> list[Child]:
    """Returns every candidate, up to the wanted number for each node."""
    wanted = expansion.num_children
    return [
        Child(node, candidate)
        for node, candidates in zip(expansion.nodes, found, strict=True)
        for candidate in candidates[:wanted]
    ]


def nodes_of(children: Iterable[Child]) -> list[Node]:
    """Returns the nodes that children have become, without those that a full tree did not take."""
    found = (parent.children.get(candidate.token_id) for parent, candidate in children)
    return [node for node in found if node is not None]


def tip_of(tree: DraftTree, node: Node) -> tuple[Node, int]:
    """Returns the end of the chain of first children that begins at a node, and its depth below the root."""
    while children := node.children:
        # If another policy has grown branches, this is the child that was added first.
        node = next(iter(children.values()))
    return node, node.position - tree.root.position
