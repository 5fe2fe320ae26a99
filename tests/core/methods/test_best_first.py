"""best-first always expands the most probable unexpanded nodes, wherever they are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.growth import Candidate, Expansion
from outrider.core.methods import BEST_FIRST
from outrider.core.methods.best_first import (
    LEAST_CHILD,
    MIN_CHILD,
    MIN_EXPANDED,
    BestFirstGrowth,
    BestFirstParams,
)
from outrider.core.params import Source
from outrider.core.speculation import SpeculationParams
from outrider.core.tree import DraftTree, Node, NodeState
from tests.core.methods.toy_speculator import ToySpeculator, path_of, toy_model

VOCAB_SIZE = 97


def policy(num_expanded: int = 0, num_children: int = 4, lookahead: int = 16) -> BestFirstGrowth:
    params = BestFirstParams(num_expanded, num_children)
    return BestFirstGrowth(SpeculationParams(BEST_FIRST, 8, lookahead, own=(params,)))


def candidates(node: Node, sharpness: float = 1.0) -> list[Candidate]:
    """A toy draft model: four tokens, whose probabilities are a fixed function of their position."""
    first = hash((node.token_id, node.position)) % VOCAB_SIZE
    weights = [math.exp(-sharpness * rank * (1 + first % 3)) for rank in range(4)]
    return [
        Candidate((first + 7 * rank) % VOCAB_SIZE, math.log(0.97 * weight / sum(weights)))
        for rank, weight in enumerate(weights)
    ]


def expand(growth: BestFirstGrowth, tree: DraftTree, expansion: Expansion, sharpness: float = 1.0) -> int:
    """Does what the speculator does with an expansion; returns how many nodes were added."""
    before = tree.num_nodes
    for node in expansion.nodes:
        node.is_expanded = True
    for parent, candidate in growth.children(
        tree, expansion, [candidates(node, sharpness) for node in expansion.nodes]
    ):
        tree.add(parent, candidate.token_id, candidate.logprob, Source.DRAFT)
    return tree.num_nodes - before


def grow(growth: BestFirstGrowth, tree: DraftTree, most: int = 200, sharpness: float = 1.0) -> list[tuple[Node, ...]]:
    expansions = []
    for _ in range(most):
        expansion = growth.next_expansion(tree)
        if expansion is None:
            break
        expansions.append(expansion.nodes)
        expand(growth, tree, expansion, sharpness)
    return expansions


def relative(tree: DraftTree, node: Node) -> float:
    return node.path_logprob - tree.root.path_logprob


def test_the_root_comes_first_and_alone() -> None:
    growth, tree = policy(num_expanded=4), DraftTree([1], VOCAB_SIZE)
    expansion = growth.next_expansion(tree)
    assert expansion is not None
    assert expansion.nodes == (tree.root,)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), num_expanded=st.integers(1, 6))
def test_every_expansion_holds_the_most_probable_unexpanded_nodes_whatever_was_committed(
    data: st.DataObject, num_expanded: int
) -> None:
    growth, tree = policy(num_expanded=num_expanded), DraftTree([1], VOCAB_SIZE)
    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(0, 8))):
            expansion = growth.next_expansion(tree)
            if expansion is None:
                break
            assert expansion == growth.next_expansion(tree)  # asking changes nothing
            if tree.root.is_expanded:
                open_nodes = [
                    node
                    for node in tree.live_nodes()
                    if not node.is_expanded
                    and node.position < tree.root.position + 16
                    and relative(tree, node) >= math.log(MIN_EXPANDED)
                ]
                best = sorted(-relative(tree, node) for node in open_nodes)[:num_expanded]
                assert [-relative(tree, node) for node in expansion.nodes] == best
            assert all(node.state is not NodeState.DEAD and not node.is_expanded for node in expansion.nodes)
            expand(growth, tree, expansion)
        followed = data.draw(st.sampled_from([None, *tree.live_nodes()]))
        tokens: list[int] = []
        while followed is not None and followed is not tree.root:
            tokens.insert(0, followed.token_id)
            followed = followed.parent
        tokens = tokens or [data.draw(st.integers(0, VOCAB_SIZE - 1))]
        growth.committed(tree, len(tokens), tree.commit(tokens))
    assert growth.next_expansion(tree) is not None or tree.num_nodes > 0


def test_growth_ends_where_paths_are_improbable_and_goes_on_when_a_commit_makes_them_probable() -> None:
    growth, tree = policy(), DraftTree([1], VOCAB_SIZE)
    grow(growth, tree)
    assert growth.next_expansion(tree) is None
    assert all(
        node.is_expanded or relative(tree, node) < math.log(MIN_EXPANDED) or node.position >= 16
        for node in tree.live_nodes()
    )
    assert all(
        relative(tree, node) >= math.log(MIN_CHILD) or node is next(iter(node.parent.children.values()))
        for node in tree.live_nodes()
        if node.parent is not None
    )
    second = list(tree.root.children)[1]
    growth.committed(tree, 1, tree.commit([second]))
    assert growth.next_expansion(tree) is not None


def test_nodes_at_the_lookahead_are_expanded_once_a_commit_has_brought_them_nearer() -> None:
    growth, tree = policy(lookahead=8, num_children=1), DraftTree([1], VOCAB_SIZE)
    grow(growth, tree)
    deepest = max(node.position for node in tree.live_nodes())
    assert deepest <= 8
    chain = [node.token_id for node in tree.best_chain(3)]
    growth.committed(tree, 3, tree.commit(chain))
    grow(growth, tree)
    assert max(node.position for node in tree.live_nodes()) > deepest


def test_the_first_message_after_a_commit_waits_until_no_probable_path_is_open_and_no_longer() -> None:
    growth, tree = policy(), DraftTree([1], VOCAB_SIZE)
    growth.foresee(0.0, 0.3)
    num_unsent = 0
    while True:
        expansion = growth.next_expansion(tree)
        assert expansion is not None
        num_unsent += expand(growth, tree, expansion)
        growth.next_expansion(tree)
        is_open = any(not n.is_expanded and relative(tree, n) > math.log(0.3) for n in tree.live_nodes())
        is_message = growth.is_message(tree, num_unsent)
        assert is_message == (not is_open or num_unsent >= 8)
        if is_message:
            break
    assert not growth.is_message(tree, 3)  # from here on in batches
    assert growth.is_message(tree, 16)


def test_more_nodes_go_through_a_forward_while_the_target_works_than_while_it_waits() -> None:
    growth, tree = policy(), DraftTree([1], VOCAB_SIZE)
    expansions = []
    for _ in range(12):
        expansion = growth.next_expansion(tree)
        if expansion is None:
            break
        expansions.append(len(expansion.nodes))
        num_added = expand(growth, tree, expansion)
        growth.next_expansion(tree)
        growth.is_message(tree, num_added)
    assert max(expansions[:2]) <= 2 < max(expansions)


def test_far_away_a_deep_spine_is_preferred_to_early_branches() -> None:
    def deepest_after(stale_tokens: float) -> int:
        growth, tree = policy(num_expanded=1), DraftTree([1], VOCAB_SIZE)
        growth.foresee(stale_tokens, 0.0)
        grow(growth, tree, 10, 0.2)
        return max(node.position for node in tree.live_nodes())

    assert deepest_after(8.0) > deepest_after(0.0)


def test_what_another_policy_has_grown_goes_on() -> None:
    tree = DraftTree([1], VOCAB_SIZE)
    grow(policy(), tree, 3)
    fresh = policy()
    expansion = fresh.next_expansion(tree)
    assert expansion is not None
    assert tree.root not in expansion.nodes


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), min_size=1, max_size=6), st.floats(1.0, 3.0))
@settings(max_examples=60)
def test_what_a_commit_makes_probable_is_in_the_tree_without_a_forward_and_is_expanded_once(
    steps: list[tuple[int, int]], sharpness: float
) -> None:
    session = ToySpeculator(policy(), lambda context, count: toy_model(sharpness)(context[-3:], count))
    for most, which in steps:
        session.grow(most)
        nodes = list(session.tree.live_nodes())
        session.commit(path_of(session.tree, nodes[which % len(nodes)]) if nodes else [which])
        least = session.tree.root.path_logprob + math.log(MIN_CHILD)
        for node in (session.tree.root, *session.tree.live_nodes()):
            # Every candidate of its forward that is probable enough.
            if node.is_expanded:
                probable = {c.token_id for c in session.candidates(node, 4) if node.path_logprob + c.logprob >= least}
                assert probable <= set(node.children)
    session.grow()  # `ToySpeculator` looks at every node of every forward


def test_a_probable_candidate_behind_an_improbable_one_is_not_lost() -> None:
    found = [Candidate(2, math.log(0.6)), Candidate(3, math.log(MIN_CHILD / 2)), Candidate(4, math.log(0.3))]
    session = ToySpeculator(policy(), lambda context, count: found[:count])
    session.forward()
    assert set(session.tree.root.children) == {2, 4}  # after calibration, the third is more probable than the second


@pytest.mark.parametrize(("stale_tokens", "is_kept"), [(0, False), (6, True)])
def test_a_candidate_is_as_probable_as_where_it_begins_to_count(stale_tokens: float, *, is_kept: bool) -> None:
    # After six accepted tokens of probability .74, everything is six times as probable.
    found = [Candidate(2, math.log(0.74)), Candidate(3, math.log(MIN_CHILD / 2))]
    session = ToySpeculator(policy(), lambda context, count: found[:count])
    session.policy.foresee(stale_tokens, 0.0)
    session.forward()
    assert (3 in session.tree.root.children) is is_kept


def test_nothing_less_probable_than_the_least_becomes_a_node_however_far_the_target() -> None:
    found = [Candidate(2, math.log(0.1)), Candidate(3, math.log(LEAST_CHILD / 2))]
    session = ToySpeculator(policy(), lambda context, count: found[:count])
    session.policy.foresee(50, 0.0)
    session.forward()
    assert set(session.tree.root.children) == {2}
