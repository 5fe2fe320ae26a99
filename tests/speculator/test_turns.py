"""The target waits for a draft as long as another forward brings more in its time than the rest has done."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.speculator.turns import AwaitedDraft, is_worth_waiting


def draft(kept: float = 3.0, gained: float = 0.5, drafted_us: float = 4000.0, round_us: float = 8000.0) -> AwaitedDraft:
    return AwaitedDraft(kept, gained, drafted_us, 1000.0, round_us)


@pytest.mark.parametrize(("gained", "is_worth"), [(0.26, True), (0.25, True), (0.24, False), (0.0, False)])
def test_a_forward_is_worth_what_the_round_brings_in_its_time(gained: float, is_worth: bool) -> None:
    # 3 tokens in 12 ms: one of a forward of 1 ms brings .25.
    assert is_worth_waiting([draft(gained=gained)]) == is_worth


def test_all_wait_for_those_that_go_on() -> None:
    sure, ended = draft(gained=0.6), draft(gained=0.0)
    assert is_worth_waiting([sure, ended]), ".6 of both, where .5 would do"
    assert not is_worth_waiting([sure, ended, ended])


def test_while_nobody_knows_what_a_round_takes_drafts_go_on() -> None:
    assert is_worth_waiting([draft(gained=0.01), draft(gained=0.01, round_us=0.0)])


@given(
    st.lists(st.tuples(st.floats(1, 9), st.floats(0, 1)), min_size=1, max_size=5),
    st.floats(1, 1e5),
    st.floats(1, 1e5),
    st.floats(1, 1e5),
)
def test_it_goes_on_exactly_where_that_makes_more_tokens_in_a_time(
    tokens: list[tuple[float, float]], drafted_us: float, forward_us: float, round_us: float
) -> None:
    drafts = [AwaitedDraft(kept, gained, drafted_us, forward_us, round_us) for kept, gained in tokens]
    kept, gained = sum(kept for kept, _ in tokens), sum(gained for _, gained in tokens)
    now = kept / (round_us + drafted_us)
    later = (kept + gained) / (round_us + drafted_us + forward_us)
    if abs(later - now) > 1e-9 * now:
        assert is_worth_waiting(drafts) == (later > now)
