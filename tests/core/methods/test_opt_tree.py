"""OPT-Tree: the n nodes with the most probable paths, as deep as a forward brings enough."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.methods import OPT_TREE
from outrider.core.methods.opt_tree import OptTreeGrowth, OptTreeParams
from outrider.core.speculation import SpeculationParams
from tests.core.methods.toy_speculator import (
    NUM_LIKELY,
    ToySpeculator,
    one_after_another,
    path_of,
    toy_model,
)


def policy(num_nodes: int = 12, min_gain: float = 0.0, depth: int = 3) -> OptTreeGrowth:
    return OptTreeGrowth(
        SpeculationParams(OPT_TREE, depth, depth, own=(OptTreeParams(num_nodes, min_gain),)),
    )


def best_paths(speculator: ToySpeculator, num_nodes: int, depth: int) -> set[tuple[int, ...]]:
    """The most probable paths, found by looking at every extension of every path."""
    scored: list[tuple[float, tuple[int, ...]]] = []
    layer: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(depth):
        layer = [
            (score + candidate.logprob, (*path, candidate.token_id))
            for score, path in layer
            for candidate in speculator.model([*speculator.tree.committed, *path], NUM_LIKELY)
        ]
        scored += layer
    return {path for _, path in sorted(scored, reverse=True)[:num_nodes]}


@settings(deadline=None, max_examples=30)
@given(sharpness=st.floats(0.5, 4), seed=st.integers(0, 1000), num_nodes=st.integers(1, NUM_LIKELY))
def test_the_n_best_nodes_are_the_n_best_of_all_that_there_are(sharpness: float, seed: int, num_nodes: int) -> None:
    speculator = ToySpeculator(policy(num_nodes), toy_model(sharpness, seed))
    speculator.grow()
    best = speculator.tree.best_subtree(num_nodes, 3)
    assert {tuple(path_of(speculator.tree, node)) for node in best} == best_paths(speculator, num_nodes, 3)


def test_no_layer_takes_more_than_one_forward_and_the_tree_goes_out_whole() -> None:
    speculator = ToySpeculator(policy(depth=4), toy_model(1.5))
    speculator.grow()
    assert len(speculator.num_rows) <= 4
    assert speculator.messages == [len(speculator.num_rows)]


def test_a_tree_is_deep_where_the_draft_model_is_sure_and_bushy_where_it_is_not() -> None:
    sure, unsure = (ToySpeculator(policy(depth=8), one_after_another(first, 0.2)) for first in (0.95, 0.3))
    sure.grow()
    unsure.grow()
    trees = [speculator.tree.best_subtree(12, 8) for speculator in (sure, unsure)]
    depths = [max(node.position for node in tree) for tree in trees]
    widths = [sum(node.position == 1 for node in tree) for tree in trees]
    assert depths[0] == 8 > 4 >= depths[1]
    assert widths[0] < widths[1]


@pytest.mark.parametrize(("min_gain", "num_forwards"), [(0.0, 8), (0.3, 2), (0.13, 3), (0.6, 1)])
def test_growth_ends_with_a_forward_that_brings_less_than_the_threshold(min_gain: float, num_forwards: int) -> None:
    # A single node at each depth: the layers bring .5, .25, .125 and so on.
    speculator = ToySpeculator(policy(64, min_gain, 8), one_after_another(0.5, 1e-9))
    assert speculator.grow() == num_forwards


def test_what_a_commit_leaves_competes_with_what_is_new_and_costs_no_second_forward() -> None:
    speculator = ToySpeculator(policy(depth=4), toy_model(3.0))
    speculator.grow()
    followed = speculator.tree.best_chain(2)
    before = {node for node in speculator.tree.live_nodes() if node.is_expanded}
    assert speculator.commit([node.token_id for node in followed]) == 2
    while (expansion := speculator.forward()) is not None:
        assert before.isdisjoint(expansion.nodes)
    best = speculator.tree.best_subtree(12, 4)
    expected = math.fsum(math.exp(node.path_logprob - speculator.tree.root.path_logprob) for node in best)
    fresh = ToySpeculator(policy(depth=4), toy_model(3.0), speculator.tree.committed)
    fresh.grow()
    begun_anew = fresh.tree.best_subtree(12, 4)
    assert expected == pytest.approx(math.fsum(math.exp(node.path_logprob) for node in begun_anew))


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_it_goes_on_after_any_commit(data: st.DataObject) -> None:
    speculator = ToySpeculator(policy(), toy_model(1.0))
    for _ in range(4):
        assert speculator.grow(60) < 60
        paths = [path_of(speculator.tree, node) for node in speculator.tree.live_nodes()]
        speculator.commit(data.draw(st.sampled_from([[39], *paths])))
        assert speculator.tree.root.children or speculator.policy.next_expansion(speculator.tree) is not None


def test_a_full_tree_ends_growth() -> None:
    for num_nodes, room in product((4, 12), (0, 3)):
        speculator = ToySpeculator(policy(num_nodes), toy_model(1.0), max_num_nodes=room)
        assert speculator.grow(60) < 60
