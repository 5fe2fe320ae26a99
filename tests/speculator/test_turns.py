"""The target waits for a draft as long as another forward brings more in its time than the rest has done."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.speculator.turns import AwaitedDraft, is_worth_waiting


def draft(kept: float = 3.0, gained: float = 0.5, num_forwards: int = 4, round_us: float = 8000.0) -> AwaitedDraft:
    return AwaitedDraft(kept, gained, num_forwards, round_us)


@pytest.mark.parametrize(("gained", "is_worth"), [(0.26, True), (0.25, True), (0.24, False), (0.0, False)])
def test_a_forward_is_worth_what_the_round_brings_in_its_time(gained: float, is_worth: bool) -> None:
    # 3 tokens in 12 ms: one of a forward of 1 ms brings .25.
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
