"""The chain that the ratio rule judges: no token is in it, or not in it, because of its own value."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from outrider.core.params import AcceptanceRule, Method, SamplingParams, Source, SpeculationParams
from outrider.core.session import Session, SessionSpec
from outrider.core.tree import DraftTree, Node, SparseRow

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
    SpeculationParams(Method.PEARL, min_path_probability=0.3, acceptance_rule=AcceptanceRule.RATIO),
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
