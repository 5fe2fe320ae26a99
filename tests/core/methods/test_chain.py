"""Growth policies: what is drafted next, and when it is sent."""

from __future__ import annotations

import math

import pytest

from outrider.core.growth import GrowthPolicy
from outrider.core.methods import OFF, PEARL, RETRIEVAL, SPECULATIVE, growth_policy
from outrider.core.params import Source
from outrider.core.speculation import Method, SpeculationParams
from outrider.core.tree import DraftTree


def grow(policy: GrowthPolicy, tree: DraftTree, probability: float, limit: int = 100) -> list[int]:
    """Grows until the policy stops; returns the numbers of nodes at which a message was due."""
    messages, num_unsent = [], 0
    for grown in range(1, limit + 1):
        expansion = policy.next_expansion(tree)
        if expansion is None:
            break
        (tip,) = expansion.nodes
        tree.add(tip, grown % 50, math.log(probability), Source.DRAFT)
        num_unsent += 1
        if policy.is_message(tree, num_unsent):
            messages.append(grown)
            num_unsent = 0
    return messages


def params(method: Method, min_path_probability: float = 0.0) -> SpeculationParams:
    return SpeculationParams(method, 4, 12, min_path_probability)


def test_speculative_drafts_one_chain_and_waits_for_the_commit() -> None:
    tree = DraftTree([0], 50)
    assert grow(growth_policy(params(SPECULATIVE)), tree, 0.9) == [4]
    assert tree.num_nodes == 4


def test_pearl_goes_on_to_its_lookahead() -> None:
    tree = DraftTree([0], 50)
    assert grow(growth_policy(params(PEARL)), tree, 0.9) == [4, *range(5, 13)], "a whole chain, and then every forward"
    assert tree.num_nodes == 12


def test_an_improbable_chain_is_sent_as_soon_as_the_target_would_not_verify_more() -> None:
    tree = DraftTree([0], 50)
    # .5 ** 2 = .25 is still above .2, .5 ** 3 is not; with twice the logarithm growth ends after .5 ** 5 < .04.
    assert grow(growth_policy(params(PEARL, 0.2)), tree, 0.5) == [3, 4, 5]
    assert tree.num_nodes == 5


def test_growth_goes_on_when_a_commit_has_eaten_into_the_chain() -> None:
    policy, tree = growth_policy(params(PEARL)), DraftTree([0], 50)
    grow(policy, tree, 0.9)
    assert policy.next_expansion(tree) is None
    tree.commit([1, 2])
    assert policy.next_expansion(tree) is not None


@pytest.mark.parametrize("method", [OFF, RETRIEVAL])
def test_a_method_without_a_draft_model_has_no_policy(method: Method) -> None:
    with pytest.raises(ValueError, match=method.name):
        growth_policy(params(method))
