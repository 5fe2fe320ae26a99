"""Growth of `best-first` where draft and target take turns: the most probable path, and next to it the runners-up of
each of its rows.

While the target waits, every draft forward costs it time, and a node that needs another forward is seldom worth that.
The runners-up of a forward cost only a row of the target each: where the path breaks off, the target often says one of
them. A path can be grown by several forwards at once (`outrider.models.cuda.loop`), a tree cannot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.core.growth import Candidate, Child, Expansion, GrowthPolicy, tip_of
from outrider.core.params import Rows
from outrider.core.speculation import SpeculationParams
from outrider.core.tree import DraftTree, Node, NodeState

MIN_PATH = 0.1
"""The path ends at a node whose path is less probable: a token that is kept so seldom is worth less than a draft
forward. Where rows are a chain, the request's probability counts."""
MIN_RUNNER_UP = 0.05
"""A runner-up whose path is less probable is not worth a row of the target."""

MIN_CLAIM = 0.5
"""Share of `MIN_RUNNER_UP` that the draft model must claim for a runner-up: calibration seldom doubles a claim."""


class BestPathGrowth(GrowthPolicy):
    """Grows one session's path between a commit and the verification that waits for it. The tree goes out whole.

    After a commit it goes on with the rest of the path; after a runner-up a new path begins.
    """

    def __init__(self, params: SpeculationParams, num_children: int) -> None:
        """
        Args:
            params: The session's.
            num_children: Candidates considered for each node of the path.
        """
        self._num_children = num_children
        self._max_depth = params.num_speculative_tokens
        is_chain = params.rows is Rows.CHAIN
        self._min_path_logprob = params.min_path_logprob if is_chain else math.log(MIN_PATH)
        self._tip: Node | None = None
        """The end of the path at the latest search for it."""

    def next_expansion(self, tree: DraftTree) -> Expansion | None:
        """Returns the end of the path, until it is long or improbable enough."""
        # The first child of a node is the best one of its forward, and the path goes on there. While its end lives, the
        # path has only become longer.
        known = self._tip
        tip, depth = tip_of(tree, tree.root if known is None or known.state is not NodeState.LIVE else known)
        self._tip = tip
        # A node without a child after its forward will have none. But the root goes through another forward: the
        # drafter may have been paused during its first one.
        has_ended = depth >= self._max_depth or (depth > 0 and tip.is_expanded)
        reached = tip.path_logprob - tree.root.path_logprob
        if has_ended or reached < self._min_path_logprob:
            return None
        least = math.log(MIN_CLAIM * MIN_RUNNER_UP) - reached
        return Expansion((tip,), self._num_children, self._max_depth - depth, least_logprob=least)

    def children(self, tree: DraftTree, expansion: Expansion, found: Sequence[Sequence[Candidate]]) -> list[Child]:
        """Returns the best candidate, and the other ones that are probable enough."""
        (tip,), (candidates,) = expansion.nodes, found
        least = math.log(MIN_RUNNER_UP) - (tip.path_logprob - tree.root.path_logprob)
        return [
            Child(tip, candidate)
            for rank, candidate in enumerate(candidates[: self._num_children])
            if not rank or candidate.logprob >= least
        ]

    def committed(self, tree: DraftTree, num_tokens: int, num_known: int) -> None:
        """Does nothing: an end of the path that is no longer live is not used."""

    def known_children(self, tree: DraftTree) -> list[Child]:
        """Returns nothing: candidates that were too improbable next to one path are not kept for the next one."""
        return []

    def foresee(self, stale_tokens: float, least_awaited: float) -> None:
        """Does nothing: the target waits, so it is in the same place when the tree arrives."""

    def is_message(self, tree: DraftTree, num_unsent: int) -> bool:
        """Returns false: the tree goes out whole, when nothing grows any more."""
        return False
