"""Sub-trees: the most probable connected part of the mirror; each node gets a draw, and an equal child is followed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.methods import BEST_FIRST
from outrider.core.params import Rows, SamplingParams, Source
from outrider.core.session import Session, SessionSpec
from outrider.core.speculation import SpeculationParams
from outrider.core.tree import DraftTree, Node
from tests.support.trees import output_of

VOCAB_SIZE = 4
SPEC = SessionSpec(
    session_id="s",
    prompt_token_ids=(0,),
    sampling=SamplingParams(seed=1),
    speculation=SpeculationParams(BEST_FIRST, num_speculative_tokens=5, lookahead=8, rows=Rows.TREE),
    vocab_size=VOCAB_SIZE,
    max_tokens=14,
)


def target_draw(context: tuple[int, ...]) -> int:
    """A toy target: its draw is a fixed function of everything before it."""
    return hash(context) % VOCAB_SIZE


def context_of(session: Session, node: Node) -> tuple[int, ...]:
    path: list[int] = []
    while node is not session.tree.root:
        path.append(node.token_id)
        assert node.parent is not None
        node = node.parent
    return (*session.committed, *reversed(path))


def grow_at_random(tree: DraftTree, data: st.DataObject, most: int = 12) -> None:
    nodes = [tree.root, *tree.live_nodes()]
    for _ in range(data.draw(st.integers(0, most))):
        parent = data.draw(st.sampled_from(nodes))
        node = tree.add(parent, data.draw(st.integers(0, VOCAB_SIZE - 1)), -data.draw(st.floats(0.01, 3)), Source.DRAFT)
        if node is not None and node not in nodes:
            nodes.append(node)


@settings(deadline=None)
@given(data=st.data(), max_num_nodes=st.integers(0, 10), max_depth=st.integers(0, 4))
def test_the_best_subtree_is_what_sorting_all_paths_gives(
    data: st.DataObject, max_num_nodes: int, max_depth: int
) -> None:
    tree = DraftTree([0], VOCAB_SIZE)
    grow_at_random(tree, data, 20)
    found = tree.best_subtree(max_num_nodes, max_depth)
    allowed = [node for node in tree.live_nodes() if node.position <= tree.root.position + max_depth]
    best = sorted(-node.path_logprob for node in allowed)[:max_num_nodes]
    assert [-node.path_logprob for node in found] == pytest.approx(best)
    for index, node in enumerate(found):
        assert node.parent is tree.root or node.parent in found[:index]


def test_improbable_nodes_are_left_out_but_never_the_first() -> None:
    tree = DraftTree([0], VOCAB_SIZE)
    first = tree.add(tree.root, 1, math.log(0.3), Source.DRAFT)
    assert first is not None
    tree.add(first, 2, math.log(0.5), Source.DRAFT)
    tree.add(tree.root, 3, math.log(0.1), Source.DRAFT)
    assert tree.best_subtree(8, 8, math.log(0.5)) == [first]
    assert [node.token_id for node in tree.best_subtree(8, 8, math.log(0.12))] == [1, 2]


@settings(deadline=None)
@given(data=st.data())
def test_the_text_is_the_targets_whatever_subtrees_are_verified(data: st.DataObject) -> None:
    session = Session(SPEC)
    while session.finish_reason is None:
        grow_at_random(session.tree, data)
        nodes = session.next_subtree(data.draw(st.integers(0, 9)))
        draws = [target_draw(context_of(session, node)) for node in (session.tree.root, *nodes)]
        root, rows = session.tree.root, {node: row for row, node in enumerate(nodes, start=1)}
        expected: list[int] = []
        node, row = root, 0
        while (child := node.children.get(draws[row])) in rows:
            assert child is not None
            expected.append(rows[child])
            node, row = child, rows[child]
        verdict = session.apply(nodes, draws)
        assert verdict.accepted_rows == tuple(expected)
        assert verdict.num_drafted == len(nodes)
    tokens: list[int] = []
    while len(tokens) < SPEC.max_tokens:
        tokens.append(target_draw((0, *tokens)))
    assert output_of(session) == tokens


def test_the_refused_token_is_the_most_probable_one_at_the_place_of_the_next_token() -> None:
    session = Session(SPEC)
    root = session.tree.root
    right = session.tree.add(root, 1, -0.1, Source.DRAFT)
    assert right is not None
    session.tree.add(root, 2, -2.0, Source.DRAFT)
    session.tree.add(right, 3, -0.5, Source.DRAFT)
    session.tree.add(right, 2, -0.9, Source.DRAFT)
    nodes = session.next_subtree(8)
    draws = {0: 1, 1: 0}
    verdict = session.apply(nodes, [draws.get(row, 0) for row in range(1 + len(nodes))])
    assert verdict.token_ids == (1, 0)
    assert verdict.rejected_token_ids == (3,)
    assert nodes[(verdict.rejected_row or 0) - 1].token_id == 3
