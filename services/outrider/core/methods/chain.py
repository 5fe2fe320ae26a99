"""Growth of one chain: `speculative` (Leviathan et al. 2023), `pearl` (Liu et al. 2024) and `double` (DOUBLE, section
4).

The first stops after gamma tokens and begins again with the next commit; the others go on to their lookahead while the
target verifies. Under the match rule a chain's nodes are picked (`ChainGrowth`), under the ratio rule they are sampled
(`SampledChainGrowth`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.calibration import AcceptanceRate
from outrider.core.departure import logarithm
from outrider.core.growth import Candidate, Child, Expansion, GrowthPolicy, all_children, reach, tip_of
from outrider.core.speculation import SpeculationParams
from outrider.core.tree import DraftTree, Node, NodeState


def speculative_growth(params: SpeculationParams) -> GrowthPolicy:
    """Returns the policy of draft-then-verify: gamma tokens after each commit."""
    gamma = params.num_speculative_tokens
    if params.is_ratio:
        return SampledChainGrowth(gamma, gamma, params.min_path_probability, grows_ahead=False)
    return ChainGrowth(gamma, params.min_path_logprob, gamma, params.min_path_logprob)


def pearl_growth(params: SpeculationParams) -> GrowthPolicy:
    """Returns the policy of a chain that grows while the target verifies."""
    gamma = params.num_speculative_tokens
    if params.is_ratio:
        return SampledChainGrowth(params.lookahead, gamma, params.min_path_probability, grows_ahead=True)
    # After a hit the root moves down the chain and the rest of the path is worth more: twice the logarithm lets the
    # chain that comes after the present one exist already.
    return ChainGrowth(params.lookahead, 2 * params.min_path_logprob, gamma, params.min_path_logprob)


@dataclass(slots=True)
class ChainGrowth(GrowthPolicy):
    """Grows one chain, each node the draft model's most probable draw."""

    lookahead: int
    """Most nodes below the root."""
    min_path_logprob: float
    """Growth stops at a node whose path is less probable."""
    chain_len: int
    """Nodes that the target verifies at once."""
    min_chain_logprob: float
    """The target's chain ends where its path falls below this."""
    least_awaited_logprob: float = field(init=False, default=-math.inf)
    """While its path is more probable, a shorter chain is worth waiting for."""
    max_depth: int = field(init=False)
    """Most nodes below the root that are worth growing, by the round trip."""
    _known_tip: Node | None = field(init=False, default=None)
    """The chain's end at the latest call. As long as it lives, the chain goes on there."""

    def __post_init__(self) -> None:
        self.max_depth = self.lookahead

    def next_expansion(self, tree: DraftTree) -> Expansion | None:
        """Returns the end of the chain, until it is long or improbable enough."""
        tip, depth = self._tip(tree)
        if depth >= self.max_depth or _path_logprob(tree, tip) < self.min_path_logprob:
            return None
        return Expansion((tip,), 1, self.max_depth - depth)

    def children(self, tree: DraftTree, expansion: Expansion, found: Sequence[Sequence[Candidate]]) -> list[Child]:
        """Returns the best candidate."""
        return all_children(expansion, found)

    def committed(self, tree: DraftTree, num_tokens: int, num_known: int) -> None:
        """Does nothing: no state is kept between commits."""

    def known_children(self, tree: DraftTree) -> list[Child]:
        """Returns nothing: everything that was found and wanted is in the tree already."""
        return []

    def foresee(self, stale_tokens: float, least_awaited: float) -> None:
        """Limits the depth, and the chain that the target waits for."""
        self.max_depth = reach(self.lookahead, self.chain_len, stale_tokens)
        self.least_awaited_logprob = logarithm(least_awaited)

    def is_message(self, tree: DraftTree, num_unsent: int) -> bool:
        """Returns true once the target should not wait for more: from then on, every forward is a message."""
        tip, depth = self._tip(tree)
        path_logprob = _path_logprob(tree, tip)
        is_open = path_logprob >= self.min_chain_logprob and path_logprob > self.least_awaited_logprob
        return depth >= self.chain_len or not is_open

    def _tip(self, tree: DraftTree) -> tuple[Node, int]:
        known = self._known_tip
        if known is None or known.state is not NodeState.LIVE:
            known = tree.root
        self._known_tip, depth = tip_of(tree, known)
        return self._known_tip, depth


class SampledChainGrowth(GrowthPolicy):
    """Grows one chain, each node sampled from the draft model.

    When a sample is sent must not depend on its value (see `outrider.core.acceptance`), so lengths are chosen by the
    acceptance rate so far, not by the probabilities of the tokens in the chain.
    """

    def __init__(self, max_depth: int, max_chain_len: int, min_path_probability: float, *, grows_ahead: bool) -> None:
        """
        Args:
            max_depth: Most nodes below the root.
            max_chain_len: Most nodes of a message, which the target verifies at once.
            min_path_probability: A message is so long that the target keeps its last token with at least this
                probability, at the rate seen so far. 0 means `max_chain_len`.
            grows_ahead: True if the chain may grow to twice the length that is worth verifying, so that the next chain
                exists already when this one is kept.
        """
        self._max_depth = max_depth
        self._max_chain_len = max_chain_len
        self._min_path_logprob = math.log(min_path_probability) if min_path_probability > 0 else -math.inf
        self._least_awaited_logprob = -math.inf
        self._grows_ahead = grows_ahead
        self._acceptance_rate = AcceptanceRate()
        self._depth = 0
        self._worth_len = self._next_worth_len()

    def next_expansion(self, tree: DraftTree) -> Expansion | None:
        """Returns the end of the chain, until it is long enough."""
        tip, self._depth = tip_of(tree, tree.root)
        max_depth = min(self._max_depth, 2 * self._worth_len if self._grows_ahead else self.message_len)
        return Expansion((tip,), 1, max_depth - self._depth) if self._depth < max_depth else None

    def children(self, tree: DraftTree, expansion: Expansion, found: Sequence[Sequence[Candidate]]) -> list[Child]:
        """Returns the candidate that was drawn."""
        return all_children(expansion, found)

    def committed(self, tree: DraftTree, num_tokens: int, num_known: int) -> None:
        """Counts the kept and the refused tokens. While the chain goes on, all of it is kept, so the planned length
        never falls below the present one."""
        # If the chain was too short for the last committed token, no token was refused in that place.
        is_refused = num_known < min(num_tokens, self._depth)
        self._acceptance_rate.add(num_known, is_refused=is_refused)
        self._worth_len = self._next_worth_len()

    def known_children(self, tree: DraftTree) -> list[Child]:
        """Returns nothing: everything that was found and wanted is in the tree already."""
        return []

    def foresee(self, stale_tokens: float, least_awaited: float) -> None:
        """Limits what the target waits for; a sampled chain ends where the acceptance rate says."""
        self._least_awaited_logprob = logarithm(least_awaited)

    def is_message(self, tree: DraftTree, num_unsent: int) -> bool:
        """Returns true for as many nodes as were planned."""
        return num_unsent >= self.message_len

    @property
    def message_len(self) -> int:
        """Nodes of a message."""
        most = min(self._max_chain_len, self._worth_len)
        if self._least_awaited_logprob == -math.inf:
            return most
        # The first length whose path is no more probable.
        return max(1, min(most, 1 + int(self._least_awaited_logprob / math.log(self._acceptance_rate.value))))

    def _next_worth_len(self) -> int:
        if self._min_path_logprob == -math.inf:
            return max(self._max_depth, self._max_chain_len)
        # rate ** length >= min_path_probability, solved for the length. The rate is below 1, so its logarithm is not 0.
        return max(1, int(self._min_path_logprob / math.log(self._acceptance_rate.value)))


def _path_logprob(tree: DraftTree, node: Node) -> float:
    """Returns the log-probability of the path from the root to a node."""
    return node.path_logprob - tree.root.path_logprob
