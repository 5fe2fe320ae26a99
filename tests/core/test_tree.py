"""The content rule: in whatever order drafts and commits arrive, the tree holds exactly the claims that the committed
tokens allow."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.methods import PEARL
from outrider.core.params import AcceptanceRule, SamplingParams, Source
from outrider.core.session import Session, SessionSpec
from outrider.core.speculation import SpeculationParams
from outrider.core.tree import Draft, DraftTree, Node, NodeState, SparseRow, StreamNodes

VOCAB_SIZE = 3
TOKENS = st.integers(0, VOCAB_SIZE - 1)


def draft(base_len: int, first_node_id: int, parent_offsets: list[int], token_ids: list[int]) -> Draft:
    return Draft(base_len, first_node_id, parent_offsets, token_ids, [], Source.DRAFT)


def live_paths(tree: DraftTree) -> set[tuple[int, ...]]:
    """The token paths from the root to every live node."""

    def below(node: Node, path: tuple[int, ...]) -> set[tuple[int, ...]]:
        paths = {path} if path else set()
        for child in node.children.values():
            paths |= below(child, (*path, child.token_id))
        return paths

    return below(tree.root, ())


@dataclass
class BruteForce:
    """Remembers every claim as (where its path begins, the whole path), and checks it against the committed tokens."""

    committed: list[int]
    claims: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    def add(self, message: Draft) -> None:
        for index, (offset, token_id) in enumerate(zip(message.parent_offsets, message.token_ids, strict=False)):
            node_id = message.first_node_id + index
            if offset == 0:
                parent = (message.base_len, ()) if 0 < message.base_len <= len(self.committed) else None
            else:
                parent = self.claims.get(node_id - offset)
            if parent is None or not 0 <= token_id < VOCAB_SIZE or not self._stands(parent):
                self.claims.pop(node_id, None)
                continue
            claim = (parent[0], (*parent[1], token_id))
            if self._stands(claim):
                self.claims[node_id] = claim

    def _stands(self, claim: tuple[int, tuple[int, ...]]) -> bool:
        base_len, path = claim
        known = self.committed[base_len : base_len + len(path)]
        return list(path[: len(known)]) == known

    def live_paths(self) -> set[tuple[int, ...]]:
        ends = (path[len(self.committed) - base_len :] for base_len, path in filter(self._stands, self.claims.values()))
        return {end for end in ends if end}


@dataclass(frozen=True)
class Claims:
    """A draft whose base is `back` tokens before the end of the committed text when it arrives."""

    back: int
    parent_offsets: list[int]
    token_ids: list[int]


@st.composite
def events(draw: st.DrawFn) -> list[list[int] | Claims]:
    """Commits and drafts, the drafts from any base, with parents that may be unknown, dead or yet to come."""
    sequence: list[list[int] | Claims] = []
    for _ in range(draw(st.integers(1, 12))):
        if draw(st.booleans()):
            sequence.append(draw(st.lists(TOKENS, min_size=1, max_size=3)))
            continue
        size = draw(st.integers(1, 6))
        offsets = draw(st.lists(st.sampled_from([0, 1, 1, 1, 2, 5]), min_size=size, max_size=size))
        tokens = draw(st.lists(st.sampled_from([0, 0, 1, 1, 2, -1, VOCAB_SIZE]), min_size=size, max_size=size))
        sequence.append(Claims(draw(st.integers(-1, 5)), offsets, tokens))
    return sequence


@settings(max_examples=400)
@given(prompt=st.lists(TOKENS, min_size=1, max_size=4), sequence=events())
def test_the_tree_holds_exactly_the_claims_that_the_committed_tokens_allow(
    prompt: list[int], sequence: list[list[int] | Claims]
) -> None:
    tree, model = DraftTree(prompt, VOCAB_SIZE), BruteForce(list(prompt))
    nodes = StreamNodes(tree)
    next_id = 1
    for event in sequence:
        if isinstance(event, Claims):
            message = draft(len(tree.committed) - event.back, next_id, event.parent_offsets, event.token_ids)
            next_id += len(event.token_ids)
            nodes.add(message)
            model.add(message)
        else:
            tree.commit(event)
            model.committed.extend(event)
        assert tree.committed == model.committed
        assert live_paths(tree) == model.live_paths()
        assert tree.num_nodes == len(live_paths(tree))
        assert all(node.state is NodeState.LIVE for node in tree.live_nodes())


def test_a_late_claim_that_contradicts_a_committed_token_is_dropped_with_all_below_it() -> None:
    tree = DraftTree([0], VOCAB_SIZE)
    tree.commit([1])
    assert StreamNodes(tree).add(draft(1, 1, [0, 1, 1], [2, 2, 2])) == 0
    assert tree.num_nodes == 0


@given(prompt=st.lists(TOKENS, min_size=1, max_size=3), path=st.lists(TOKENS, min_size=1, max_size=8), data=st.data())
def test_a_draft_is_worth_the_same_however_late_it_comes(
    prompt: list[int], path: list[int], data: st.DataObject
) -> None:
    num_committed = data.draw(st.integers(0, len(path)))
    message = draft(len(prompt), 1, [0] + [1] * (len(path) - 1), path)
    early, late = DraftTree(prompt, VOCAB_SIZE), DraftTree(prompt, VOCAB_SIZE)
    StreamNodes(early).add(message)
    if num_committed:
        early.commit(path[:num_committed])
        late.commit(path[:num_committed])
    StreamNodes(late).add(message)
    assert live_paths(early) == live_paths(late)


def test_a_repeated_draft_changes_nothing() -> None:
    tree = DraftTree([0], VOCAB_SIZE)
    nodes = StreamNodes(tree)
    for _ in range(2):
        nodes.add(draft(1, 1, [0, 1], [1, 2]))
    assert live_paths(tree) == {(1,), (1, 2)}


def test_a_node_whose_parent_was_committed_attaches_to_what_stands_there_now() -> None:
    tree = DraftTree([0], VOCAB_SIZE)
    nodes = StreamNodes(tree)
    nodes.add(draft(1, 1, [0], [1]))
    tree.commit([1])
    nodes.add(draft(1, 2, [1], [2]))
    assert live_paths(tree) == {(2,)}


def test_a_commit_says_how_much_of_it_the_tree_had() -> None:
    tree = DraftTree([0], VOCAB_SIZE)
    StreamNodes(tree).add(draft(1, 1, [0, 1, 1], [1, 2, 1]))
    assert tree.commit([1, 2]) == 2
    assert tree.commit([2, 0]) == 0
    assert tree.num_nodes == 0


def test_a_full_tree_ignores_claims_until_a_commit_makes_room() -> None:
    tree = DraftTree([0], VOCAB_SIZE, max_num_nodes=2)
    nodes = StreamNodes(tree)
    assert nodes.add(draft(1, 1, [0, 1, 1], [1, 1, 1])) == 2
    tree.commit([1])
    assert nodes.add(draft(1, 4, [2], [2])) == 1


def test_the_chain_prefers_the_draft_model_then_the_probable_then_the_lower_id() -> None:
    tree = DraftTree([0], vocab_size=10)
    tree.add(tree.root, 5, -0.1, Source.PRIOR)
    tree.add(tree.root, 7, -2.0, Source.DRAFT)
    assert [node.token_id for node in tree.best_chain(4)] == [7]
    tree.add(tree.root, 6, -1.0, Source.DRAFT)
    tree.add(tree.root, 4, -1.0, Source.DRAFT)
    assert [node.token_id for node in tree.best_chain(4)] == [4]


def test_the_chain_ends_where_its_path_becomes_improbable_but_is_never_empty_for_that() -> None:
    tree = DraftTree([0], vocab_size=10)
    node = tree.root
    for token_id in (1, 2, 3):
        node = tree.add(node, token_id, math.log(0.5), Source.DRAFT) or node
    assert len(tree.best_chain(4, math.log(0.3))) == 1
    assert len(tree.best_chain(4, math.log(0.2))) == 2
    assert len(tree.best_chain(4, math.log(0.9))) == 1
    assert len(tree.best_chain(2)) == 2


def test_the_draft_models_opinion_replaces_a_retrieved_one() -> None:
    tree = DraftTree([0], vocab_size=10)
    node = tree.add(tree.root, 5, -0.1, Source.PRIOR)
    assert tree.add(tree.root, 5, -2.0, Source.DRAFT) is node
    assert node is not None
    assert (node.source, node.logprob) == (Source.DRAFT, -2.0)


def test_forgotten_ids_are_ignored_like_unknown_ones() -> None:
    tree = DraftTree([0], vocab_size=10)
    nodes = StreamNodes(tree, max_num_ids=4)
    nodes.add(draft(1, 1, [0] * 6, [1, 2, 3, 4, 5, 6]))
    assert nodes.add(draft(1, 7, [6], [9])) == 0
    assert nodes.add(draft(1, 8, [2], [9])) == 1


def test_a_tree_needs_a_committed_token() -> None:
    with pytest.raises(ValueError, match="committed_token_ids"):
        DraftTree([], VOCAB_SIZE)


Q = SparseRow([0, 1, 2, 3], [1, 1, 1, 1])


def drawn(tree: DraftTree, *probabilities: float) -> list[Node]:
    """A drawn chain of tokens 0, 1, 2, ..."""
    nodes, node = [], tree.root
    for token_id, probability in enumerate(probabilities):
        child = tree.add(node, token_id, math.log(probability), Source.DRAFT, Q)
        assert child is not None
        nodes.append(child)
        node = child
    return nodes


def test_the_first_improbable_token_is_judged_and_nothing_below_it() -> None:
    tree = DraftTree([9], 10)
    nodes = drawn(tree, 0.9, 0.1, 0.9)
    least = math.log(0.3)
    assert tree.best_chain(8, least, is_sampled=True) == nodes[:2]
    assert tree.best_chain(8, least) == nodes[:1]


@pytest.mark.parametrize("value", [0.001, 0.5, 1.0])
def test_whether_a_token_is_judged_does_not_depend_on_its_own_probability(value: float) -> None:
    tree = DraftTree([9], 10)
    nodes = drawn(tree, 0.9, 0.5, value)
    assert nodes[2] in tree.best_chain(8, math.log(0.3), is_sampled=True)


def test_a_drawn_token_comes_before_more_probable_picks() -> None:
    tree = DraftTree([9], 10)
    tree.add(tree.root, 5, -0.1, Source.PRIOR)
    tree.add(tree.root, 6, -0.1, Source.DRAFT)
    (node,) = drawn(tree, 0.01)
    assert tree.best_chain(1, is_sampled=True) == [node]
    assert [chosen.token_id for chosen in tree.best_chain(1)] == [6]


def test_of_two_drawn_tokens_the_first_that_came_is_judged() -> None:
    tree = DraftTree([9], 10)
    first = tree.add(tree.root, 7, math.log(0.1), Source.DRAFT, Q)
    tree.add(tree.root, 2, math.log(0.9), Source.DRAFT, Q)
    assert tree.best_chain(1, is_sampled=True) == [first]


def test_where_nothing_was_drawn_the_best_pick_is_judged() -> None:
    tree = DraftTree([9], 10)
    tree.add(tree.root, 5, -0.1, Source.PRIOR)
    tree.add(tree.root, 6, -0.5, Source.DRAFT)
    assert [node.token_id for node in tree.best_chain(1, is_sampled=True)] == [6]


SPEC = SessionSpec(
    "s",
    (9,),
    SamplingParams(temperature=0.7),
    SpeculationParams(PEARL, min_path_probability=0.3, acceptance_rule=AcceptanceRule.RATIO),
    10,
    20,
)


@pytest.mark.parametrize(
    ("spec", "length"),
    [
        (SPEC, 2),
        (replace(SPEC, sampling=SamplingParams(temperature=0)), 1),
        (replace(SPEC, speculation=replace(SPEC.speculation, acceptance_rule=AcceptanceRule.MATCH)), 1),
    ],
    ids=["ratio", "ratio, but nothing is drawn", "match"],
)
def test_a_session_cuts_its_chain_as_its_rule_wants(spec: SessionSpec, length: int) -> None:
    session = Session(spec)
    drawn(session.tree, 0.9, 0.1, 0.9)
    assert len(session.next_chain()) == length
