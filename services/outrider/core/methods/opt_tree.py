"""Growth of OPT-Tree: the n nodes with the most probable paths, found layer by layer (Wang et al. 2024, "OPT-Tree:
Speculative Decoding with Adaptive Draft Tree Structure").

The paper's score of a node is the product of the draft model's probabilities down to it, and the sum of the scores of a
tree is the number of its tokens that the target is expected to keep (its Theorem 3.1). So the best tree of n nodes
holds those with the greatest scores, and its shape follows the text.

Unlike in the paper, a tree does not begin from nothing after a commit: the nodes that a commit leaves have been through
their forwards, and compete with new ones. So do the candidates that were found there and cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest

from outrider.core.growth import Candidate, Child, Expansion, GrowthPolicy, all_children
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
from outrider.core.tree import DraftTree, Node, NodeState


@dataclass(frozen=True, slots=True)
class OptTreeParams(MethodParams):
    """OPT-Tree: the n nodes with the most probable paths."""

    num_nodes: int = 32
    """Nodes of a tree (n)."""
    min_gain: float = 0.1
    """Growth ends with a draft forward that raises the expected number of kept tokens by less than this (delta). The
    paper advises at least the time of a draft forward in forwards of the target."""

    def __post_init__(self) -> None:
        check_range("opt_tree.num_nodes", self.num_nodes, 1, MAX_ROWS)
        check_range("opt_tree.min_gain", self.min_gain, 0, 1)


class OptTreeGrowth(GrowthPolicy):
    """Grows one session's tree between a commit and the verification that waits for it.

    A forward expands those of the n best nodes that are not expanded yet, which are their deepest layer; then the n
    best are chosen again. Growth ends when a forward has raised the expected number of kept tokens by less than the
    threshold (delta), when none of the n best is open, or at the depth of `num_speculative_tokens`. The tree goes out
    whole.
    """

    def __init__(self, params: SpeculationParams) -> None:
        self._num_nodes = params.of(OptTreeParams).num_nodes
        self._min_gain = params.of(OptTreeParams).min_gain
        self._max_depth = params.num_speculative_tokens
        self._num_kept: float | None = None
        """Expected kept tokens of the tree before the last forward. None means that there was no forward since the
        commit."""
        self._cut: dict[Node, list[Candidate]] = {}
        """Candidates after nodes that were not among the n best. After a commit fewer nodes are better than they."""

    def next_expansion(self, tree: DraftTree) -> Expansion | None:
        """Returns the open nodes among the n best, or the root while nothing stands below it."""
        if not tree.root.children:
            # Once: a root without candidates after its forward waits for the next commit.
            return Expansion((tree.root,), self._num_nodes) if self._num_kept is None else None
        best = tree.best_subtree(self._num_nodes, self._max_depth)
        num_kept = _num_kept(tree, best)
        if self._num_kept is not None and num_kept - self._num_kept < self._min_gain:
            return None
        deepest = tree.root.position + self._max_depth
        nodes = tuple(node for node in best if not node.is_expanded and node.position < deepest)
        return Expansion(nodes, self._num_nodes) if nodes else None

    def children(self, tree: DraftTree, expansion: Expansion, found: Sequence[Sequence[Candidate]]) -> list[Child]:
        """Returns the candidates that are among the n best nodes."""
        self._num_kept = _num_kept(tree, tree.best_subtree(self._num_nodes, self._max_depth))
        return self._best_of(tree, all_children(expansion, found))

    def _best_of(self, tree: DraftTree, candidates: Sequence[Child]) -> list[Child]:
        """Returns the candidates that are among the n best nodes together with those of the tree; keeps the others."""
        scores = [node.path_logprob for node in tree.best_subtree(self._num_nodes, self._max_depth)]
        scores += [parent.path_logprob + candidate.logprob for parent, candidate in candidates]
        least = nlargest(self._num_nodes, scores)[-1] if scores else -math.inf
        best: list[Child] = []
        for child in candidates:
            if child.parent.path_logprob + child.candidate.logprob >= least:
                best.append(child)
            else:
                self._cut.setdefault(child.parent, []).append(child.candidate)
        return best

    def committed(self, tree: DraftTree, num_tokens: int, num_known: int) -> None:
        """Begins the next tree, with what the commit has left of the last one."""
        self._num_kept = None

    def known_children(self, tree: DraftTree) -> list[Child]:
        """Returns the cut candidates that are among the n best after the commit."""
        cut, self._cut = self._cut, {}
        deepest = tree.root.position + self._max_depth
        return self._best_of(
            tree,
            [
                Child(node, candidate)
                for node, candidates in cut.items()
                if (node is tree.root or node.state is NodeState.LIVE) and node.position < deepest
                for candidate in candidates
            ],
        )

    def foresee(self, stale_tokens: float, least_awaited: float) -> None:
        """Does nothing: the target waits, so it is in the same place when the tree arrives."""

    def is_message(self, tree: DraftTree, num_unsent: int) -> bool:
        """Returns false: the tree goes out whole, when nothing grows any more."""
        return False


def _num_kept(tree: DraftTree, nodes: Sequence[Node]) -> float:
    """Returns the number of these nodes that the target is expected to keep."""
    return sum(math.exp(min(0.0, node.path_logprob - tree.root.path_logprob)) for node in nodes)


METHOD = Method(
    "opt-tree",
    "after each check the tree with the most probable paths",
    "#117733",
    parameters=OptTreeParams,
    grow=OptTreeGrowth,
    waiting=Waiting.IN_TURNS,
    rows=Rows.TREE,
    published=Preset(
        "OPT-Tree, Wang et al. 2024",
        fixed={**AS_PICKED, "rows": Rows.TREE, "retrieval": False},
        tunable={"num_speculative_tokens": 10, "max_rows": 50, "opt_tree": {"num_nodes": 50}},
    ),
)
