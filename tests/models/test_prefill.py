"""Prompts share the rows of steps: no session starves, and none reads in tiny pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.models.prefill import MIN_PREFILL_ROWS, PrefillTurns


def read_all(budget: int, lengths: list[int]) -> list[dict[int, int]]:
    """Lets sessions read their prompts to the end; returns the rows of each step."""
    turns: PrefillTurns[int] = PrefillTurns(budget)
    missing, steps = dict(enumerate(lengths)), []
    while missing:
        steps.append(turns.shares(missing))
        for reader, num_rows in steps[-1].items():
            missing[reader] -= num_rows
        missing = {reader: count for reader, count in missing.items() if count}
    return steps


@given(budget=st.integers(1, 600), lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=12))
def test_every_prompt_is_read_within_the_budget_and_in_turns(budget: int, lengths: list[int]) -> None:
    steps = read_all(budget, lengths)
    at_once = max(1, budget // MIN_PREFILL_ROWS)
    left = dict(enumerate(lengths))
    waited = dict.fromkeys(left, 0)
    for shares in steps:
        assert sum(shares.values()) <= budget
        assert len(shares) <= at_once
        for reader, num_rows in shares.items():
            # No tiny pieces: only the rest of a prompt is shorter.
            assert num_rows == left[reader] or num_rows >= min(MIN_PREFILL_ROWS, budget)
            left[reader] -= num_rows
        for reader, count in left.items():
            waited[reader] = 0 if reader in shares or not count else waited[reader] + 1
            # By then, all others that were there have read once.
            assert waited[reader] <= -(-len(lengths) // at_once)
    assert not any(left.values())


def test_a_short_prompt_leaves_its_rest_to_the_others() -> None:
    assert PrefillTurns[str](512).shares({"a": 1000, "b": 12, "c": 1000}) == {"b": 12, "a": 250, "c": 250}


def test_who_comes_later_reads_after_those_that_wait() -> None:
    turns = PrefillTurns[str](128)
    assert turns.shares({"a": 500, "b": 500, "c": 500}).keys() == {"a", "b"}
    assert turns.shares({"a": 436, "b": 436, "c": 500, "d": 500}).keys() == {"a", "c"}
