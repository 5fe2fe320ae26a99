"""The depth of a tree follows the distance of the target."""

from __future__ import annotations

import math

import pytest

from outrider.core.growth import Candidate, GrowthPolicy, reach
from outrider.core.methods import BEST_FIRST, CARD, PEARL, growth_policy
from outrider.core.methods.card import CardParams
from outrider.core.params import Source
from outrider.core.speculation import Method, SpeculationParams
from outrider.core.tree import DraftTree

GAMMA, LOOKAHEAD = 2, 30


def depth(policy: GrowthPolicy) -> int:
    """The depth of the deepest node when growth stops; every node has one sure child."""
    tree = DraftTree([0], 50)
    for _ in range(500):
        expansion = policy.next_expansion(tree)
        if expansion is None:
            break
        found = [[Candidate(node.position % 50, math.log(0.99))] for node in expansion.nodes]
        for parent, candidate in policy.children(tree, expansion, found):
            tree.add(parent, candidate.token_id, candidate.logprob, Source.DRAFT)
        for node in expansion.nodes:
            node.is_expanded = True
    return max(node.position for node in tree.live_nodes())


@pytest.mark.parametrize("method", [PEARL, CARD, BEST_FIRST])
def test_a_tree_grows_as_deep_as_the_distance_asks_and_the_lookahead_allows(method: Method) -> None:
    params = SpeculationParams(method, GAMMA, LOOKAHEAD, 0.0, own=(CardParams(beam_width=1),))
    depths = []
    for stale_tokens in (None, 0.0, 2.0, 100.0):
        policy = growth_policy(params)
        if stale_tokens is not None:
            policy.foresee(stale_tokens, 0.0)
        depths.append(depth(policy))
    assert depths == [LOOKAHEAD, 3 * GAMMA, 3 * GAMMA + 10, LOOKAHEAD]


def test_the_lookahead_is_never_passed() -> None:
    assert reach(5, 8, 0.0) == 5
    assert reach(64, 8, 0.1) == 25
