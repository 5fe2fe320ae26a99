"""SAGUARO: where chains and rails end, what a hit on a short one leads to, and what the acceptance rule changes."""

from __future__ import annotations

import math

import pytest

from outrider.core.drafting.policy import Candidate
from outrider.core.drafting.saguaro import fan_outs
from outrider.core.params import SaguaroParams, Source
from tests.core.drafting.toy_outcomes import GAMMA, num_outcomes, outcomes, policy
from tests.core.drafting.toy_speculator import (
    VOCAB_SIZE,
    ToySpeculator,
    a_missing_token,
    chain_below,
    drawn,
    one_after_another,
    path_of,
    toy_model,
)

# Improbable paths.


def test_an_improbable_chain_ends_and_what_the_target_does_not_verify_is_an_outcome() -> None:
    # .5 ** 2 is still above .2, .5 ** 3 is not: two tokens are verified, and the third is what may follow them.
    session = ToySpeculator(policy((1, 1, 3), min_path_probability=0.2), one_after_another(0.5, 0.3))
    session.grow()
    assert session.num_rows[:4] == [1, 1, 1, 5]
    assert session.messages[0] == 3
    assert num_outcomes(session.tree, 2) == [1, 1, 3]


def test_a_rail_ends_where_its_path_below_the_outcome_is_improbable() -> None:
    session = ToySpeculator(policy((1, 1, 3), min_path_probability=0.2), one_after_another(0.5, 0.3))
    session.grow()
    for found in outcomes(session.tree, 2):
        assert {len(chain_below(node)) for node in found} == {3}


def test_the_first_token_of_a_chain_always_stands() -> None:
    session = ToySpeculator(policy((1, 2), gamma=4, min_path_probability=0.2), one_after_another(0.1, 0.05))
    session.grow()
    assert session.messages[0] == 1
    assert num_outcomes(session.tree, 1) == [1, 2]


# Hits on rails that are not long enough.


def hit_after(num_forwards: int, probability: float) -> ToySpeculator:
    """A hit on an outcome after the first position, whose rail had so many forwards."""
    session = ToySpeculator(policy((2, 2, 1, 1, 1)), one_after_another(probability))
    session.grow(GAMMA + num_forwards)
    session.commit(path_of(session.tree, outcomes(session.tree, GAMMA)[1][0]))
    return session


def test_a_hit_on_a_rail_that_has_not_begun_is_like_a_miss() -> None:
    session = hit_after(0, 0.9)
    assert session.tree.num_nodes == 0
    forwards = len(session.num_rows)
    session.grow(GAMMA)
    assert session.num_rows[forwards:] == [1] * GAMMA
    assert session.messages[-1] == forwards + GAMMA


def test_a_probable_rail_that_is_too_short_is_first_made_long() -> None:
    session = hit_after(2, 0.9)
    forwards, messages = len(session.num_rows), len(session.messages)
    session.grow(3)
    assert session.num_rows[forwards:] == [1, 1, 7]
    assert session.messages[messages:] == [forwards + 2, forwards + 3]


def test_an_improbable_rail_that_is_too_short_is_taken_as_the_chain_it_is() -> None:
    session = hit_after(2, 0.4)
    forwards, messages = len(session.num_rows), len(session.messages)
    assert num_outcomes(session.tree, 2) == [2, 2, 0]
    session.grow(2)
    assert session.num_rows[forwards] == 5
    assert session.messages[messages:] == [forwards + 1, forwards + 2]
    assert num_outcomes(session.tree, 2) == [2, 2, 1]


def test_a_chain_that_the_target_did_not_wait_for_goes_on_alone() -> None:
    session = ToySpeculator(policy(), one_after_another(0.9))
    session.grow(2)
    assert session.commit([2]) == 1
    forwards = len(session.num_rows)
    session.grow(3)
    assert session.num_rows[forwards:] == [1, 1, 1]
    assert session.messages == [forwards + 3]


def test_a_chain_that_has_not_been_sent_goes_out_whole_even_if_it_is_improbable() -> None:
    session = ToySpeculator(policy(), one_after_another(0.4))
    session.grow(3)
    session.commit([2])
    session.grow(2)
    assert session.num_rows == [1] * 5
    assert session.messages == [5]


# What the target says.


def test_outcomes_move_with_the_acceptance_rate_that_is_measured() -> None:
    session = ToySpeculator(policy(12), toy_model())
    for _ in range(60):
        session.grow()
        session.commit([a_missing_token(session.tree)])
    session.grow()
    refused = num_outcomes(session.tree, GAMMA)
    for _ in range(60):
        session.commit([node.token_id for node in chain_below(session.tree.root)[: GAMMA + 1]])
        session.grow()
    accepted = num_outcomes(session.tree, GAMMA)
    assert refused == [9, 2, 1, 0, 1]  # all twelve, and the chain goes on
    assert sum(accepted) == 12
    assert accepted[GAMMA] >= 5


def test_a_chain_that_was_never_sent_says_nothing_about_the_acceptance_rate() -> None:
    session = ToySpeculator(policy(12), toy_model())
    for _ in range(60):
        session.grow(2)
        session.commit([a_missing_token(session.tree)])
    session.grow()
    assert num_outcomes(session.tree, GAMMA) == fan_outs(SaguaroParams(budget=12), GAMMA, 0.7)


# The ratio rule.


def test_the_chain_and_the_rails_follow_what_was_drawn_and_outcomes_are_picks() -> None:
    session = ToySpeculator(policy((2, 2, 2, 2, 3), is_ratio=True), drawn(toy_model(), rank=2))
    session.grow()
    chain = [session.tree.root, *chain_below(session.tree.root)][: GAMMA + 1]
    for k, node in enumerate(chain):
        first, *others = session.candidates(node, 8)
        own = node.children[first.token_id]
        assert own.q is not None
        picks = [child for child in node.children.values() if child is not own]
        assert all(child.q is None for child in picks)
        assert [child.token_id for child in picks] == [c.token_id for c in others[: (2, 2, 2, 2, 2)[k]]]
        for pick in picks:
            assert len(chain_below(pick)) == GAMMA
            assert all(below.q is not None for below in chain_below(pick))
    hit = next(child for child in chain[1].children.values() if child.q is None)
    rail = chain_below(hit)
    assert session.commit(path_of(session.tree, hit)) == 2
    assert chain_below(session.tree.root)[:GAMMA] == rail
    assert num_outcomes(session.tree, GAMMA)[:GAMMA] == [2, 2, 2, 2]


def test_when_a_drawn_token_is_sent_does_not_depend_on_what_was_drawn() -> None:
    schedules = []
    for probability in (0.9, 0.001):
        model = drawn(one_after_another(probability, probability / 2), rank=0)
        session = ToySpeculator(policy(8, min_path_probability=0.3, is_ratio=True), model)
        session.grow(5)
        schedules.append((session.messages[0], session.num_rows[: session.messages[0]]))
    # At the rate of .7 that is taken for granted, .7 ** 3 is still above .3 and .7 ** 4 is not.
    assert schedules == [(4, [1] * 4)] * 2


def test_under_the_ratio_rule_a_chain_gets_shorter_when_the_target_refuses_much() -> None:
    session = ToySpeculator(policy(8, min_path_probability=0.3, is_ratio=True), drawn(toy_model(), rank=0))
    for _ in range(60):
        session.grow()
        session.commit([a_missing_token(session.tree)])
    forwards = len(session.num_rows)
    session.grow()
    assert min(message for message in session.messages if message > forwards) == forwards + 1


def test_what_the_target_leaves_of_a_drawn_chain_is_a_rail() -> None:
    # The chain is four tokens long whatever was drawn; the target takes those whose parent's path is probable: two.
    session = ToySpeculator(
        policy((1, 1, 3), min_path_probability=0.3, is_ratio=True), drawn(one_after_another(0.5), 0)
    )
    session.grow()
    assert session.messages[0] == GAMMA
    assert num_outcomes(session.tree, 2) == [1, 1, 3]


# Bad circumstances.


def test_a_full_tree_ends_growth_and_a_commit_lets_it_go_on() -> None:
    session = ToySpeculator(policy(), toy_model(), max_num_nodes=12)
    assert session.grow() < 50
    session.commit([a_missing_token(session.tree)])
    assert session.grow() > GAMMA


def test_candidates_that_no_tree_takes_end_growth() -> None:
    session = ToySpeculator(policy(), lambda context, count: [Candidate(VOCAB_SIZE, -0.1)])
    assert session.grow() == 1
    session.commit([3])
    assert session.grow() == 1


def test_a_chain_that_another_policy_has_grown_goes_on() -> None:
    session = ToySpeculator(policy((1,)), one_after_another(0.9))
    node = session.tree.root
    for _ in range(GAMMA + 2):
        node.is_expanded = True
        added = session.tree.add(node, 2, math.log(0.9), Source.DRAFT)
        assert added is not None
        session.unsent.append(added)
        node = added
    expansion = session.policy.next_expansion(session.tree)
    assert expansion is not None
    assert expansion.nodes == (node,)
    assert session.policy.is_message(session.tree, 1)
    session.forward()
    session.commit([2, 2])
    session.grow()
    assert num_outcomes(session.tree, GAMMA) == [0, 0, 0, 0, 1]  # nobody has kept what was found beside the chain


def test_a_root_that_went_through_a_forward_in_vain_goes_through_another() -> None:
    session = ToySpeculator(policy(), toy_model())
    session.tree.root.is_expanded = True  # a pause began while the forward ran
    session.grow(GAMMA)
    assert session.messages == [GAMMA]


@pytest.mark.parametrize("fan_out", [(0,), (1, 0)])
def test_the_chain_goes_on_where_no_outcome_is_wanted(fan_out: tuple[int, ...]) -> None:
    session = ToySpeculator(policy(fan_out), toy_model())
    session.grow()
    assert num_outcomes(session.tree, GAMMA) == [fan_out[0], 0, 0, 0, 1]
    assert len(chain_below(session.tree.root)) == 2 * GAMMA + 1
