"""A drafting session: whatever was committed and pruned before, the draft model sees each node's own path
and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.growth import Expansion
from outrider.core.params import Method, SamplingParams, SpeculationParams
from outrider.core.tree import DraftTree, Node, StreamNodes
from outrider.models.runner import Runner, Segment
from outrider.models.sampler import Sampler
from outrider.speculator.drafting import Drafting, DraftingSpec
from tests.models.tiny import VOCAB_SIZE, build

SAMPLING = SamplingParams(seed=3, temperature=0.7)


@dataclass
class Bushy:
    """Expands every leaf above a depth at once, two children each: a policy whose tree has branches everywhere."""

    max_depth: int = 3

    def next_expansion(self, tree: DraftTree) -> Expansion | None:
        def leaves(node: Node, depth: int) -> list[Node]:
            if not node.children:
                return [node] if depth < self.max_depth else []
            return [leaf for child in node.children.values() for leaf in leaves(child, depth + 1)]

        nodes = leaves(tree.root, 0)
        return Expansion(tuple(nodes), 2) if nodes else None

    def is_message(self, tree: DraftTree, num_unsent: int) -> bool:
        return False


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(build("llama"))


def reference_logits(runner: Runner, token_ids: Sequence[int]) -> torch.Tensor:
    """The logits after a path that was never drafted: one fresh forward."""
    return runner.forward([Segment(runner.new_cache(), list(token_ids), 1)])[0]


def path_to(tree: DraftTree, node: Node) -> list[int]:
    path: list[int] = []
    while node is not tree.root and node.parent is not None:
        path.append(node.token_id)
        node = node.parent
    return [*tree.committed, *reversed(path)]


def grow_once(drafting: Drafting, runner: Runner, max_rows: int = 64) -> bool:
    """One forward of a session, checked row by row against fresh forwards. False = nothing to grow."""
    expansion = drafting.next_expansion()
    if expansion is None:
        return False
    segment = drafting.segment(expansion, max_rows)
    logits = runner.forward([segment])
    if segment.num_logits:
        for node, row in zip(expansion.nodes, logits, strict=True):
            expected = reference_logits(runner, path_to(drafting.tree, node))
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
        indices = [node.position + 1 - drafting.spec.num_prompt_tokens for node in expansion.nodes]
        found = Sampler().candidates(logits, [SAMPLING] * len(logits), indices, expansion.num_children)
        drafting.grow(expansion, found, 1.0)
    return True


def make_drafting(runner: Runner, *, bushy: bool = False) -> Drafting:
    spec = DraftingSpec("s", (1, 2, 3, 4), 4, SAMPLING, SpeculationParams(Method.PEARL, 3, 6), VOCAB_SIZE)
    drafting = Drafting(spec, runner.new_cache(), runner.max_context_len)
    if bushy:
        drafting._policy = Bushy()
    return drafting


@settings(deadline=None, max_examples=25)
@given(data=st.data(), bushy=st.booleans())
def test_every_row_sees_its_own_path_whatever_was_committed_before(
    runner: Runner, data: st.DataObject, bushy: bool
) -> None:
    drafting = make_drafting(runner, bushy=bushy)
    for _ in range(data.draw(st.integers(1, 5))):
        for _ in range(data.draw(st.integers(0, 4))):
            grow_once(drafting, runner)
        live = list(drafting.tree.live_nodes())
        followed = data.draw(st.sampled_from(live)) if live and data.draw(st.booleans()) else None
        tokens = path_to(drafting.tree, followed)[len(drafting.tree.committed) :] if followed else []
        tokens += data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=0 if tokens else 1, max_size=2))
        drafting.commit(tokens)
    assert grow_once(drafting, runner)


def test_a_long_prompt_goes_through_in_pieces(runner: Runner) -> None:
    spec = DraftingSpec("s", tuple(range(1, 24)), 23, SAMPLING, SpeculationParams(Method.PEARL, 3, 6), VOCAB_SIZE)
    drafting = Drafting(spec, runner.new_cache(), runner.max_context_len)
    for _ in range(3):
        grow_once(drafting, runner, max_rows=8)
    assert drafting.tree.num_nodes == 1


@pytest.mark.parametrize("bushy", [False, True])
def test_what_is_sent_builds_the_same_tree_at_the_other_end(runner: Runner, bushy: bool) -> None:
    drafting = make_drafting(runner, bushy=bushy)
    mirror = DraftTree(drafting.tree.committed, VOCAB_SIZE)
    nodes = StreamNodes(mirror)

    def tokens(node: Node) -> dict[int, object]:
        return {child.token_id: tokens(child) for child in node.children.values()}

    for step in range(4):
        while grow_once(drafting, runner):
            message = drafting.take_message(is_idle=step % 2 == 0)
            if message is not None:
                nodes.add(message[0])
        chain = drafting.tree.best_chain(2)
        commit = [node.token_id for node in chain] + ([5] if step == 2 else [])
        drafting.commit(commit)
        mirror.commit(commit)
    while grow_once(drafting, runner):
        pass
    message = drafting.take_message(is_idle=True)
    if message is not None:
        nodes.add(message[0])
    assert tokens(mirror.root) == tokens(drafting.tree.root)
    assert mirror.num_nodes > 0


def test_growth_ends_at_the_end_of_the_draft_models_context(runner: Runner) -> None:
    spec = DraftingSpec("s", (1, 2, 3, 4), 4, SAMPLING, SpeculationParams(Method.PEARL, 3, 6), VOCAB_SIZE)
    drafting = Drafting(spec, runner.new_cache(), max_context_len=6)
    while grow_once(drafting, runner):
        pass
    assert max(node.position for node in drafting.tree.live_nodes()) == 5
