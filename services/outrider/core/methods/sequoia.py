"""Growth of Sequoia: a tree with a shape that follows from the acceptance rates by rank (Chen et al. 2024, "Sequoia:
Scalable, Robust, and Hardware-aware Speculative Decoding").

The paper assumes that the k-th guess after any node is the target's token with a probability p_k that depends on k
alone (section 3.1, the positional acceptance assumption). The worth of a place in the tree is then the product of the
p_k down to it, and the tree of n nodes that keeps the most tokens is the same whatever the text. The paper measures the
p_k beforehand; here each session learns its own, from its own verdicts.

The paper draws siblings without replacement from the draft model and verifies them with a rule of its own, so that the
text has the target's distribution. Here the match rule verifies them: siblings are the best guesses, ranked under the
target's own noise, and the text is the target's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from outrider.core.growth import Candidate, Child, Expansion, GrowthPolicy
from outrider.core.params import Rows
from outrider.core.speculation import (
    AS_PICKED,
    MAX_ROWS,
    Method,
    MethodParams,
    Preset,
    SpeculationParams,
    Waiting,
    check_range,
)
from outrider.core.tree import DraftTree, Node, NodeState, TokenId

Place = tuple[int, ...]
"""A place in a tree: the ranks of the guesses from the root down to it, 0 being the best one. () is the root."""
MAX_RANKS = 16
"""Guesses after one node that may become its children."""
FIRST_RATES = tuple(0.6 * 0.3**rank for rank in range(MAX_RANKS))
"""Acceptance rates by rank before the first verdicts."""
FIRST_WEIGHT = 8.0
"""Verdicts that the first rates count for."""
MEMORY = 0.99
"""Factor of what was learnt before, with each verdict: a text changes."""


class RankRates:
    """Learns how often the target says the k-th guess after a node (p_k)."""

    def __init__(self) -> None:
        self._hits = [FIRST_WEIGHT * rate for rate in FIRST_RATES]
        self._total = FIRST_WEIGHT

    def add(self, rank: int | None) -> None:
        """Adds a token of the target's, after a node whose guesses are known.

        Args:
            rank: Rank of the guess that equals it, from 0. None means that no guess does.
        """
        self._hits = [MEMORY * hits for hits in self._hits]
        self._total = MEMORY * self._total + 1
        if rank is not None and rank < MAX_RANKS:
            self._hits[rank] += 1

    @property
    def values(self) -> list[float]:
        """The rates by rank, made non-increasing: a higher rate at a lower rank is chance."""
        rates: list[float] = []
        for hits in self._hits:
            rates.append(min(hits / self._total, rates[-1] if rates else 1.0))
        return rates


def tree_shape(rates: Sequence[float], num_nodes: int, max_depth: int) -> dict[Place, int]:
    """Returns the tree of `num_nodes` that keeps the most tokens, as the number of children of each place with
    children.

    The paper finds it by dynamic programming (section 3.1.2). Where rates do not rise with the rank, the greedy choice
    is as good: a place is never worth more than its parent or than its elder sibling, so the best `num_nodes` places
    are connected.

    Args:
        rates: Acceptance rates by rank, none greater than the one before.
        num_nodes: Nodes below the root.
        max_depth: Greatest depth of a node; that of the root's children is 1.
    """
    shape: dict[Place, int] = {}
    # The first child of the root; then, with each place, its first child and its next sibling.
    # Each entry: the place's worth (negative, as the least comes first), the place, and its parent's worth.
    heap: list[tuple[float, Place, float]] = [(-rates[0], (0,), 1.0)] if max_depth > 0 else []
    for _ in range(num_nodes):
        if not heap:
            break
        negative_worth, place, parent_worth = heappop(heap)
        parent, rank = place[:-1], place[-1]
        shape[parent] = rank + 1
        if len(place) < max_depth:
            heappush(heap, (negative_worth * rates[0], (*place, 0), -negative_worth))
        if rank + 1 < len(rates):
            heappush(heap, (-parent_worth * rates[rank + 1], (*parent, rank + 1), parent_worth))
    return shape


@dataclass(frozen=True, slots=True)
class SequoiaParams(MethodParams):
    """Sequoia: a tree with a shape that follows from the acceptance rates by rank."""

    num_nodes: int = 32
    """Nodes of a tree (n)."""

    def __post_init__(self) -> None:
        check_range("sequoia.num_nodes", self.num_nodes, 1, MAX_ROWS)


class SequoiaGrowth(GrowthPolicy):
    """Grows one session's tree into its shape between a commit and the verification that waits for it.

    One forward for each layer. Nodes that a commit leaves take their places in the next tree: an expanded node needs no
    second forward. The tree goes out whole.
    """

    def __init__(self, params: SpeculationParams) -> None:
        self._num_nodes = params.of(SequoiaParams).num_nodes
        self._max_depth = params.num_speculative_tokens
        self._rates = RankRates()
        self._shape = self._next_shape()
        self._root: Node | None = None
        """The root at the last commit. None before the first look at the tree."""
        self._found: dict[Node, tuple[Candidate, ...]] = {}
        """Guesses after each node that was expanded, best first."""

    def _next_shape(self) -> dict[Place, int]:
        return tree_shape(self._rates.values, self._num_nodes, self._max_depth)

    def next_expansion(self, tree: DraftTree) -> Expansion | None:
        """Returns the nodes that want children and have not been through a forward: a layer of them."""
        self._root = tree.root
        # A root without candidates after its forward goes through another one.
        nodes = [
            node
            for node, _ in self._wanting(tree)
            if not (self._found.get(node) or (node.is_expanded and (node.children or node is not tree.root)))
        ]
        return Expansion(tuple(nodes), MAX_RANKS) if nodes else None

    def children(self, tree: DraftTree, expansion: Expansion, found: Sequence[Sequence[Candidate]]) -> list[Child]:
        """Returns as many guesses after each node as its place has children."""
        for node, candidates in zip(expansion.nodes, found, strict=True):
            # After calibration, a lower rank may be more probable.
            self._found[node] = tuple(sorted(candidates, key=lambda candidate: -candidate.logprob))
        expanded = set(expansion.nodes)
        return self._best_guesses([(node, count) for node, count in self._wanting(tree) if node in expanded])

    def committed(self, tree: DraftTree, num_tokens: int, num_known: int) -> None:
        """Learns which guesses the target has followed, and shapes the next tree by that."""
        self._learn(tree.committed[-num_tokens:])
        self._root = tree.root
        self._found = {
            node: found for node, found in self._found.items() if node is tree.root or node.state is NodeState.LIVE
        }
        self._shape = self._next_shape()

    def _learn(self, token_ids: Sequence[TokenId]) -> None:
        # A committed node has lost its parent and its siblings, but it keeps its position.
        path = {node.position: node for node in self._found if node.state is NodeState.COMMITTED}
        node = self._root
        for token_id in token_ids:
            guesses = [candidate.token_id for candidate in self._found.get(node, ())] if node is not None else []
            if node is None or not guesses:
                return
            self._rates.add(guesses.index(token_id) if token_id in guesses else None)
            node = path.get(node.position + 1)

    def known_children(self, tree: DraftTree) -> list[Child]:
        """Returns further guesses after nodes that are expanded and have more children in this tree."""
        return self._best_guesses([(node, count) for node, count in self._wanting(tree) if node in self._found])

    def foresee(self, stale_tokens: float, least_awaited: float) -> None:
        """Does nothing: the target waits, so it is in the same place when the tree arrives."""

    def is_message(self, tree: DraftTree, num_unsent: int) -> bool:
        """Returns false: the tree goes out whole, when nothing grows any more."""
        return False

    def _wanting(self, tree: DraftTree) -> list[tuple[Node, int]]:
        """Returns the nodes that stand at a place with children, parents first, and their numbers of children."""
        wanting: list[tuple[Node, int]] = []
        places: list[tuple[Node, Place]] = [(tree.root, ())]
        for node, place in places:  # grows on the way
            if count := self._shape.get(place, 0):
                wanting.append((node, count))
                ranked = self._ranked_children(node)[:count]
                places += [(child, (*place, rank)) for rank, child in enumerate(ranked)]
        return wanting

    def _ranked_children(self, node: Node) -> list[Node]:
        """Returns the children of a node, best guess first."""
        guesses = self._found.get(node)
        if guesses is None:  # another policy has grown them
            return sorted(node.children.values(), key=lambda child: -child.logprob)
        standing = (node.children.get(candidate.token_id) for candidate in guesses)
        return [child for child in standing if child is not None]

    def _best_guesses(self, wanting: Sequence[tuple[Node, int]]) -> list[Child]:
        return [Child(node, candidate) for node, count in wanting for candidate in self._found[node][:count]]


METHOD = Method(
    "sequoia",
    "after each check a tree shaped by how often guesses were right",
    "#332288",
    parameters=SequoiaParams,
    grow=SequoiaGrowth,
    waiting=Waiting.IN_TURNS,
    rows=Rows.TREE,
    published=Preset(
        "Sequoia, Chen et al. 2024",
        fixed={**AS_PICKED, "rows": Rows.TREE, "retrieval": False},
        tunable={"num_speculative_tokens": 10, "max_rows": 64, "sequoia": {"num_nodes": 64}},
    ),
)
