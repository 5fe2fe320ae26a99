"""The rows of a round: each node sees the committed tokens, its ancestors and itself, whatever stands beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.params import Source
from outrider.core.tree import DraftTree, Node
from outrider.models.runner import Runner, Segment
from outrider.verifier.round import segment_of
from tests.support.tiny_models import VOCAB_SIZE, build, text
from tests.support.trees import add_path


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def runner(request: pytest.FixtureRequest) -> Runner:
    return Runner(build(request.param))


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
    logits = runner.forward([segment_of(cache, committed[known:], chosen)])
    for node, row in zip([tree.root, *chosen], logits, strict=True):
        alone = runner.forward([Segment(runner.new_cache(), path_of(tree, node), 1)])[0]
        torch.testing.assert_close(row, alone, rtol=1e-4, atol=1e-4)
    # The path that is kept must be as good as if it had been computed alone.
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
    add_path(tree, 2, [3, 4, 5], -0.1, Source.DRAFT)
    segment = segment_of(runner.new_cache(), [1, 2], tree.best_subtree(8, 8))
    assert segment.visible is None
    assert segment.num_logits == 4
