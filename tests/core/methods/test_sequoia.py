"""Sequoia: the tree that keeps the most tokens, by how often guesses of each rank are right."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.methods import SEQUOIA
from outrider.core.methods.sequoia import FIRST_RATES, Place, RankRates, SequoiaGrowth, SequoiaParams, tree_shape
from outrider.core.speculation import SpeculationParams
from tests.core.methods.toy_speculator import ToySpeculator, layers, one_after_another, path_of, toy_model

DEPTH = 4


def policy(num_nodes: int = 12, depth: int = DEPTH) -> SequoiaGrowth:
    return SequoiaGrowth(SpeculationParams(SEQUOIA, depth, depth, own=(SequoiaParams(num_nodes),)))


def places_of(shape: dict[Place, int]) -> set[Place]:
    return {(*parent, rank) for parent, count in shape.items() for rank in range(count)}


def kept_tokens(shape: dict[Place, int], rates: list[float]) -> float:
    total = 0.0
    for place in places_of(shape):
        worth = 1.0
        for rank in place:
            worth *= rates[rank]
        total += worth
    return total


def most_kept(rates: list[float], num_nodes: int, max_depth: int) -> float:
    """The paper's dynamic programme: the most tokens that a tree of so many nodes keeps."""

    @cache
    def below(num_nodes: int, depth: int, rank: int) -> float:
        """Tokens kept below one node, by guesses from this rank on."""
        if num_nodes == 0 or depth == 0 or rank == len(rates):
            return 0.0
        # The guess of this rank and all nodes below it take `size` nodes, later guesses take the rest.
        chosen = [
            rates[rank] * (1 + below(size - 1, depth - 1, 0)) + below(num_nodes - size, depth, rank + 1)
            for size in range(1, num_nodes + 1)
        ]
        return max(below(num_nodes, depth, rank + 1), *chosen)

    return below(num_nodes, max_depth, 0)


@settings(deadline=None, max_examples=60)
@given(
    rates=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    num_nodes=st.integers(1, 10),
    max_depth=st.integers(1, 4),
)
def test_the_shape_keeps_as_many_tokens_as_the_paper_s_dynamic_programme_finds(
    rates: list[float], num_nodes: int, max_depth: int
) -> None:
    rates = sorted(rates, reverse=True)
    shape = tree_shape(rates, num_nodes, max_depth)
    places = places_of(shape)
    assert len(places) <= num_nodes
    assert all(place[:-1] in places or len(place) == 1 for place in places)
    assert max(map(len, places)) <= max_depth
    assert kept_tokens(shape, rates) == pytest.approx(most_kept(rates, num_nodes, max_depth))


def test_sure_guesses_make_a_chain_and_equal_ones_a_bush() -> None:
    assert tree_shape([0.9, 0.05], 4, 8) == {(): 1, (0,): 1, (0, 0): 1, (0, 0, 0): 1}
    assert tree_shape([0.3, 0.3, 0.3], 3, 8) == {(): 3}


def test_rates_follow_what_the_target_has_said_and_never_rise_with_the_rank() -> None:
    rates, chance = RankRates(), random.Random(0)
    assert rates.values == pytest.approx(FIRST_RATES)
    for _ in range(400):
        rates.add(chance.choices([0, 1, 2, None], [0.2, 0.5, 0.1, 0.2])[0])
    first, second, third, *_ = rates.values
    assert first == second == pytest.approx(0.2, abs=0.1)
    assert third == pytest.approx(0.1, abs=0.07)


def test_a_tree_has_its_shape_after_one_forward_for_each_layer() -> None:
    speculator = ToySpeculator(policy(), toy_model())
    assert speculator.grow() == len(layers(speculator.tree)) <= DEPTH
    assert speculator.messages == [len(speculator.num_rows)]
    shape = tree_shape(RankRates().values, 12, DEPTH)
    assert speculator.tree.num_nodes == 12
    assert len(speculator.tree.root.children) == shape[()]
    best = {candidate.token_id for candidate in toy_model()([1], shape[()])}
    assert set(speculator.tree.root.children) == best


def test_the_shape_follows_the_verdicts() -> None:
    # The target always takes the draft model's first rank, or always the third.
    first, third = (ToySpeculator(policy(), one_after_another(0.6)) for _ in range(2))
    for _ in range(120):
        for speculator, token_id in ((first, 2), (third, 4)):
            speculator.grow()
            speculator.commit([token_id])
    first.grow()
    third.grow()
    assert len(first.tree.root.children) < len(third.tree.root.children)
    assert len(layers(third.tree)) < len(layers(first.tree)) == DEPTH


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_what_a_commit_leaves_takes_its_place_and_no_node_is_expanded_twice(data: st.DataObject) -> None:
    speculator = ToySpeculator(policy(), toy_model(1.0))
    for _ in range(5):
        # The toy asserts that no node is expanded again after its forward.
        assert speculator.grow(60) < 60
        found = [path_of(speculator.tree, node) for node in speculator.tree.live_nodes()]
        assert len(found) >= 12
        speculator.commit(data.draw(st.sampled_from([[39], *found])))


def test_a_full_tree_ends_growth() -> None:
    for room in (0, 3):
        speculator = ToySpeculator(policy(), toy_model(1.0), max_num_nodes=room)
        assert speculator.grow(60) < 60
