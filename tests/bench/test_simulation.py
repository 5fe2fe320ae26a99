"""The simulation where its result can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from outrider.core.costs import ForwardTimes
from outrider.core.speculation import Waiting
from outrider_bench.simulation import NO_CHOICE, Odds, SimulatedCosts, SimulatedMethod, SimulatedOutcome, simulate

TARGET_MS, OVERHEAD_MS = 20.0, 1.0
FLAT = ForwardTimes({1: TARGET_MS, 64: TARGET_MS})
ROUND_TRIPS_MS = (0.0, 2.0, 10.0, 40.0, 100.0)
ALWAYS_RIGHT, NEVER_RIGHT = Odds(((1.0,),)), Odds(((0.0, 0.0),))
OFF = 1 / (TARGET_MS + OVERHEAD_MS)
"""Tokens a millisecond of plain decoding."""


def run(
    odds: Odds, round_trip_ms: float = 0.0, *, draft_ms: float = 2.0, num_tokens: int = 2000, seed: int = 0, **how: Any
) -> SimulatedOutcome:
    costs = SimulatedCosts(FLAT, ForwardTimes({1: draft_ms, 64: draft_ms}), round_trip_ms, OVERHEAD_MS)
    return simulate(odds, costs, replace(SimulatedMethod(num_expanded=1, lookahead=256), **how), num_tokens, seed)


def chain(max_rows: int) -> dict[str, Any]:
    return {"max_rows": max_rows, "is_tree": False}


@pytest.mark.parametrize("round_trip_ms", ROUND_TRIPS_MS)
def test_a_draft_that_is_always_right_hides_every_round_trip(round_trip_ms: float) -> None:
    outcome = run(ALWAYS_RIGHT, round_trip_ms, num_tokens=5_000, **chain(7))
    assert outcome.tokens_per_ms == pytest.approx(8 * OFF, rel=0.02)


@pytest.mark.parametrize("round_trip_ms", ROUND_TRIPS_MS)
def test_a_draft_that_is_never_right_is_plain_decoding(round_trip_ms: float) -> None:
    outcome = run(NEVER_RIGHT, round_trip_ms)
    assert outcome.tokens_per_ms == pytest.approx(OFF)
    assert outcome.tokens_per_round == 1


def test_a_slow_drafter_bounds_the_speed_even_if_it_is_always_right() -> None:
    assert run(ALWAYS_RIGHT, draft_ms=10.0).tokens_per_ms == pytest.approx(1 / 10, rel=0.02)


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("length", [1, 4, 8])
def test_without_a_round_trip_a_chain_brings_what_the_geometric_series_says(acceptance: float, length: int) -> None:
    odds = Odds(((acceptance,),))
    outcome = run(odds, draft_ms=0.1, num_tokens=5_000, **chain(length))
    assert outcome.tokens_per_round == pytest.approx((1 - acceptance ** (length + 1)) / (1 - acceptance), rel=0.05)


def test_a_sub_tree_that_holds_everything_that_can_be_said_is_kept_to_its_depth() -> None:
    odds = Odds(((0.5, 0.5),))
    outcome = run(odds, draft_ms=0.5, num_tokens=150, num_expanded=8, max_rows=2 + 4)
    assert outcome.tokens_per_round == pytest.approx(3, rel=0.03)
    assert run(odds, draft_ms=0.5, num_tokens=150, num_expanded=8, **chain(6)).tokens_per_round < 2.1


def test_odds_that_rise_with_the_run_are_those_of_the_text() -> None:
    odds = Odds(((0.0, 1.0), (1.0, 0.0)))  # never a first choice after none: so never one at all
    assert run(odds, draft_ms=0.2, max_rows=1).tokens_per_round == pytest.approx(2, rel=0.01)
    rising = Odds(((0.5,), (1.0,)))  # once right, right for ever
    assert run(rising, draft_ms=0.2, num_tokens=4_000, **chain(9)).tokens_per_round == pytest.approx(10, rel=0.02)


def test_a_round_trip_that_nobody_waits_for_and_that_never_ends_leaves_plain_decoding() -> None:
    outcome = run(Odds(((0.8,),)), 1e12, waiting=Waiting.NEVER)
    assert outcome.tokens_per_ms == pytest.approx(OFF)


def test_who_always_waits_pays_a_round_trip_for_each_round_that_begins_with_a_miss() -> None:
    # Right and wrong in turn: one token is kept of a chain of one, then the target says what nobody knew.
    odds = Odds(((1.0,), (0.0, 0.0)))
    outcome = run(odds, 100.0, waiting=Waiting.ALWAYS, num_tokens=4000, **chain(1))
    # The round begins when the answer to the commit is there, or when the overhead has passed.
    assert outcome.tokens_per_round == pytest.approx(2, rel=0.01)
    assert outcome.time_ms / outcome.num_rounds == pytest.approx(TARGET_MS + 100.0 + 2.0, rel=0.02)


def test_longer_round_trips_leave_less_and_never_less_than_plain_decoding() -> None:
    odds = Odds(((0.6, 0.15, 0.1),))
    speeds = [run(odds, ms, num_expanded=8, max_rows=16, num_tokens=300).tokens_per_ms for ms in (0.0, 40.0, 100.0)]
    for nearer, farther in pairwise(speeds):
        assert farther < 1.03 * nearer  # they are no round trips of the very same rounds
    assert OFF < speeds[-1] < 0.8 * speeds[0]


def test_a_wider_tree_keeps_more_over_a_long_way_than_a_chain() -> None:
    odds = Odds(((0.6, 0.2, 0.1),))
    wide, narrow = (run(odds, 40.0, num_expanded=m, max_rows=16, num_tokens=300) for m in (16, 1))
    assert wide.tokens_per_ms > 1.15 * narrow.tokens_per_ms


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    odds = Odds(((0.6, 0.2),))
    first, again, other = (run(odds, 10.0, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_odds_are_those_of_the_texts_that_were_watched() -> None:
    # After a miss, always a first choice; after one, a second choice three times of four; after two, none.
    text = [0, 1, 0, 1, 0, 1, 0, 0, NO_CHOICE] * 50
    odds = Odds.measured([text], num_ranks=2)
    assert odds.after(0) == (1.0, 0.0)
    assert odds.after(1) == pytest.approx((0.25, 0.75))
    assert odds.after(2) == odds.after(9) == (0.0, 0.0)
    assert odds.chain_value(3) == pytest.approx(1.25)


def test_runs_that_were_seldom_seen_count_together() -> None:
    # Each length of a run occurs once: no entry of its own is worth anything.
    texts = [[0] * length + [1] for length in range(1, 6)]
    odds = Odds.measured(texts, num_ranks=4, max_run=16)
    assert odds.after(3) == odds.after(30)
    assert math.isclose(sum(odds.after(3)), 1.0)
    assert odds.after(3)[0] == pytest.approx(3 / 6)


def test_nothing_watched_is_a_draft_that_is_never_right() -> None:
    assert Odds.measured([], num_ranks=3).by_run == ((0.0, 0.0, 0.0),)


@pytest.mark.parametrize("rows", [(), ((),), ((0.7, 0.4),), ((-0.1,),)])
def test_odds_are_probabilities(rows: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(ValueError, match="odds"):
        Odds(rows)
