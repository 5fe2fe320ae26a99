"""What the tests of SAGUARO's growth share: small policies, and what their trees look like."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.drafting.saguaro import SaguaroGrowth
from outrider.core.params import AcceptanceRule, FanOut, Method, SaguaroParams, SpeculationParams
from outrider.core.tree import DraftTree, Node
from tests.core.drafting.toy_speculator import chain_below

GAMMA = 4


def policy(
    fan_out: Sequence[int] | int = 12,
    *,
    lookahead: int = 16,
    gamma: int = GAMMA,
    min_path_probability: float = 0.0,
    is_ratio: bool = False,
) -> SaguaroGrowth:
    """With a budget, or with given fan-outs."""
    is_budget = isinstance(fan_out, int)
    saguaro = SaguaroParams(budget=fan_out) if is_budget else SaguaroParams(FanOut.GIVEN, fan_outs=tuple(fan_out))
    rule = AcceptanceRule.RATIO if is_ratio else AcceptanceRule.MATCH
    return SaguaroGrowth(
        SpeculationParams(Method.SAGUARO, gamma, lookahead, min_path_probability, acceptance_rule=rule, saguaro=saguaro)
    )


def outcomes(tree: DraftTree, chain_len: int) -> list[list[Node]]:
    """For each position of the chain the outcomes there. After its last one that is the chain's own next token too."""
    chain = [tree.root, *chain_below(tree.root)][: chain_len + 1]
    own = set(chain)
    return [[child for child in node.children.values() if child not in own] for node in chain]


def num_outcomes(tree: DraftTree, chain_len: int) -> list[int]:
    return [len(found) for found in outcomes(tree, chain_len)]


def check_tree(tree: DraftTree, budget: int, lookahead: int) -> None:
    """Branches stand on the chain alone, and there are no more of them than the budget allows."""
    on_chain = {tree.root, *chain_below(tree.root)}
    num_beside = 0
    for node in [tree.root, *tree.live_nodes()]:
        assert node.position - tree.root.position <= lookahead
        if node in on_chain:
            num_beside += max(0, len(node.children) - 1)
        else:
            assert len(node.children) <= 1
    assert num_beside <= budget
