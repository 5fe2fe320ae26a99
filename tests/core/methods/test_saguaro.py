"""SAGUARO predicts the outcomes of the current verification, and drafts for them before they are known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.calibration import MAX_ACCEPTANCE_RATE, MIN_ACCEPTANCE_RATE
from outrider.core.growth import Candidate
from outrider.core.methods import SAGUARO
from outrider.core.methods.saguaro import (
    MAX_ROWS,
    FanOut,
    SaguaroGrowth,
    SaguaroParams,
    apportioned,
    fan_outs,
    geometric_shares,
)
from outrider.core.params import AcceptanceRule, Source
from outrider.core.speculation import SpeculationParams
from outrider.core.tree import DraftTree, Node
from tests.core.methods.toy_speculator import (
    VOCAB_SIZE,
    ToySpeculator,
    a_missing_token,
    chain_below,
    drawn,
    one_after_another,
    path_of,
    toy_model,
)

GAMMA = 4


def policy(
    fan_out: Sequence[int] | int = 12,
    *,
    lookahead: int = 16,
    gamma: int = GAMMA,
    min_path_probability: float = 0.0,
    is_ratio: bool = False,
) -> SaguaroGrowth:
    """With a budget, or with given fan-outs."""
    is_budget = isinstance(fan_out, int)
    saguaro = (
        SaguaroParams(budget=fan_out, exponent=1.0)
        if is_budget
        else SaguaroParams(FanOut.GIVEN, fan_outs=tuple(fan_out))
    )
    rule = AcceptanceRule.RATIO if is_ratio else AcceptanceRule.MATCH
    return SaguaroGrowth(
        SpeculationParams(SAGUARO, gamma, lookahead, min_path_probability, acceptance_rule=rule, own=(saguaro,))
    )


def outcomes(tree: DraftTree, chain_len: int) -> list[list[Node]]:
    """The outcomes at each position of the chain; those after its last token include the chain's own next token."""
    chain = [tree.root, *chain_below(tree.root)][: chain_len + 1]
    own = set(chain)
    return [[child for child in node.children.values() if child not in own] for node in chain]


def num_outcomes(tree: DraftTree, chain_len: int) -> list[int]:
    return [len(found) for found in outcomes(tree, chain_len)]


def check_tree(tree: DraftTree, budget: int, lookahead: int) -> None:
    """Branches begin only at the chain, and no more of them than the budget allows."""
    on_chain = {tree.root, *chain_below(tree.root)}
    num_beside = 0
    for node in [tree.root, *tree.live_nodes()]:
        assert node.position - tree.root.position <= lookahead
        if node in on_chain:
            num_beside += max(0, len(node.children) - 1)
        else:
            assert len(node.children) <= 1
    assert num_beside <= budget


def test_a_chain_comes_first_and_alone_and_goes_out_whole() -> None:
    session = ToySpeculator(policy(), toy_model())
    session.grow(GAMMA)
    assert session.num_rows == [1] * GAMMA
    assert session.messages == [GAMMA]
    best = session.tree.best_chain(GAMMA)
    assert chain_below(session.tree.root)[:GAMMA] == best
    assert session.mirror.best_chain(GAMMA)[-1].token_id == best[-1].token_id


def test_every_position_has_as_many_outcomes_as_its_fan_out_and_they_are_the_best_there() -> None:
    session = ToySpeculator(policy((3, 2, 0, 1, 4)), toy_model())
    session.grow()
    assert num_outcomes(session.tree, GAMMA) == [3, 2, 0, 1, 4]
    chain = [session.tree.root, *chain_below(session.tree.root)]
    for k, found in enumerate(outcomes(session.tree, GAMMA)):
        candidates = [c.token_id for c in session.candidates(chain[k], 12)]
        if k < GAMMA:
            candidates.remove(chain[k + 1].token_id)
        assert {node.token_id for node in found} == set(candidates[: len(found)])


def test_the_geometric_fan_out_spends_its_budget() -> None:
    session = ToySpeculator(policy(12), toy_model())
    session.grow()
    counts = num_outcomes(session.tree, GAMMA)
    assert counts == fan_outs(SaguaroParams(budget=12), GAMMA, 0.7, 1.0)
    assert sum(counts) == 12


def test_all_rails_grow_at_once_and_outcomes_cost_no_forward_of_their_own() -> None:
    session = ToySpeculator(policy((2, 2, 1, 1, 1)), toy_model())
    session.grow()
    # The chain; its end and its six outcomes; then the seven rails, of which the one at the end began later.
    assert session.num_rows == [1] * GAMMA + [7] + [7] * (GAMMA - 1) + [1]
    for found in outcomes(session.tree, GAMMA):
        assert [len(chain_below(node)) for node in found] == [GAMMA] * len(found)
    assert session.messages == list(range(GAMMA, 2 * GAMMA + 2))


def test_on_a_hit_the_rail_is_the_chain_and_its_own_outcomes_come_at_once() -> None:
    session = ToySpeculator(policy((2, 2, 1, 1, 1)), toy_model())
    session.grow()
    hit = outcomes(session.tree, GAMMA)[1][1]
    rail = chain_below(hit)
    assert session.commit(path_of(session.tree, hit)) == 2
    assert session.tree.root is hit
    assert session.mirror.best_chain(GAMMA)[-1].position == rail[-1].position
    assert num_outcomes(session.tree, GAMMA)[:GAMMA] == [2, 2, 1, 1]  # without a forward
    forwards = len(session.num_rows)
    session.grow()
    assert session.num_rows[forwards:] == [7] * GAMMA + [1]  # all rails at once, and then the one after the chain's end
    assert num_outcomes(session.tree, GAMMA) == [2, 2, 1, 1, 1]


def test_after_a_miss_a_chain_is_drafted_anew_and_alone() -> None:
    session = ToySpeculator(policy(), toy_model())
    session.grow()
    forwards = len(session.num_rows)
    assert session.commit([a_missing_token(session.tree)]) == 0
    session.grow(GAMMA + 1)
    assert session.num_rows[forwards : forwards + GAMMA] == [1] * GAMMA
    assert session.num_rows[-1] > 1
    assert forwards + GAMMA in session.messages
    assert not set(range(forwards + 1, forwards + GAMMA)) & set(session.messages)


def test_after_full_acceptance_the_chain_has_gone_on() -> None:
    session = ToySpeculator(policy(), toy_model())
    session.grow()
    chain = chain_below(session.tree.root)
    assert len(chain) == 2 * GAMMA + 1
    tokens = [node.token_id for node in chain[: GAMMA + 1]]
    assert session.commit(tokens) == GAMMA + 1
    assert session.mirror.best_chain(GAMMA)[-1].token_id == chain[-1].token_id


def test_positions_that_come_nearer_get_the_outcomes_that_follow_theirs() -> None:
    session = ToySpeculator(policy((3, 1, 1, 1, 1)), toy_model())
    session.grow()
    chain = chain_below(session.tree.root)
    session.commit([chain[0].token_id])
    assert num_outcomes(session.tree, GAMMA)[:GAMMA] == [3, 1, 1, 1]
    candidates = [c.token_id for c in session.candidates(session.tree.root, 4)]
    candidates.remove(chain[1].token_id)
    assert {node.token_id for node in outcomes(session.tree, GAMMA)[0]} == set(candidates)


def test_outcomes_that_survive_a_commit_count() -> None:
    session = ToySpeculator(policy(12), toy_model())
    for _ in range(60):
        session.grow()
        session.commit([node.token_id for node in chain_below(session.tree.root)[: GAMMA + 1]])
    session.grow()
    assert num_outcomes(session.tree, GAMMA)[GAMMA] >= 7  # nearly all is accepted
    session.commit([chain_below(session.tree.root)[0].token_id])
    session.grow()
    check_tree(session.tree, 12, 16)


def test_nothing_is_deeper_than_the_lookahead() -> None:
    session = ToySpeculator(policy(12, lookahead=6), toy_model())
    session.grow()
    assert max(node.position for node in session.tree.live_nodes()) == 6
    assert len(chain_below(outcomes(session.tree, GAMMA)[0][0])) == GAMMA
    assert len(chain_below(outcomes(session.tree, GAMMA)[3][0])) == 2
    session.commit([chain_below(session.tree.root)[0].token_id])
    assert session.grow() > 0
    assert max(node.position for node in session.tree.live_nodes()) == 7


def test_with_no_room_behind_the_chain_its_outcomes_are_drafted_for_all_the_same() -> None:
    session = ToySpeculator(policy((2, 2, 1, 1, 3), lookahead=GAMMA), toy_model())
    session.grow()
    assert num_outcomes(session.tree, GAMMA) == [2, 2, 1, 1, 0]


@settings(deadline=None, max_examples=100)
@given(
    data=st.data(),
    budget=st.integers(1, 20),
    lookahead=st.integers(GAMMA, 12),
    probability=st.sampled_from([0.0, 0.05, 0.3]),
    sharpness=st.sampled_from([0.3, 1.0, 4.0]),
    is_ratio=st.booleans(),
)
def test_outcomes_never_exceed_the_budget_and_growth_ends_whatever_is_committed(
    data: st.DataObject,
    budget: int,
    lookahead: int,
    probability: float,
    sharpness: float,
    is_ratio: bool,
) -> None:
    growth = policy(budget, lookahead=lookahead, min_path_probability=probability, is_ratio=is_ratio)
    model = drawn(toy_model(sharpness)) if is_ratio else toy_model(sharpness)
    session = ToySpeculator(growth, model)
    for _ in range(data.draw(st.integers(1, 6))):
        session.grow(data.draw(st.sampled_from([0, 1, 3, 5, 50])))
        followed = data.draw(st.sampled_from([None, *session.tree.live_nodes()]))
        tokens = [] if followed is None else path_of(session.tree, followed)
        tokens += data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=0 if tokens else 1, max_size=2))
        session.commit(tokens)
        check_tree(session.tree, budget, lookahead)
    assert session.grow() < 1000
    check_tree(session.tree, budget, lookahead)
    assert session.tree.num_nodes > 0


def test_the_rails_of_the_most_probable_outcomes_grow_first_where_rows_are_short() -> None:
    session = ToySpeculator(policy((5,), gamma=16, lookahead=32), toy_model())
    session.grow(17)
    tree = session.tree
    every = sorted((node.path_logprob for found in outcomes(tree, 16)[:16] for node in found), reverse=True)
    assert len(every) == 80 > MAX_ROWS
    assert session.num_rows[-1] == MAX_ROWS
    grown = sorted(
        (node.path_logprob for found in outcomes(tree, 16)[:16] for node in found if node.children), reverse=True
    )
    assert grown == every[: MAX_ROWS - 1]  # one row is for the chain's end
    session.grow()
    assert all(node.children for found in outcomes(tree, 16)[:16] for node in found)


# Improbable paths.


def test_an_improbable_chain_ends_and_what_the_target_does_not_verify_is_an_outcome() -> None:
    # .5 ** 2 is still above .2, .5 ** 3 is not: two tokens are verified, and the third is a possible next token.
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
    """A hit on an outcome after the first position, whose rail had this many forwards."""
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


# The target's verdicts.


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
    assert num_outcomes(session.tree, GAMMA) == fan_outs(SaguaroParams(budget=12), GAMMA, 0.7, 1.0)


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
    # At the assumed rate of .7, .7 ** 3 is still above .3 and .7 ** 4 is not.
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
    # The chain has four tokens, whatever was drawn. The target takes the two whose parent's path is probable.
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
    assert num_outcomes(session.tree, GAMMA) == [0, 0, 0, 0, 1]  # what was found next to the chain was not kept


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


RATES = st.floats(MIN_ACCEPTANCE_RATE, MAX_ACCEPTANCE_RATE)
EXPONENTS = st.floats(0.1, 10.0)


def test_the_shares_are_those_of_the_theorem() -> None:
    # a = 1/4, r = 1: the root of a is 1/2, that of 1 - a is .866.
    assert geometric_shares(3, 0.25, 1.0) == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8 / math.sqrt(0.75)])
    # a = .729, r = 2: the cube root of a is .9; all after the last position.
    assert geometric_shares(2, 0.729, 2.0) == pytest.approx([1, 0.9, 0.81 * 0.271 ** (-1 / 3)])
    assert geometric_shares(0, 0.5, 1.0) == pytest.approx([math.sqrt(2)])


def test_whole_numbers_follow_from_the_largest_remainders() -> None:
    # 10 * (1, .5, .25, .144) / 1.894 = 5.28, 2.64, 1.32, 0.76: the second and the last one get the remaining two.
    assert fan_outs(SaguaroParams(budget=10), 3, 0.25, 1.0) == [5, 3, 1, 1]
    # a = .64: the root is .8; 16 * (1, .8, .64, .512 / .6) / 3.293 = 4.86, 3.89, 3.11, 4.15.
    assert fan_outs(SaguaroParams(budget=16), 3, 0.64, 1.0) == [5, 4, 3, 4]


def test_equal_remainders_go_to_the_earlier_positions() -> None:
    assert fan_outs(SaguaroParams(FanOut.UNIFORM, budget=10), 3, 0.5, 1.0) == [3, 3, 2, 2]
    assert apportioned(2, [1.0, 1.0, 1.0]) == [1, 1, 0]


def test_given_fan_outs_are_taken_as_they_are_and_the_last_one_stands_for_the_rest() -> None:
    params = SaguaroParams(FanOut.GIVEN, fan_outs=(5, 3, 1))
    assert fan_outs(params, 4, 0.5, 1.0) == [5, 3, 1, 1, 1]
    assert fan_outs(params, 1, 0.5, 1.0) == [5, 3]


def test_a_surer_draft_model_gets_more_outcomes_after_later_positions() -> None:
    doubtful, sure = (fan_outs(SaguaroParams(budget=32), 8, rate, 1.0) for rate in (0.3, 0.9))
    assert doubtful[0] > sure[0]
    assert sum(doubtful[4:]) < sum(sure[4:])
    assert sure[8] > sure[0]


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_rate_that_gives_all_to_one_end_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="acceptance_rate"):
        geometric_shares(4, rate, 1.0)


@given(budget=st.integers(1, 256), chain_len=st.integers(0, 20), rate=RATES, exponent=EXPONENTS)
def test_the_sum_is_the_budget_and_later_positions_before_the_last_get_no_more(
    budget: int, chain_len: int, rate: float, exponent: float
) -> None:
    counts = fan_outs(SaguaroParams(budget=budget), chain_len, rate, exponent)
    assert len(counts) == chain_len + 1
    assert sum(counts) == budget
    assert min(counts) >= 0
    assert counts[:-1] == sorted(counts[:-1], reverse=True)
    shares = geometric_shares(chain_len, rate, exponent)
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - budget * share / sum(shares)) < 1


@given(budget=st.integers(1, 256), chain_len=st.integers(0, 20))
def test_the_geometric_fan_out_becomes_uniform_before_the_last_position_as_all_is_accepted(
    budget: int, chain_len: int
) -> None:
    almost_one = math.nextafter(1.0, 0.0)
    shares = geometric_shares(chain_len, almost_one, 1.0)
    assert shares[:-1] == pytest.approx([1.0] * chain_len)
    uniform = apportioned(budget, [1.0] * chain_len) if chain_len else []
    assert apportioned(budget, shares[:-1]) == uniform if chain_len else True


@given(budget=st.integers(1, 64), chain_len=st.integers(0, 12), rate=RATES)
def test_the_geometric_fan_out_becomes_uniform_where_more_guesses_bring_nearly_all_at_once(
    budget: int, chain_len: int, rate: float
) -> None:
    assert geometric_shares(chain_len, rate, 1e9) == pytest.approx([1.0] * (chain_len + 1))


def hit_probability(counts: Sequence[float], rate: float, exponent: float) -> float:
    """The theorem's model: F guesses miss with probability F ** -r; without a guess there is no hit."""
    last = len(counts) - 1
    weights = [rate**k * (1 - rate) for k in range(last)] + [rate**last]
    return sum(w * (1 - count**-exponent) for w, count in zip(weights, counts, strict=True) if count >= 1)


def allocations(budget: int, num_positions: int) -> Iterator[tuple[int, ...]]:
    """Every way to spend the budget, with at least one guess each."""
    if num_positions == 1:
        yield (budget,)
        return
    for first in range(1, budget - num_positions + 2):
        for rest in allocations(budget - first, num_positions - 1):
            yield (first, *rest)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize(("budget", "chain_len"), [(12, 2), (16, 3), (24, 3)])
def test_no_allocation_has_a_higher_hit_probability_but_for_rounding(
    budget: int, chain_len: int, rate: float, exponent: float
) -> None:
    counts = fan_outs(SaguaroParams(budget=budget), chain_len, rate, exponent)
    shares = geometric_shares(chain_len, rate, exponent)
    exact = [budget * share / sum(shares) for share in shares]
    best = max(allocations(budget, chain_len + 1), key=lambda found: hit_probability(found, rate, exponent))
    most = hit_probability(best, rate, exponent)
    if min(exact) >= 1:  # the theorem's solution is valid, so no integers are better
        assert hit_probability(exact, rate, exponent) >= most
    assert hit_probability(counts, rate, exponent) >= most - 0.01
    uniform = fan_outs(SaguaroParams(FanOut.UNIFORM, budget=budget), chain_len, rate, exponent)
    assert hit_probability(counts, rate, exponent) >= hit_probability(uniform, rate, exponent) - 0.01


def test_as_many_tokens_are_biased_at_each_position_as_are_outcomes_there() -> None:
    rule = AcceptanceRule.RATIO
    saguaro = SaguaroParams(budget=12, bias=0.5)
    params = SpeculationParams(SAGUARO, GAMMA, 16, acceptance_rule=rule, shared_noise=False, own=(saguaro,))
    growth = SaguaroGrowth(params)
    session = ToySpeculator(growth, toy_model())
    expected = fan_outs(saguaro, GAMMA, 0.7, 1.0)
    for depth in range(GAMMA):
        expansion = growth.next_expansion(session.tree)
        assert expansion is not None
        assert [growth.draw_bias(node)[1] for node in expansion.nodes] == [expected[depth]]
        session.forward()
    session.grow()
    for outcome in session.tree.root.children.values():
        assert growth.draw_bias(outcome)[1] in expected
    fixed = SaguaroGrowth(replace(params, own=(replace(saguaro, num_biased=3),)))
    assert fixed.draw_bias(session.tree.root) == (saguaro.bias, 3)
