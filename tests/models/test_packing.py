"""Rows of a tree: each node sees the committed tokens, its ancestors and itself, whatever runs next to it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.params import Source
from outrider.core.tree import DraftTree, Node
from outrider.models.backend import CPU
from outrider.models.runner import Runner, Segment
from tests.support.tiny_models import VOCAB_SIZE, build, text


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def runner(request: pytest.FixtureRequest) -> Runner:
    return CPU.make_runner(build(request.param))


def path_of(tree: DraftTree, node: Node) -> list[int]:
    path: list[int] = []
    while node is not tree.root:
        path.append(node.token_id)
        assert node.parent is not None
        node = node.parent
    return [*tree.committed, *reversed(path)]


@settings(deadline=None, max_examples=20)
@given(data=st.data(), num_committed=st.integers(1, 12), num_pending=st.integers(1, 12))
def test_rows_of_a_subtree_have_the_logits_of_their_own_paths(
    runner: Runner, data: st.DataObject, num_committed: int, num_pending: int
) -> None:
    committed = text(num_committed)
    num_pending = min(num_pending, num_committed)
    tree = DraftTree(committed, VOCAB_SIZE)
    nodes = [tree.root]
    for _ in range(data.draw(st.integers(0, 9))):
        token_id = data.draw(st.integers(0, VOCAB_SIZE - 1))
        node = tree.add(data.draw(st.sampled_from(nodes)), token_id, -data.draw(st.floats(0.1, 2)), Source.DRAFT)
        assert node is not None
        nodes.append(node)
    cache = runner.new_cache()
    known = num_committed - num_pending
    if known:
        runner.forward([Segment(cache, committed[:known], 0)])
    chosen = tree.best_subtree(8, 8)
    logits = runner.forward([Segment.of_tree(cache, committed[known:], chosen, num_logits=1 + len(chosen))])
    for node, row in zip([tree.root, *chosen], logits, strict=True):
        alone = runner.forward([Segment(runner.new_cache(), path_of(tree, node), 1)])[0]
        torch.testing.assert_close(row, alone, rtol=1e-4, atol=1e-4)
    # The kept path must have the keys and values that it would have had alone.
    kept = chosen[data.draw(st.integers(0, len(chosen) - 1))] if chosen else tree.root
    rows: list[int] = []
    node = kept
    while node is not tree.root:
        rows.insert(0, chosen.index(node))
        assert node.parent is not None
        node = node.parent
    cache.keep(num_committed, [num_committed + row for row in rows])
    after = runner.forward([Segment(cache, [5], 1)])[0]
    alone = runner.forward([Segment(runner.new_cache(), [*path_of(tree, kept), 5], 1)])[0]
    torch.testing.assert_close(after, alone, rtol=1e-4, atol=1e-4)


def test_a_chain_needs_no_mask(runner: Runner) -> None:
    tree = DraftTree([1, 2], VOCAB_SIZE)
    node: Node | None = tree.root
    for token_id in (3, 4, 5):
        assert node is not None
        node = tree.add(node, token_id, -0.1, Source.DRAFT)
    segment = Segment.of_tree(runner.new_cache(), [1, 2], tree.best_subtree(8, 8), num_logits=4)
    assert segment.visible is None
    assert segment.num_logits == 4


@settings(deadline=None, max_examples=20)
@given(data=st.data(), num_committed=st.integers(1, 6))
def test_a_tree_that_grows_over_forwards_has_the_logits_of_its_paths(
    runner: Runner, data: st.DataObject, num_committed: int
) -> None:
    committed = text(num_committed)
    tree = DraftTree(committed, VOCAB_SIZE)
    cache = runner.new_cache()
    runner.forward([Segment(cache, committed, 0)])
    slots: dict[Node, int] = {}
    parents = [tree.root]
    for _ in range(data.draw(st.integers(1, 4))):
        layer: list[Node] = []
        for token_id in data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=3)):
            node = tree.add(data.draw(st.sampled_from(parents)), token_id, -0.5, Source.DRAFT)
            assert node is not None
            if node not in slots and node not in layer:
                layer.append(node)
        start = cache.length
        segment = Segment.of_tree(cache, [], layer, slots, num_logits=len(layer))
        logits = runner.forward([segment]) if layer else ()
        for node, row in zip(layer, logits, strict=True):
            alone = runner.forward([Segment(runner.new_cache(), path_of(tree, node), 1)])[0]
            torch.testing.assert_close(row, alone, rtol=1e-4, atol=1e-4)
        slots.update((node, slot) for slot, node in enumerate(layer, start))
        parents += layer


def test_the_slots_of_a_branching_tree_are_masked(runner: Runner) -> None:
    tree = DraftTree([1, 2], VOCAB_SIZE)
    left = tree.add(tree.root, 3, -0.1, Source.DRAFT)
    right = tree.add(tree.root, 4, -0.2, Source.DRAFT)
    assert left is not None
    assert right is not None
    below = tree.add(left, 5, -0.1, Source.DRAFT)
    assert below is not None
    cache = runner.new_cache()
    together = Segment.of_tree(cache, [1, 2], [left, right, below], num_logits=4)
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 1, 0, 1]]
    assert together.visible is not None
    assert together.visible.astype(int).tolist() == expected
    assert together.position_ids == [0, 1, 2, 2, 3]
    runner.forward([Segment.of_tree(cache, [1, 2], [left, right], num_logits=3)])
    alone = Segment.of_tree(cache, [], [below], {left: 2, right: 3}, num_logits=1)
    assert alone.visible is not None
    assert alone.visible.astype(int).tolist() == expected[-1:]
