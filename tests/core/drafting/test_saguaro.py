"""SAGUARO: outcomes of the verification under way are predicted, and drafted for before they are known."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.drafting.saguaro import MAX_ROWS, fan_outs
from outrider.core.params import SaguaroParams
from tests.core.drafting.toy_outcomes import GAMMA, check_tree, num_outcomes, outcomes, policy
from tests.core.drafting.toy_speculator import (
    VOCAB_SIZE,
    ToySpeculator,
    a_missing_token,
    chain_below,
    drawn,
    path_of,
    toy_model,
)


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
    assert counts == fan_outs(SaguaroParams(budget=12), GAMMA, 0.7)
    assert sum(counts) == 12


def test_all_rails_grow_at_once_and_outcomes_cost_no_forward_of_their_own() -> None:
    session = ToySpeculator(policy((2, 2, 1, 1, 1)), toy_model())
    session.grow()
    # The chain; its end and the six outcomes beside it; then the seven rails, of which that at the end began later.
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
    assert session.num_rows[forwards:] == [7] * GAMMA + [1]  # the rails at once, and behind the end of the chain
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
    assert grown == every[: MAX_ROWS - 1]  # one row is that of the chain's end
    session.grow()
    assert all(node.children for found in outcomes(tree, 16)[:16] for node in found)
