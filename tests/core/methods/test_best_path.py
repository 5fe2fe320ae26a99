"""best-first in turns: one path, and next to it the runners-up of each of its rows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.methods import BEST_FIRST
from outrider.core.methods.best_first import BestFirstParams
from outrider.core.methods.best_path import MIN_CLAIM, MIN_PATH, MIN_RUNNER_UP, BestPathGrowth
from outrider.core.params import Rows
from outrider.core.speculation import SpeculationParams
from tests.core.methods.toy_speculator import (
    ToySpeculator,
    a_missing_token,
    layers,
    one_after_another,
    path_of,
    toy_model,
)


def policy(depth: int = 6, min_path_probability: float = 0.0, rows: Rows = Rows.TREE) -> BestPathGrowth:
    own = BestFirstParams(num_children=4, serial=True)
    params = SpeculationParams(BEST_FIRST, depth, depth, min_path_probability, rows=rows, own=(own,))
    return BestPathGrowth(params, own.num_children)


@settings(deadline=None, max_examples=40)
@given(sharpness=st.floats(0.5, 4), seed=st.integers(0, 1000), depth=st.integers(1, 6))
def test_one_path_goes_through_forwards_and_probable_runners_up_stand_beside_it(
    sharpness: float, seed: int, depth: int
) -> None:
    speculator = ToySpeculator(policy(depth), toy_model(sharpness, seed))
    speculator.grow()
    tree = speculator.tree
    assert all(rows == 1 for rows in speculator.num_rows)
    for layer in layers(tree):
        first, *others = layer
        # All nodes of a layer follow one row, the best first; nothing follows a runner-up.
        assert {node.parent for node in layer} == {first.parent}
        assert [node.logprob for node in layer] == sorted((node.logprob for node in layer), reverse=True)
        assert not any(node.children for node in others)
        assert all(math.exp(node.path_logprob) >= MIN_RUNNER_UP for node in others)
        found = speculator.candidates(first.parent or tree.root, 4)
        probable = [
            c for c in found[1:] if math.exp((first.parent or tree.root).path_logprob + c.logprob) >= MIN_RUNNER_UP
        ]
        assert [node.token_id for node in others] == [candidate.token_id for candidate in probable]


def test_the_path_ends_at_its_depth_or_where_it_is_improbable() -> None:
    speculator = ToySpeculator(policy(depth=5), one_after_another(0.9))
    assert speculator.grow() == 5
    unsure = ToySpeculator(policy(depth=5), one_after_another(0.4))
    unsure.grow()
    # 0.4, 0.16 and 0.064: the path ends at the first one below the minimum.
    assert len(unsure.num_rows) == 1 + sum(0.4**depth >= MIN_PATH for depth in range(1, 5)) == 3


@pytest.mark.parametrize(("probability", "depth"), [(0.5, 1), (0.3, 2), (0.05, 4), (0.0, 6)])
def test_where_rows_are_a_chain_the_request_says_where_the_path_ends(probability: float, depth: int) -> None:
    chain, tree = (
        ToySpeculator(policy(6, probability, rows), one_after_another(0.45)) for rows in (Rows.CHAIN, Rows.TREE)
    )
    assert chain.grow() == depth
    # The minimum of `auto` is for its chains.
    assert tree.grow() == 3


def test_the_tree_goes_out_whole_and_nothing_grows_before_the_next_commit() -> None:
    speculator = ToySpeculator(policy(depth=4), toy_model(2.0, 3))
    speculator.grow()
    assert speculator.messages == [len(speculator.num_rows)]
    assert speculator.policy.next_expansion(speculator.tree) is None


def test_what_a_commit_leaves_of_the_path_is_gone_on_with() -> None:
    speculator = ToySpeculator(policy(depth=4), one_after_another(0.9))
    speculator.grow()
    assert speculator.commit([2, 2]) == 2
    assert speculator.grow() == 2, "two of four are there"


def test_behind_a_runner_up_and_behind_a_miss_a_new_path_begins() -> None:
    for token_id in (3, None):
        speculator = ToySpeculator(policy(depth=3), one_after_another(0.6, 0.2))
        speculator.grow()
        known = token_id is not None
        assert speculator.commit([a_missing_token(speculator.tree) if token_id is None else token_id]) == known
        assert speculator.grow() == 3
        assert len(path_of(speculator.tree, layers(speculator.tree)[-1][0])) == 3


def test_behind_a_commit_of_the_whole_path_and_more_a_new_path_begins() -> None:
    speculator = ToySpeculator(policy(depth=3), one_after_another(0.9))
    speculator.grow()
    path = path_of(speculator.tree, layers(speculator.tree)[-1][0])
    speculator.commit([*path, a_missing_token(speculator.tree)])
    expansion = speculator.policy.next_expansion(speculator.tree)
    assert expansion is not None
    assert (expansion.nodes, expansion.max_len) == ((speculator.tree.root,), 3)


def test_candidates_that_the_draft_model_finds_much_too_improbable_are_not_looked_at() -> None:
    speculator = ToySpeculator(policy(depth=3), one_after_another(0.8))
    for depth in range(3):
        expansion = speculator.policy.next_expansion(speculator.tree)
        assert expansion is not None
        assert math.exp(expansion.least_logprob) == pytest.approx(MIN_CLAIM * MIN_RUNNER_UP / 0.8**depth)
        assert (expansion.num_children, expansion.max_len) == (4, 3 - depth)
        speculator.forward()
