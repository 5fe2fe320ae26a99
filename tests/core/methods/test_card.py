"""CARD: a beam of the K best candidates for each layer, pruned by the target's verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.growth import Candidate
from outrider.core.methods import CARD
from outrider.core.methods.card import CardGrowth, CardParams
from outrider.core.params import Source
from outrider.core.speculation import SpeculationParams
from outrider.core.tree import DraftTree, Node
from tests.core.methods.toy_speculator import (
    VOCAB_SIZE,
    DraftModel,
    ToySpeculator,
    a_missing_token,
    layers,
    one_after_another,
    path_of,
    paths,
    toy_model,
)


def policy(
    beam_width: int = 4,
    num_children: int = 3,
    *,
    gamma: int = 3,
    lookahead: int = 6,
    correction: bool = True,
    refill: bool = True,
    min_path_probability: float = 0.0,
) -> CardGrowth:
    card = CardParams(beam_width, num_children, correction, refill)
    return CardGrowth(SpeculationParams(CARD, gamma, lookahead, min_path_probability, own=(card,)))


def diverged_session() -> tuple[ToySpeculator, list[Node]]:
    """A hit on a child of the root whose descendants fell out of the beam halfway down. Returns its descendants in the
    deepest layer that had any."""
    for seed in range(100):
        session = ToySpeculator(policy(4, 3), toy_model(1.0, seed))
        session.grow()
        for child in session.tree.root.children.values():
            below = [[node for node in layer if path_of(session.tree, node)[0] == child.token_id]
                     for layer in layers(session.tree)]  # fmt: skip
            if below[1] and not below[-1]:
                survivors = [layer for layer in below if layer][-1]
                assert session.commit([child.token_id]) == 1
                return session, survivors
    raise AssertionError("no beam has diverged")


def beam(
    model: DraftModel, context: Sequence[int], start: Sequence[Sequence[int]], width: int, top: int
) -> list[float]:
    """Scores of the best paths one token longer than those of `start`, by definition (eqs. 1 to 7)."""

    def score(path: Sequence[int]) -> float:
        total = 0.0
        for end in range(len(path)):
            known = {c.token_id: c.logprob for c in model([*context, *path[:end]], top)}
            total += known[path[end]]
        return total

    longer = [[*path, c.token_id] for path in start for c in model([*context, *path], top)]
    return sorted(map(score, longer), reverse=True)[:width]


def scores(tree: DraftTree, nodes: Sequence[Node]) -> list[float]:
    return sorted((node.path_logprob - tree.root.path_logprob for node in nodes), reverse=True)


@pytest.mark.parametrize("width", [1, 3, 8, 200])
def test_a_layer_holds_the_best_of_all_candidates_of_the_layer_above(width: int) -> None:
    session = ToySpeculator(policy(width, 3, lookahead=4), toy_model())
    session.grow()
    start: list[list[int]] = [[]]
    for layer in layers(session.tree):
        assert scores(session.tree, layer) == pytest.approx(beam(session.model, [1], start, width, 3))
        start = [path_of(session.tree, node) for node in layer]
    assert len(start[0]) == 4
    if width == 200:  # nothing is left out: the whole tree of the three best
        assert session.tree.num_nodes == 3 + 9 + 27 + 81


def test_a_forward_expands_a_whole_layer() -> None:
    session = ToySpeculator(policy(4, 3), toy_model())
    session.grow()
    assert session.num_rows == [1, 3, 4, 4, 4, 4]
    assert [len(layer) for layer in layers(session.tree)] == [3, 4, 4, 4, 4, 4]


@settings(deadline=None, max_examples=100)
@given(data=st.data(), width=st.integers(1, 7), correction=st.booleans())
def test_layers_stay_narrow_and_growth_ends_whatever_is_committed(
    data: st.DataObject, width: int, correction: bool
) -> None:
    session = ToySpeculator(policy(width, 3, correction=correction), toy_model())
    for _ in range(data.draw(st.integers(1, 6))):
        session.grow(data.draw(st.sampled_from([0, 1, 2, 3, 50])))
        followed = data.draw(st.sampled_from([None, *session.tree.live_nodes()]))
        tokens = [] if followed is None else path_of(session.tree, followed)
        tokens += data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=0 if tokens else 1, max_size=2))
        session.commit(tokens)
        assert all(len(layer) <= width for layer in layers(session.tree))
    assert session.grow() < 1000
    assert all(len(layer) <= width for layer in layers(session.tree))
    if correction:
        assert len(layers(session.tree)) == 6  # the beam never stops above the lookahead


def test_growth_goes_on_with_what_a_hit_leaves_and_fills_the_layers_again() -> None:
    session = ToySpeculator(policy(), toy_model(0.3))  # an unsure model, so several children of the root have survivors
    session.grow()
    assert session.policy.next_expansion(session.tree) is None
    deepest = layers(session.tree)[-1]
    followed = path_of(session.tree, deepest[-1])[0]
    survivors = [node for node in deepest if path_of(session.tree, node)[0] == followed]
    assert session.commit([followed]) == 1
    expansion = session.forward()
    while expansion is not None and expansion.nodes[0].position < deepest[0].position:
        expansion = session.forward()  # nodes that came back into the layers above
    assert expansion is not None
    assert set(survivors) <= set(expansion.nodes)
    start = [path_of(session.tree, node) for node in expansion.nodes]
    expected = beam(session.model, session.tree.committed, start, 4, 3)
    assert scores(session.tree, layers(session.tree)[-1]) == pytest.approx(expected)


def narrowed_session() -> ToySpeculator:
    """A hit on the best child of the root, which has lost children to the beam."""
    for seed in range(100):
        session = ToySpeculator(policy(4, 3), toy_model(1.0, seed))
        session.grow()
        best = session.tree.best_chain(1)[0]
        if 0 < len(best.children) < 3:
            session.commit([best.token_id])
            return session
    raise AssertionError("no beam has narrowed")


def test_the_places_that_a_commit_frees_are_given_to_what_had_been_cut_without_a_forward() -> None:
    session = narrowed_session()
    best = {candidate.token_id for candidate in session.model(session.tree.committed, 3)}
    assert set(session.tree.root.children) == best
    assert all(len(layer) <= 4 for layer in layers(session.tree))


def test_what_came_back_is_expanded_before_the_beam_goes_deeper() -> None:
    session = narrowed_session()
    last = layers(session.tree)[-1][0].position
    came_back = {node for node in session.tree.live_nodes() if not node.is_expanded and node.position < last}
    assert came_back
    expansion = session.forward()
    assert expansion is not None
    assert set(expansion.nodes) <= came_back
    session.grow()
    assert all(node.is_expanded for node in came_back)


def test_an_improbable_candidate_does_not_come_back() -> None:
    session = ToySpeculator(policy(1, 3), one_after_another(0.9, 0.009))
    session.grow()
    session.commit([2, 2])
    assert {node.token_id for node in session.tree.live_nodes()} == {2}
    assert session.grow() == 2  # the two missing layers, and nothing else


def test_where_the_beam_has_diverged_the_secondary_cache_makes_the_next_layer_without_a_forward() -> None:
    session, survivors = diverged_session()
    assert all(node.is_expanded for node in survivors)
    layer = layers(session.tree)[-1]
    assert all(node.parent in survivors for node in layer)
    start = [path_of(session.tree, node) for node in survivors]
    expected = beam(session.model, session.tree.committed, start, 4, 3)
    assert scores(session.tree, layer) == pytest.approx(expected)
    expansion = session.forward()
    while expansion is not None and expansion.nodes[0].position < layer[0].position:
        expansion = session.forward()  # nodes that came back into the layers above
    assert expansion is not None
    assert set(layer) <= set(expansion.nodes)


# The published code reports misses for hits, because it names a node by its place in a ring of layers.
# `ToySpeculator.commit` checks that the verifier's mirror knows exactly what the speculator knows.


def test_a_present_token_is_a_hit_after_a_miss() -> None:
    session = ToySpeculator(policy(), toy_model())
    session.grow()
    session.commit([a_missing_token(session.tree)])
    for _ in range(4):
        session.grow(3)
        present = list(session.tree.root.children)[-1]
        assert session.commit([present]) == 1
        assert session.mirror.root.token_id == session.tree.root.token_id == present
        assert paths(session.mirror) <= paths(session.tree)


def test_a_present_token_is_a_hit_after_a_divergence() -> None:
    session, _ = diverged_session()
    session.grow(2)
    while session.tree.root.children:
        present = list(session.tree.root.children)[-1]
        assert session.commit([present]) == 1


def test_when_a_hit_empties_the_tree_growth_goes_on_from_the_accepted_node() -> None:
    session = ToySpeculator(policy(), toy_model())
    session.grow(1)
    best, *_, worst = session.tree.root.children.values()
    assert session.commit([best.token_id]) == 1
    assert session.tree.num_nodes == 0
    expansion = session.forward()
    assert expansion is not None
    assert expansion.nodes == (best,)
    assert worst is not best
    expected = {candidate.token_id for candidate in session.model([1, best.token_id], 3)}
    assert set(session.tree.root.children) == expected


# Bad circumstances.


def test_a_full_tree_ends_growth_and_a_commit_lets_it_go_on() -> None:
    session = ToySpeculator(policy(), toy_model(), max_num_nodes=9)
    assert session.grow() < 6
    assert session.tree.num_nodes == 9
    session.commit([session.tree.best_chain(1)[0].token_id])
    assert session.grow() > 0


def test_candidates_that_no_tree_takes_end_growth() -> None:
    session = ToySpeculator(policy(), lambda context, count: [Candidate(VOCAB_SIZE, -0.1)])
    assert session.grow() == 1


def test_the_beam_goes_on_with_the_best_of_what_another_policy_has_grown() -> None:
    session = ToySpeculator(policy(2, 2), toy_model())
    session.tree.root.is_expanded = True
    for token_id, logprob in ((5, -3.0), (6, -1.0), (7, -2.0)):
        session.tree.add(session.tree.root, token_id, logprob, Source.DRAFT)
    expansion = session.policy.next_expansion(session.tree)
    assert expansion is not None
    assert [node.token_id for node in expansion.nodes] == [6, 7]


def test_a_root_that_went_through_a_forward_in_vain_goes_through_another() -> None:
    session = ToySpeculator(policy(), toy_model())
    session.tree.root.is_expanded = True  # a pause began while the forward ran
    assert session.grow() == 6


# Without correction.


def test_without_correction_the_places_of_what_a_commit_contradicts_stay_lost() -> None:
    session = ToySpeculator(policy(6, 3, gamma=6, correction=False), toy_model(0.3))
    session.grow(4)
    deepest = layers(session.tree)[-1]
    followed = path_of(session.tree, deepest[0])[0]
    num_survivors = sum(path_of(session.tree, node)[0] == followed for node in deepest)
    assert 0 < num_survivors < 6
    session.commit([followed])
    session.grow(2)
    assert [len(layer) for layer in layers(session.tree)][-2:] == [num_survivors, num_survivors]


def test_without_correction_what_is_left_above_a_dead_beam_can_still_be_queried() -> None:
    corrected, _ = diverged_session()
    session = ToySpeculator(policy(4, 3, gamma=6, correction=False), corrected.model)
    session.grow()
    assert session.commit(corrected.tree.committed[1:]) == 1
    assert session.tree.num_nodes > 0
    assert session.forward() is None


@pytest.mark.parametrize("lookahead", [3, 6, 60])
def test_without_correction_the_beam_is_as_deep_as_the_target_queries_at_once(lookahead: int) -> None:
    session = ToySpeculator(policy(4, 3, gamma=3, lookahead=lookahead, correction=False), toy_model())
    session.grow()
    assert len(layers(session.tree)) == 3
    session.commit([a_missing_token(session.tree), 0, 0])
    expansion = session.forward()
    assert expansion is not None, "it begins again when the target has said as many tokens, however far it may look"
    assert expansion.nodes == (session.tree.root,)


def test_without_refill_freed_places_stay_empty() -> None:
    grown = []
    for refill in (True, False):
        session = ToySpeculator(policy(refill=refill), toy_model(0.3))
        session.grow()
        session.commit([path_of(session.tree, layers(session.tree)[-1][0])[0]])
        grown.append([len(layer) for layer in layers(session.tree)])
        session.grow()
        assert len(layers(session.tree)) == 6, "the beam goes on all the same"
    refilled, empty = grown
    assert sum(refilled) > sum(empty)


def test_as_many_children_are_considered_as_are_asked_for() -> None:
    session = ToySpeculator(policy(50, 50), toy_model())
    expansion = session.forward()
    assert expansion is not None
    assert expansion.num_children == 50


# Messages.


def test_a_target_that_has_nothing_is_sent_a_whole_chain_and_every_layer_from_then_on() -> None:
    session = ToySpeculator(policy(gamma=3), toy_model(5.0))
    session.grow()
    assert session.messages == [3, 4, 5, 6]
    assert len(session.mirror.best_chain(3)) == 3
    session.commit([a_missing_token(session.tree)])
    session.grow()
    assert session.messages == [3, 4, 5, 6, 9, 10, 11, 12]


def test_an_improbable_chain_goes_out_as_soon_as_the_target_would_not_verify_more() -> None:
    # .5 ** 2 is still above .2, .5 ** 3 is not.
    session = ToySpeculator(policy(gamma=5, min_path_probability=0.2), one_after_another(0.5))
    session.grow(4)
    assert session.messages == [3, 4]


def test_a_chain_that_has_fallen_out_of_the_beam_goes_out() -> None:
    def model(context: Sequence[int], count: int) -> list[Candidate]:
        # 2 is the best token after 1, but what follows it is improbable: both places of the next layer go below 3.
        best, second = {1: (0.5, 0.4), 2: (0.03, 0.02)}.get(context[-1], (0.9, 0.06))
        return [Candidate(2, math.log(best)), Candidate(3, math.log(second))]

    session = ToySpeculator(policy(2, 2, gamma=4), model)
    session.grow(3)
    assert paths(session.tree) >= {(2,), (3,), (3, 2), (3, 3)}
    assert (2, 2) not in paths(session.tree)
    assert session.messages == [2, 3]


def test_a_hit_whose_chain_breaks_off_while_it_is_probable_is_followed_by_the_whole_chain() -> None:
    session = ToySpeculator(policy(1, 1, gamma=4, lookahead=8), one_after_another(0.9))
    session.grow(4)
    assert session.messages == [4]
    session.commit([2, 2])
    session.grow(3)
    assert session.messages == [4, 6, 7]


def test_a_hit_whose_chain_is_improbable_where_it_breaks_off_is_followed_by_every_layer() -> None:
    session = ToySpeculator(policy(1, 1, gamma=4, lookahead=8), one_after_another(0.4))
    session.grow(4)
    session.commit([2, 2])
    session.grow(2)
    assert session.messages == [4, 5, 6]
