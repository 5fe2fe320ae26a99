"""CARD: the draft model keeps a beam of candidates, the target queries it and its verdicts correct it (Zhou et al.).

Words of the paper: the primary cache C(l) is the layer of nodes at depth l, and the secondary cache B(l) is what a
forward found for a layer. A forward expands a layer (eqs. 1 and 2), scores all its candidates by their path (eqs. 3 to
5) and makes the K best the next layer (eqs. 6 to 9). The score is `Node.path_logprob`. With
`SpeculationParams.calibration` it is the estimated probability that the target says the path; without it, the product
of the draft model's own conditional probabilities, which is eq. 3. The target's query is `DraftTree.best_chain`;
section 2.4's correction is `DraftTree.commit`, which drops what the target has contradicted, and `committed` here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest

from outrider.core.departure import logarithm
from outrider.core.growth import Candidate, Child, Expansion, GrowthPolicy, all_children, nodes_of, reach
from outrider.core.params import Rows
from outrider.core.speculation import (
    AS_PICKED,
    MAX_BEAM_WIDTH,
    Method,
    MethodParams,
    Preset,
    SpeculationParams,
    check_range,
)
from outrider.core.tree import DraftTree, Node, NodeState

OPEN_PROBABILITY = 0.25
"""The target may wait for more of a chain if the path at which it breaks off is at least so probable."""
MIN_REFILL = 0.01
"""A candidate whose path is less probable does not come back into a layer."""


@dataclass(frozen=True, slots=True)
class CardParams(MethodParams):
    """CARD: a beam of candidates, queried and corrected."""

    beam_width: int = 16
    """Candidates kept for each layer (K, the size of a layer of the primary cache)."""
    num_children: int = 8
    """Children considered for each candidate (k). The paper has as many as K."""
    correction: bool = True
    """True if commits redirect the beam, and a miss restarts it at once. False is the paper's ablation, query without
    correction (section 3.3)."""
    refill: bool = True
    """True if the places that a commit has freed go to the best candidates that were cut. The paper does not refill
    them."""

    def __post_init__(self) -> None:
        check_range("card.beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        check_range("card.num_children", self.num_children, 1, MAX_BEAM_WIDTH)


class CardGrowth(GrowthPolicy):
    """Grows one session's tree as a beam: a layer with each forward, down to `lookahead` layers.

    **After a commit** it goes on with the survivors of the layer that it would have expanded next. If there are none,
    the beam has diverged: the deepest layer with survivors has been expanded already. Then the next layer is made of
    the candidates that were found there, the secondary cache, and costs no forward (`known_children`). If no layer has
    survivors, the root is the layer.

    **Free places.** A layer was made when many more continuations were open than after the commit: few of its K
    candidates stand below the new root, and others that would have stood next to them were cut. So after a commit the
    free places go to the most probable candidates of the secondary cache. Adding them costs no forward. Before the beam
    goes deeper, those of all layers go through one forward of their own; their children take the next layers' free
    places. That is not in the paper; `CardParams.refill` switches it off.

    **Without correction** (`CardParams.correction`, the ablation of section 3.3: the target queries, the draft model is
    not told where to go) the beam is as deep as the target queries at once. A commit still drops the nodes that it
    contradicts, because they cannot be queried, but the beam does not react. The places of contradicted candidates are
    lost: later layers have at most as many nodes as survived of the layer at which the beam stood. If none survived,
    the beam stands still, as if it went on below unusable candidates, and the target uses the layers that are left. The
    beam starts again from the root, with all its places, only when the committed tokens have reached its last layer, so
    that no layer lies ahead.

    **Messages.** A layer is a message: a sibling is of use only if the target's side has it when the verdict comes. But
    a target may be waiting if it has no chain, or if its chain breaks off while it is probable, and it takes the first
    message for the whole draft. So that message goes out when the best chain is whole: as long as the target verifies
    at once, too improbable to be waited for, or no longer in the beam.
    """

    def __init__(self, params: SpeculationParams) -> None:
        self._min_chain_logprob = params.min_path_logprob
        self._least_awaited_logprob = -math.inf
        self._chain_len = params.num_speculative_tokens
        own = params.of(CardParams)
        # Without correction the time of the restart must not depend on how far ahead a draft may be.
        self._lookahead = params.lookahead if own.correction else params.num_speculative_tokens
        self._max_depth = self._lookahead
        self._beam_width = own.beam_width
        self._num_children = own.num_children
        self._is_corrected = own.correction
        self._is_refilled = own.correction and own.refill
        self._num_places = self._beam_width
        """Most nodes of the next layer."""
        self._layer: list[Node] | None = None
        """Nodes that are expanded next. None until the first look at the tree."""
        self._diverged: list[Node] = []
        """The deepest layer with survivors, all expanded, while it has no layer below it."""
        self._chosen: list[Child] = []
        """The next layer, before it is in the tree."""
        self._last_position = 0
        """Position of the last layer."""
        self._secondary: dict[Node, Sequence[Candidate]] = {}
        self._refilled: list[Node] = []
        """Nodes that are not expanded, in layers that the beam has passed."""
        self._cut: list[Child] = []
        """Candidates that come back into layers with free places, before they are in the tree."""
        self._is_awaited = True

    def next_expansion(self, tree: DraftTree) -> Expansion | None:
        """Returns the nodes that came back into earlier layers, unless the target may be waiting; then the last layer,
        until it is `lookahead` deep."""
        self._take_in(tree)
        if self._refilled and not self._is_awaited:
            return Expansion(tuple(self._refilled[: self._beam_width]), self._num_children)
        # A root without candidates goes through a forward again.
        layer = [tree.root] if self._diverged == [tree.root] else self._layer
        if not layer or layer[0].position - tree.root.position >= self._max_depth:
            return None
        return Expansion(tuple(layer), self._num_children)

    def children(self, tree: DraftTree, expansion: Expansion, found: Sequence[Sequence[Candidate]]) -> list[Child]:
        """Returns the K best of all candidates, by the probability of their path (eqs. 5 to 9)."""
        self._secondary.update(zip(expansion.nodes, found, strict=True))
        # An expansion has either nodes that came back or the last layer, so its first node tells which.
        if expansion.nodes[0] in self._refilled:
            expanded = set(expansion.nodes)
            self._refilled = [node for node in self._refilled if node not in expanded]
            self._cut = self._best_cut(tree, expansion.nodes, self._last_position)
            return self._cut
        return self._choose(all_children(expansion, found))

    def known_children(self, tree: DraftTree) -> list[Child]:
        """Returns the K best of the secondary cache if the beam has diverged, and the candidates that come back into
        layers."""
        kept = [Child(node, candidate) for node in self._diverged for candidate in self._secondary.get(node, ())]
        chosen = self._choose(kept) if kept else []
        if self._is_refilled:
            # A layer that was just chosen is not in the tree yet: all its places would seem free.
            self._cut = self._best_cut(tree, self._secondary, self._last_position - bool(chosen))
        return chosen + self._cut

    def committed(self, tree: DraftTree, num_tokens: int, num_known: int) -> None:
        """Corrects the beam (section 2.4): it goes on where the target did. The class says what happens without
        correction."""
        self._take_in(tree)
        root = tree.root
        self._refilled = [node for node in self._refilled if _is_open(node, tree)]
        survivors = [node for node in self._layer or () if _is_open(node, tree)]
        if not self._is_corrected:
            is_used_up = root.position >= self._last_position
            self._layer = [root] if is_used_up else survivors
            self._num_places = self._beam_width if is_used_up else len(survivors)
        elif survivors:
            self._layer, self._diverged = survivors, []
        else:
            self._find_layer(tree)
        self._secondary = {
            node: candidates
            for node, candidates in self._secondary.items()
            if node is root or node.state is NodeState.LIVE
        }
        self._is_awaited = self._chain_is_open(tree, math.log(OPEN_PROBABILITY))

    def foresee(self, stale_tokens: float, least_awaited: float) -> None:
        """Limits the depth. The width stays: the paper's beam is as wide near the root as far from it."""
        self._max_depth = reach(self._lookahead, self._chain_len, stale_tokens)
        self._least_awaited_logprob = logarithm(least_awaited)

    def is_message(self, tree: DraftTree, num_unsent: int) -> bool:
        """Returns true for every layer; while the target may be waiting, only with the whole chain."""
        self._is_awaited = self._is_awaited and self._chain_is_open(tree, -math.inf)
        return not self._is_awaited

    def _choose(self, candidates: Sequence[Child]) -> list[Child]:
        # Section 2.2, eqs. 6 to 9: of all candidates together, the K with the best path scores.
        self._chosen = nlargest(self._num_places, candidates, key=_path_logprob)
        self._layer, self._diverged = [], []
        if self._chosen:
            self._last_position = self._chosen[0].parent.position + 1
        return self._chosen

    def _best_cut(self, tree: DraftTree, parents: Iterable[Node], last_position: int) -> list[Child]:
        """Returns the best candidates below these nodes that are not in the tree: for each layer down to
        `last_position`, as many as it has room for."""
        least = tree.root.path_logprob + math.log(MIN_REFILL)
        cut: dict[int, list[Child]] = {}
        for node in parents:
            position = node.position + 1
            if node.path_logprob < least or position > last_position:
                continue
            for candidate in self._secondary.get(node, ()):
                if candidate.token_id not in node.children and node.path_logprob + candidate.logprob >= least:
                    cut.setdefault(position, []).append(Child(node, candidate))
        if not cut:
            return []
        sizes = Counter(node.position for node in tree.live_nodes())
        best: list[Child] = []
        for position, children in cut.items():
            # A layer that another policy has grown may be wider than the beam; nlargest takes a negative number for 0.
            best += nlargest(self._beam_width - sizes[position], children, key=_path_logprob)
        return best

    def _take_in(self, tree: DraftTree) -> None:
        """Finds the nodes that were added last."""
        if self._layer is None:
            self._find_layer(tree)
        if self._chosen:
            self._layer = nodes_of(self._chosen)
            self._chosen = []
        if self._cut:
            for node in nodes_of(self._cut):
                # Nodes of the last layer are expanded with it.
                (self._layer if self._layer and node.position == self._last_position else self._refilled).append(node)
            self._refilled.sort(key=lambda node: -node.path_logprob)
            self._cut = []

    def _find_layer(self, tree: DraftTree) -> None:
        """Finds the layer to go on with in a tree that another policy may have grown."""
        layer = [tree.root]
        while below := [child for node in layer for child in node.children.values()]:
            layer = below
        self._last_position = layer[0].position
        unexpanded = [node for node in layer if _is_open(node, tree)]
        self._layer = nlargest(self._beam_width, unexpanded, key=lambda node: node.path_logprob)
        self._refilled = [node for node in self._refilled if node.position != self._last_position]
        self._diverged = [] if self._layer else layer

    def _chain_is_open(self, tree: DraftTree, min_path_logprob: float) -> bool:
        """Returns true if the best chain may yet grow, and is worth waiting for: it is shorter than the target verifies
        at once, and probable."""
        chain = tree.best_chain(self._chain_len)
        end = chain[-1] if chain else tree.root
        least = max(self._min_chain_logprob, self._least_awaited_logprob, min_path_logprob)
        is_probable = end.path_logprob - tree.root.path_logprob >= least
        return len(chain) < self._chain_len and is_probable and not (chain and end.is_expanded)


def _is_open(node: Node, tree: DraftTree) -> bool:
    """Returns true if a node of the tree waits for its forward."""
    return not node.is_expanded and (node.state is NodeState.LIVE or node is tree.root)


def _path_logprob(child: Child) -> float:
    """Returns the score of a candidate's path."""
    return child.parent.path_logprob + child.candidate.logprob


METHOD = Method(
    "card",
    "a beam: the best guesses of each step",
    "#882255",
    parameters=CardParams,
    grow=CardGrowth,
    published=Preset(
        "CARD, Zhou et al.",
        fixed={**AS_PICKED, "retrieval": False, "rows": Rows.CHAIN, "card": {"correction": True, "refill": False}},
        # Sections 3.1 and 3.4: a ratio of 7 between the models' forwards, K = 50; eq. 2 takes K children of each.
        tunable={"num_speculative_tokens": 7, "card": {"beam_width": 50, "num_children": 50}},
    ),
)
