"""What a growth policy is: it says what goes through the next draft forward, what of its result becomes a node, and
when nodes are worth a message.

A policy sees one session's tree and nothing else: no clock, no model, no stream. The speculator asks it between two
forwards. One policy belongs to one session, and may keep what it needs between calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from outrider.core.tree import DraftTree, Node, SparseRow, TokenId


class Candidate(NamedTuple):
    """A token that may follow a node."""

    token_id: TokenId
    logprob: float
    """That the target says it there, as far as the draft model can tell."""
    q: SparseRow | None = None
    """What it was drawn from; None = it was picked. At most one candidate of a node was drawn, and it stands first."""


class Child(NamedTuple):
    """A candidate that becomes a node."""

    parent: Node
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Expansion:
    """Nodes to send through the next draft forward, and how many candidates each wants."""

    nodes: tuple[Node, ...]
    """Each unexpanded, parents before children; the root may be among them."""
    num_children: int
    max_len: int = 1
    """How many tokens in a row may be added below each node."""
    phrase: tuple[TokenId, ...] = ()
    """Retrieved tokens behind the only node. The same forward verifies them: as many as the draft model would have
    drawn itself are added, and one more (DOUBLE, section 4.1)."""


class GrowthPolicy(Protocol):
    """How one session's tree grows."""

    def next_expansion(self, tree: DraftTree) -> Expansion | None:
        """What to expand next; None = nothing until the next commit."""

    def children(self, tree: DraftTree, expansion: Expansion, found: Sequence[Sequence[Candidate]]) -> list[Child]:
        """Which candidates become nodes, in the order in which they are added: for each node of the expansion, `found`
        has its candidates, best first."""

    def committed(self, tree: DraftTree, num_tokens: int, num_known: int) -> None:
        """The tree was re-rooted by so many committed tokens, of which it had the first `num_known` as nodes."""

    def known_children(self, tree: DraftTree) -> list[Child]:
        """What the last commit makes into nodes without a forward. Asked once after each commit."""

    def foresee(self, stale_tokens: float) -> None:
        """How many tokens further the target will be when what is drafted now has arrived: the round trip in tokens.
        Until it is known, the tree grows as deep as it may."""

    def is_message(self, tree: DraftTree, num_unsent: int) -> bool:
        """Whether the unsent nodes are worth a message now, though the tree still grows."""


def reach(lookahead: int, chain_len: int, stale_tokens: float) -> int:
    """How deep a tree is worth growing: what the target has must last for the chain that it verifies now, the next one,
    and all that it says before it hears more, which after some hits in a row is several times the usual. Never beyond
    `lookahead`."""
    return min(lookahead, 3 * chain_len + math.ceil(5 * stale_tokens))


def all_children(expansion: Expansion, found: Sequence[Sequence[Candidate]]) -> list[Child]:
    """Every candidate, as many for each node as were wanted."""
    wanted = expansion.num_children
    return [
        Child(node, candidate)
        for node, candidates in zip(expansion.nodes, found, strict=True)
        for candidate in candidates[:wanted]
    ]


def nodes_of(children: Iterable[Child]) -> list[Node]:
    """What children have become in the tree; nothing where the tree was full."""
    found = (parent.children.get(candidate.token_id) for parent, candidate in children)
    return [node for node in found if node is not None]
