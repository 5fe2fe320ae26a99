"""CARD: what the beam does without correction, and when its layers are sent."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.core.drafting.policy import Candidate
from tests.core.drafting.toy_beam import diverged_session, policy
from tests.core.drafting.toy_speculator import (
    ToySpeculator,
    a_missing_token,
    layers,
    one_after_another,
    path_of,
    paths,
    toy_model,
)

# Without correction.


def test_without_correction_the_places_of_what_a_commit_contradicts_stay_lost() -> None:
    session = ToySpeculator(policy(6, 3, correction=False), toy_model(0.3))
    session.grow(4)
    deepest = layers(session.tree)[-1]
    followed = path_of(session.tree, deepest[0])[0]
    num_survivors = sum(path_of(session.tree, node)[0] == followed for node in deepest)
    assert 0 < num_survivors < 6
    session.commit([followed])
    session.grow(2)
    assert [len(layer) for layer in layers(session.tree)][-2:] == [num_survivors, num_survivors]


def test_without_correction_a_miss_is_corrected_only_when_no_layer_lies_ahead() -> None:
    session = ToySpeculator(policy(4, 3, correction=False), toy_model())
    session.grow(3)
    missing = a_missing_token(session.tree)
    session.commit([missing])
    assert session.forward() is None
    session.commit([0])
    assert session.forward() is None
    session.commit([0])  # the third token: the beam had three layers
    expansion = session.forward()
    assert expansion is not None
    assert expansion.nodes == (session.tree.root,)
    assert session.grow() == 5
    assert [len(layer) for layer in layers(session.tree)] == [3, 4, 4, 4, 4, 4]


def test_without_correction_what_is_left_above_a_dead_beam_can_still_be_queried() -> None:
    corrected, _ = diverged_session()
    session = ToySpeculator(policy(4, 3, correction=False), corrected.model)
    session.grow()
    assert session.commit(corrected.tree.committed[1:]) == 1
    assert session.tree.num_nodes > 0
    assert session.forward() is None


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
