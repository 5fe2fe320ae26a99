"""Token Recycling: what the matrix keeps, and the tree that grows from it."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.calibration import RetrievalCalibration
from outrider.core.noise import gumbel_of
from outrider.core.params import SamplingParams, Source
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.core.retrieval.recycling import NUM_NEXT, NUM_TREE_NODES, AdjacencyMatrix
from outrider.core.retrieval.retriever import SHARPNESS
from outrider.core.tree import DraftTree, Node
from tests.core.retrieval.retrievers import retriever

PLAN = RetrievalPlan(sources=(Source.RECYCLED,))
followers = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 1000)), max_size=NUM_NEXT + 3)
rows = st.lists(st.tuples(st.integers(0, 6), followers), max_size=20)


def falling(first: int) -> list[tuple[int, int]]:
    """Eight consecutive tokens from this one on, the first the most probable."""
    return [(first + rank, 2 ** (9 - rank)) for rank in range(NUM_NEXT)]


EVERY_TOKEN = [(token_id, falling(token_id + 1)) for token_id in range(100)]


@given(st.lists(rows, max_size=4))
def test_of_each_token_the_latest_row_is_known_and_no_more_than_eight_of_it(batches: list[object]) -> None:
    matrix, latest = AdjacencyMatrix(), dict[int, tuple[tuple[int, int], ...]]()
    for batch in batches:
        matrix.learn(batch)  # type: ignore[arg-type]
        latest |= {token_id: tuple(row[:NUM_NEXT]) for token_id, row in batch if row}  # type: ignore[attr-defined]
    assert len(matrix) == len(latest)
    for token_id in range(7):
        found = matrix.followers([99, token_id], 0)
        assert (None if found is None else found.tokens) == latest.get(token_id)


def tree_of(max_depth: int = 10, sampling: SamplingParams | None = None) -> DraftTree:
    """The tree after a token if something is known of every token."""
    session = retriever([5], plan=PLAN, sampling=sampling or SamplingParams(temperature=0))
    session.recycle(EVERY_TOKEN)
    guess = session.tree(max_depth)
    assert guess is not None
    tree = DraftTree([5], 1000)
    session.plant(tree, tree.root, guess)
    return tree


def test_the_tree_has_the_static_shape_and_all_of_it_comes_from_the_matrix() -> None:
    tree = tree_of()
    layers = Counter(node.position for node in tree.live_nodes())
    assert [layers[depth] for depth in range(1, 8)] == [8, 20, 26, 16, 7, 2, 0]
    assert tree.num_nodes == sum(layers.values()) == NUM_TREE_NODES
    assert {node.source for node in tree.live_nodes()} == {Source.RECYCLED}
    assert list(tree.root.children) == list(range(6, 14))
    assert [node.token_id for node in tree.best_chain(10)] == [6, 7, 8, 9, 10, 11]


def test_a_node_has_no_more_children_than_its_better_siblings_and_cousins() -> None:
    def widths(node: Node) -> list[int]:
        return [len(child.children) for child in node.children.values()]

    tree = tree_of()
    for node in (tree.root, *tree.live_nodes()):
        assert widths(node) == sorted(widths(node), reverse=True)


@pytest.mark.parametrize("max_depth", [1, 3])
def test_the_tree_is_no_deeper_than_the_round_may_verify(max_depth: int) -> None:
    assert max(node.position for node in tree_of(max_depth).live_nodes()) == max_depth


def test_behind_an_unknown_token_nothing_grows_and_known_ones_end_at_unknown_ones() -> None:
    session = retriever([5], plan=PLAN)
    assert session.tree(10) is None
    session.recycle([(5, [(6, 9)]), (6, [(7, 9)])])
    guess = session.tree(10)
    assert guess is not None
    assert (guess.token_ids, guess.parents, guess.match_len) == ([6, 7], [-1, 0], 1)


def test_a_chain_has_the_best_token_after_each() -> None:
    session = retriever([5], plan=PLAN)
    session.recycle(EVERY_TOKEN)
    guess = session.guess([6], 4)
    assert guess is not None
    assert (guess.token_ids, guess.parents) == ([7, 8, 9, 10], [-1, 0, 1, 2])


@pytest.mark.parametrize("seed", range(4))
def test_above_temperature_0_siblings_stand_in_the_order_of_the_targets_noise(seed: int) -> None:
    tree = tree_of(1, SamplingParams(seed=seed, temperature=1.0))
    noise = gumbel_of(seed, 0, [token_id for token_id, _ in EVERY_TOKEN[5][1]])
    scores = {t: SHARPNESS * (math.log(w) + g) for (t, w), g in zip(EVERY_TOKEN[5][1], noise, strict=True)}
    assert list(tree.root.children) == sorted(scores, key=lambda token_id: -scores[token_id])


def test_every_guess_behind_a_committed_token_is_judged_not_only_the_one_on_the_path() -> None:
    calibration = RetrievalCalibration()
    session = retriever([5], plan=PLAN, calibration=calibration)
    session.recycle([(5, falling(6))])
    guess = session.tree(3)
    assert guess is not None
    tree = DraftTree([5], 1000)
    session.plant(tree, tree.root, guess)
    best, second = guess.keys[0], guess.keys[1]
    before = calibration.rate(best), calibration.rate(second)
    tree.commit([7])
    session.judge_siblings(1, [7])
    assert calibration.rate(best) < before[0]
    assert calibration.rate(second) > before[1]
    after = calibration.rate(second)
    session.judge_siblings(2, [7])
    assert calibration.rate(second) == after, "a guess is judged once"
