"""The noise that drafts are drawn with: a function of seed and context, and of nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outrider.core.acceptance import DraftNoise
from outrider.core.drafting.policy import Expansion
from outrider.core.params import Source
from outrider.core.tree import DraftTree, Node
from tests.support.trees import add_path

TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def word_after(committed: list[int], path: list[int], seed: int = 1) -> int:
    tree = DraftTree(committed, 10)
    tip = add_path(tree, len(committed), path, -1.0, Source.DRAFT)
    assert tip is not None
    (word,) = DraftNoise(seed).words(tree, Expansion((tip if path else tree.root,), 1))
    return word


def test_the_noise_never_changes() -> None:
    """A drafter that comes back draws what it drew before."""
    assert word_after([1, 2], [3]) == 11675368875427982937


@given(TOKENS, st.integers(0, 6))
def test_the_same_context_has_the_same_noise_whatever_of_it_is_committed(context: list[int], num_drafted: int) -> None:
    split = max(1, len(context) - num_drafted)
    assert word_after(context[:split], context[split:]) == word_after(context, [])


@given(TOKENS, TOKENS, st.integers(0, 5), st.integers(0, 5))
def test_different_contexts_and_seeds_have_different_noise(
    one: list[int], other: list[int], seed: int, other_seed: int
) -> None:
    is_same = (one, seed) == (other, other_seed)
    assert (word_after(one, [], seed) == word_after(other, [], other_seed)) == is_same


@given(st.data())
def test_commits_leave_the_noise_as_it_is(data: st.DataObject) -> None:
    tree, noise, seen = DraftTree([0], 3), DraftNoise(2), dict[tuple[int, ...], int]()
    nodes: list[Node] = []
    for _ in range(data.draw(st.integers(1, 5))):
        nodes = [tree.root, *tree.live_nodes()]
        for node in data.draw(st.lists(st.sampled_from(nodes), max_size=3)):
            tree.add(node, data.draw(st.integers(0, 2)), -1.0, Source.DRAFT)
        nodes = [tree.root, *tree.live_nodes()]
        for node, word in zip(nodes, noise.words(tree, Expansion(tuple(nodes), 1)), strict=True):
            path, above = [], node
            while above is not tree.root and above.parent is not None:
                path.append(above.token_id)
                above = above.parent
            assert seen.setdefault((*tree.committed, *reversed(path)), word) == word
        tree.commit(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=2)))


def test_a_phrase_has_the_noise_of_the_path_that_it_is() -> None:
    tree = DraftTree([5], 10)
    tip = add_path(tree, 1, [6], -1.0, Source.DRAFT)
    assert tip is not None
    words = DraftNoise(1).words(tree, Expansion((tip,), 1, 4, (7, 8)))
    assert words == [word_after([5], [6]), word_after([5], [6, 7]), word_after([5], [6, 7, 8])]


def test_the_noise_is_uniform() -> None:
    words = [
        word_after([number % 10, number // 10 % 10], [number // 100 % 10], number // 1000) for number in range(5000)
    ]
    assert stats.kstest(np.array(words) / 2.0**64, "uniform").pvalue > 1e-3
