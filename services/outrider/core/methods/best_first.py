"""Growth of `best-first`: the most probable unexpanded nodes anywhere in the tree.

CARD's beam and SAGUARO's fan-out are special cases: best-first grows a beam where all layers are equally sure, and a
fan-out around a sure chain. It needs neither layers nor outcomes: a node is worth its path's probability. A commit
changes all of these by one factor, so their order stays.

**Horizon.** A node that is drafted now arrives when the target is some tokens further, and is of no use before. So
nodes are compared by the worth of their best path at that point: if it is far away, a deep spine is preferred to early
branches.

Where draft and target take turns, nothing is drafted meanwhile, and another policy grows (`BestPathGrowth`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count

from outrider.core.departure import logarithm
from outrider.core.growth import Candidate, Child, Expansion, GrowthPolicy, nodes_of, reach
from outrider.core.methods.best_path import BestPathGrowth
from outrider.core.params import Rows, check
from outrider.core.speculation import MAX_ROWS, Method, MethodParams, SpeculationParams, Waiting, check_range
from outrider.core.statistics import RunningMean
from outrider.core.tree import DraftTree, Node, NodeState

MIN_EXPANDED = 0.01
"""A node whose path is less probable is not expanded before a commit makes it more probable."""
MIN_CHILD = 0.03
"""A candidate whose path is less probable at the horizon does not become a node before a commit makes it more probable:
it would not be worth a row of the target, and a target takes in every node between two forwards."""
LEAST_CHILD = 0.001
"""A candidate whose path is less probable now does not become a node, wherever the horizon is."""
FIRST_LOGPROB = -0.3
"""Log-probability of the best child of a node until one is measured: a probability of .74."""
NUM_EXPANDED_WAITING = 1
"""Nodes a forward while the target waits for the first message: further rows cost time."""
NUM_EXPANDED_WORKING = 8
"""Nodes a forward while the target works."""
BATCH = 16
"""Nodes worth a message while the target works."""


MAX_CHILDREN = 8
"""Bound of `BestFirstParams.num_children`."""


@dataclass(frozen=True, slots=True)
class BestFirstParams(MethodParams):
    """best-first: the most probable unexpanded nodes anywhere in the tree."""

    num_expanded: int = 0
    """Nodes expanded by one draft forward (M). 0 means few while the target waits, more while it works."""
    num_children: int = 8
    """Candidates considered for each expanded node; those of improbable paths do not become nodes."""
    serial: bool = False
    """True if draft and target take turns, which pays where both share one device: the tree is the most probable path,
    and next to it the runners-up of each of its rows."""

    def __post_init__(self) -> None:
        check_range("best_first.num_expanded", self.num_expanded, 0, MAX_ROWS)
        check_range("best_first.num_children", self.num_children, 1, MAX_CHILDREN)
        rule = "unset or 0 where draft and target take turns (best_first.serial)"
        check(not (self.serial and self.num_expanded), "speculation.best_first.num_expanded", rule, self.num_expanded)


class BestFirstGrowth(GrowthPolicy):
    """Grows one session's tree at its frontier, the most promising node first."""

    def __init__(self, params: SpeculationParams) -> None:
        own = params.of(BestFirstParams)
        self._num_expanded = own.num_expanded
        self._num_children = own.num_children
        self._least_awaited_logprob = -math.inf
        self._params = params
        self._max_depth = params.lookahead
        self._frontier: list[tuple[float, int, Node]] = []
        self._ranks = count()
        self._next: list[Node] = []
        self._too_deep: list[Node] = []
        self._grown: list[Child] = []
        """Candidates that are becoming nodes, and are not in the frontier yet."""
        self._improbable: dict[Node, list[Candidate]] = {}
        """Candidates below a node that were too improbable."""
        self._is_new = True
        self._is_awaited = True
        self._num_found = 0
        """Nodes that forwards have found since the last commit."""
        self._stale_tokens = 0.0
        self._best_logprob = RunningMean(0.05)
        """Mean log-probability of the best child of an expanded node."""

    def known_children(self, tree: DraftTree) -> list[Child]:
        """Returns candidates that were too improbable before the commit and are not now."""
        chosen = []
        # A copy: entries are deleted on the way, here and by `_choose`.
        for node, candidates in list(self._improbable.items()):
            if node is not tree.root and node.state is not NodeState.LIVE:
                del self._improbable[node]
                continue
            chosen += self._choose(tree, node, candidates)
        self._grown += chosen
        return chosen

    def foresee(self, stale_tokens: float, least_awaited: float) -> None:
        """Sets the horizon: how many tokens further the target will be when the present draft has arrived."""
        self._least_awaited_logprob = logarithm(least_awaited)
        self._stale_tokens = stale_tokens
        self._max_depth = reach(self._params.lookahead, self._params.num_speculative_tokens, stale_tokens)

    def next_expansion(self, tree: DraftTree) -> Expansion | None:
        """Returns the most promising nodes; the root alone while it has no children."""
        if self._is_new:
            # Nodes that another policy has grown go on from here.
            self._is_new = False
            for node in tree.live_nodes():
                self._push(tree, node)
        for node in nodes_of(self._grown):
            self._push(tree, node)
        self._grown = []
        # Kept until `children` is called: the engine asks more than once before a forward.
        if not self._next:
            self._take(tree)
        return Expansion(tuple(self._next), self._num_children) if self._next else None

    def children(self, tree: DraftTree, expansion: Expansion, found: Sequence[Sequence[Candidate]]) -> list[Child]:
        """Returns every candidate that is probable enough, and the best one in any case."""
        self._next, chosen = [], []
        for node, candidates in zip(expansion.nodes, found, strict=True):
            if candidates:
                self._best_logprob.add(candidates[0].logprob)
                chosen.append(Child(node, candidates[0]))
                chosen += self._choose(tree, node, candidates[1 : self._num_children])
        self._num_found += len(chosen)
        self._grown = chosen
        return chosen

    def committed(self, tree: DraftTree, num_tokens: int, num_known: int) -> None:
        """Compares all open nodes again: the horizon is measured from the new root, and the target may be waiting."""
        self._is_awaited, self._num_found = True, 0
        open_nodes = [*self._next, *self._too_deep, *(entry[-1] for entry in self._frontier), *nodes_of(self._grown)]
        self._next, self._too_deep, self._grown, self._frontier = [], [], [], []
        # Without a node that has become the root: `_take` handles the root separately.
        for node in open_nodes:
            if node.state is NodeState.LIVE:
                self._push(tree, node)

    def is_message(self, tree: DraftTree, num_unsent: int) -> bool:
        """Returns true for the first message after a commit once more nodes are not worth the target's wait; later for
        each batch."""
        if not self._is_awaited:
            return num_unsent >= BATCH
        least, chain_len = tree.root.path_logprob + self._least_awaited_logprob, self._params.num_speculative_tokens
        is_open = any(node.path_logprob > least for node in self._next)
        self._is_awaited = is_open and self._num_found < chain_len
        return not self._is_awaited

    def _choose(self, tree: DraftTree, node: Node, candidates: Sequence[Candidate]) -> list[Child]:
        """Returns the candidates that are probable enough now, and keeps the others."""
        # When it arrives, the target has accepted the probable tokens, and all nodes below these have become more
        # probable.
        foreseen = math.log(MIN_CHILD) + self._stale_tokens * self._best_logprob.get(FIRST_LOGPROB)
        least = tree.root.path_logprob + max(foreseen, math.log(LEAST_CHILD)) - node.path_logprob
        # Each by itself: after calibration, a lower rank may be more probable.
        improbable = [candidate for candidate in candidates if candidate.logprob < least]
        if improbable:
            self._improbable[node] = improbable
        else:
            self._improbable.pop(node, None)
        return [Child(node, candidate) for candidate in candidates if candidate.logprob >= least]

    def _take(self, tree: DraftTree) -> None:
        root = tree.root
        if not root.is_expanded:
            self._next = [root]
            return
        wanted = self._num_expanded or (NUM_EXPANDED_WAITING if self._is_awaited else NUM_EXPANDED_WORKING)
        deepest, least = root.position + self._max_depth, root.path_logprob + math.log(MIN_EXPANDED)
        while self._frontier and len(self._next) < wanted:
            cost, rank, node = heapq.heappop(self._frontier)
            # The heap has all nodes of another policy, the expanded ones included.
            if node.is_expanded or node.state is not NodeState.LIVE:
                continue
            if node.path_logprob < least:
                # All later ones are worth no more at the horizon. A commit may make it probable enough.
                heapq.heappush(self._frontier, (cost, rank, node))
                return
            (self._next if node.position < deepest else self._too_deep).append(node)

    def _push(self, tree: DraftTree, node: Node) -> None:
        """Adds a node to the frontier, ordered by the log-probability of its path at the horizon."""
        missing = max(0.0, self._stale_tokens - (node.position - tree.root.position))
        worth = node.path_logprob + missing * self._best_logprob.get(FIRST_LOGPROB)
        # The rank breaks ties, because nodes cannot be compared.
        heapq.heappush(self._frontier, (-worth, next(self._ranks), node))


def _growth(params: SpeculationParams) -> GrowthPolicy:
    own = params.of(BestFirstParams)
    return BestPathGrowth(params, own.num_children) if own.serial else BestFirstGrowth(params)


def _on_shared_gpu(params: SpeculationParams, given: Collection[str]) -> SpeculationParams:
    """Returns parameters by which draft and target take turns, unless the request says otherwise."""
    own = params.of(BestFirstParams)
    # The other two fields belong to a tree that grows while the target works.
    is_open = not ("serial" in given or own.num_expanded or "lookahead" in given)
    return params.with_own(replace(own, serial=own.serial or is_open))


METHOD = Method(
    "best-first",
    "the most probable guesses anywhere in the tree",
    "#0072B2",
    "draft",
    parameters=BestFirstParams,
    grow=_growth,
    waiting=lambda params: Waiting.IN_TURNS if params.of(BestFirstParams).serial else Waiting.WORTH,
    rows=Rows.TREE,
    takes_as_pay=True,
    on_shared_gpu=_on_shared_gpu,
)
