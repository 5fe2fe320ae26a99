"""A draft departs when another token is worth less than the target's wait for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.departure import AwaitedDraft, is_worth_waiting, least_awaited, tokens_of_hit
from outrider.core.methods import BEST_FIRST, CARD, DOUBLE, PEARL, SAGUARO, growth_policy
from outrider.core.methods.saguaro import SaguaroParams
from outrider.core.speculation import Method, SpeculationParams
from tests.core.methods.toy_speculator import ToySpeculator, one_after_another


def draft(kept: float = 3.0, gained: float = 0.5, num_forwards: int = 4, round_us: float = 8000.0) -> AwaitedDraft:
    return AwaitedDraft(kept, gained, num_forwards, round_us)


@pytest.mark.parametrize(("gained", "is_worth"), [(0.26, True), (0.25, True), (0.24, False), (0.0, False)])
def test_a_forward_is_worth_what_the_round_brings_in_its_time(gained: float, is_worth: bool) -> None:
    # 3 tokens in 12 ms: a forward of 1 ms must bring .25.
    assert is_worth_waiting([draft(gained=gained)], 1000.0) == is_worth


def test_all_wait_for_those_that_go_on() -> None:
    sure, ended = draft(gained=0.6), draft(gained=0.0)
    assert is_worth_waiting([sure, ended], 1000.0), ".6 of both, where .5 would do"
    assert not is_worth_waiting([sure, ended, ended], 1000.0)


def test_one_that_does_not_know_what_a_round_takes_is_judged_by_what_others_know() -> None:
    knows, new = draft(gained=0.01), draft(gained=0.01, round_us=0.0)
    assert not is_worth_waiting([knows, new], 1000.0)
    assert is_worth_waiting([new, new], 1000.0), "nobody knows it"


@given(
    st.lists(st.tuples(st.floats(1, 9), st.floats(0, 1)), min_size=1, max_size=5),
    st.integers(1, 20),
    st.floats(1, 1e5),
    st.floats(1, 1e5),
)
def test_it_goes_on_exactly_where_that_makes_more_tokens_in_a_time(
    tokens: list[tuple[float, float]], num_forwards: int, forward_us: float, round_us: float
) -> None:
    drafts = [AwaitedDraft(kept, gained, num_forwards, round_us) for kept, gained in tokens]
    kept, gained = sum(kept for kept, _ in tokens), sum(gained for _, gained in tokens)
    now = kept / (round_us + num_forwards * forward_us)
    later = (kept + gained) / (round_us + (num_forwards + 1) * forward_us)
    if abs(later - now) > 1e-9 * now:
        assert is_worth_waiting(drafts, forward_us) == (later > now)


ALPHA, SHARE, GAMMA = st.floats(0.05, 0.98), st.floats(0.01, 4.0), st.integers(1, 64)


def first_message(alpha: float, share: float, gamma: int) -> int:
    """Length of a chain at its departure, if each token is kept with probability `alpha`."""
    least = least_awaited(tokens_of_hit(share, alpha, gamma), share, alpha)
    return next((n for n in range(1, gamma) if alpha**n <= least), gamma)


@given(ALPHA, SHARE, SHARE, GAMMA)
def test_the_slower_the_draft_model_the_sooner_a_draft_leaves(a: float, one: float, other: float, gamma: int) -> None:
    quick, slow = sorted((one, other))
    assert first_message(a, slow, gamma) <= first_message(a, quick, gamma)


@given(ALPHA, SHARE, GAMMA)
def test_a_round_that_waits_for_nothing_brings_what_is_drafted_meanwhile(a: float, share: float, gamma: int) -> None:
    brought = tokens_of_hit(share, a, gamma)
    assert 0 < brought <= gamma + 1
    assert brought <= 1 / share + 1e-9 or share > 1
    # Equation 1 of Leviathan et al., where the draft model is fast enough for a whole chain.
    assert tokens_of_hit(1 / (gamma + 1), a, gamma) == pytest.approx(sum(a**n for n in range(gamma + 1)))


def speed(alpha: float, share: float, gamma: int, num_awaited: int) -> float:
    """Tokens per time of a round, in an endless text: after a miss so many tokens are awaited, after a hit none."""
    num_ready = min(gamma + 1, 1 / share)
    hit, miss = (1 - alpha**num_ready) / (1 - alpha), (1 - alpha ** (num_awaited + 1)) / (1 - alpha)
    hits_after_miss = alpha ** (num_awaited + 1) / (1 - alpha**num_ready)
    return (miss + hits_after_miss * hit) / (1 + num_awaited * share + hits_after_miss)


@given(st.floats(0.3, 0.95), st.sampled_from([1.0, 2.5, 5.0, 10.0, 25.0]), st.integers(4, 32))
def test_no_other_first_message_makes_a_chain_that_goes_on_faster(a: float, ratio: float, gamma: int) -> None:
    chosen = speed(a, 1 / ratio, gamma, first_message(a, 1 / ratio, gamma))
    assert chosen >= max(speed(a, 1 / ratio, gamma, n) for n in range(1, gamma + 1)) - 1e-9


@given(st.floats(0.1, 0.95), st.sampled_from([1.0, 2.5, 5.0, 10.0, 25.0]))
def test_where_both_take_turns_a_draft_has_the_length_of_theorem_3_8(a: float, ratio: float) -> None:
    length = 1
    while is_worth_waiting([draft(sum(a**n for n in range(length + 1)), a ** (length + 1), length, ratio)], 1.0):
        length += 1
    speeds = [sum(a**n for n in range(gamma + 1)) / (gamma / ratio + 1) for gamma in range(1, 200)]
    assert speeds[length - 1] == pytest.approx(max(speeds))


def sure(method: Method, least: float, gamma: int = 8) -> ToySpeculator:
    """A speculator after its first message; each of its tokens is kept with a probability of .8."""
    params = SpeculationParams(method, gamma, 4 * gamma, 0.0, own=(SaguaroParams(budget=4),))
    session = ToySpeculator(growth_policy(params), one_after_another(0.8, 0.05))
    session.policy.foresee(0.0, least)
    while not session.messages:
        session.forward()
    return session


AHEAD = [PEARL, DOUBLE, CARD, SAGUARO, BEST_FIRST]


@pytest.mark.parametrize("method", AHEAD)
def test_every_method_that_drafts_ahead_leaves_when_its_path_is_no_more_probable(method: Method) -> None:
    for least, length in ((2.0, 1), (0.79, 2), (0.5, 4)):
        assert len(sure(method, least).num_rows) == length
    # Never longer than requested.
    assert len(sure(method, 0.01, gamma=3).num_rows) <= 3
