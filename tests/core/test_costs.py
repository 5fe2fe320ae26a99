"""The number of rows is the one that brings the most tokens in the time of the round."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.costs import (
    HOLD_SHARE,
    STUCK_AFTER_TIMEOUTS,
    AttentionTimes,
    Contexts,
    DraftTimings,
    ForwardTimes,
    critical_batch,
    num_worth,
    patience_ms,
)
from outrider.core.speculation import Waiting

FLAT = ForwardTimes({1: 20.0, 8: 20.0, 9: 25.0, 32: 40.0})


def test_times_between_two_measurements_lie_on_a_line() -> None:
    times = ForwardTimes({1: 10.0, 5: 14.0, 9: 22.0})
    assert [times.of(rows) for rows in (1, 3, 5, 7, 9)] == pytest.approx([10, 12, 14, 18, 22])


def test_two_noisy_measurements_are_no_line_that_goes_on_for_ever() -> None:
    times = ForwardTimes({24: 6.10, 32: 6.05})
    assert [times.of(rows) for rows in (33, 1000, 2112)] == pytest.approx([6.2390625, 189.0625, 399.3])


ATTENTION = AttentionTimes(slot_ms=0.001, row_slot_ms=0.0002, context_len=200)


def test_long_contexts_add_a_time_for_what_is_read_once_and_for_what_each_row_attends_to() -> None:
    times = ForwardTimes({1: 10.0, 32: 20.0}, attention=ATTENTION)
    assert (times.of(1), times.of(32)) == (10.0, 20.0)
    times.contexts = Contexts(4200, 1)
    assert [times.of(rows) for rows in (1, 32)] == pytest.approx([10 + 4 + 0.8, 20 + 4 + 25.6])
    # Eight sessions of four rows each read eight contexts, and each row attends to one of them.
    times.contexts = Contexts(8 * 4200, 8)
    assert times.of(32) == pytest.approx(20 + 8 * 4 + 8 * 4 * 0.8)
    times.contexts = Contexts(8 * 100, 8)
    assert times.of(32) == 20.0


def test_fewer_rows_are_worth_their_time_behind_a_long_context() -> None:
    times = ForwardTimes({1: 20.0, 32: 21.0}, attention=ATTENTION)
    probabilities = [0.7**n for n in range(1, 17)]
    short = num_worth(probabilities, times)
    times.contexts = Contexts(8200, 1)
    assert 0 < num_worth(probabilities, times) < short


def test_forwards_behind_long_contexts_teach_what_contexts_add_and_spoil_no_size() -> None:
    twice = replace(ATTENTION, slot_ms=2 * ATTENTION.slot_ms, row_slot_ms=2 * ATTENTION.row_slot_ms)
    times = ForwardTimes({1: 10.0, 32: 20.0}, attention=ATTENTION)
    truth = ForwardTimes({1: 10.0, 32: 20.0}, attention=twice)
    for num_slots in (200, 8200, 16_200) * 300:
        truth.contexts = Contexts(num_slots, 1)
        for rows in (1, 32):
            times.observe(rows, truth.of(rows), truth.contexts)
    for num_slots in (200, 4200, 16_200):
        times.contexts = truth.contexts = Contexts(num_slots, 1)
        assert [times.of(rows) for rows in (1, 32)] == pytest.approx([truth.of(rows) for rows in (1, 32)], rel=0.05)


def test_a_size_that_is_learnt_behind_a_long_context_is_known_without_it() -> None:
    times = ForwardTimes({1: 10.0, 32: 20.0}, attention=ATTENTION)
    contexts = Contexts(2200, 1)
    times.observe(64, 30.0 + ATTENTION.of(64, contexts), contexts)
    assert times.of(64) == pytest.approx(30.0)


def test_a_single_measurement_says_nothing_of_other_sizes() -> None:
    times = ForwardTimes({1: 10.0})
    times.observe(8, 50.0)
    assert (times.of(1), times.of(64)) == (10.0, 10.0)


@given(
    st.dictionaries(st.integers(1, 64), st.floats(0.01, 1e3), min_size=1),
    st.lists(st.tuples(st.integers(1, 512), st.floats(0, 1e4)), max_size=30),
    st.integers(1, 4000),
)
def test_times_beyond_all_measurements_are_never_less_than_any_of_them(
    measured_ms: dict[int, float], observed: list[tuple[int, float]], num_rows: int
) -> None:
    times = ForwardTimes(measured_ms)
    for rows, time_ms in observed:
        times.observe(rows, time_ms)
    # Learnt sizes are integer multiples of the largest measured one, so below 576.
    known = [times.of(rows) for rows in range(1, 576)]
    assert min(known) > 0
    assert times.of(575 + num_rows) >= max(known) * (1 - 1e-9)


def test_forwards_beyond_the_largest_measurement_are_learnt_at_their_own_size() -> None:
    times = ForwardTimes({1: 6.0, 32: 6.1})
    for _ in range(20):
        times.observe(60, 7.0)
    assert times.of(32) == 6.1
    assert times.of(64) == pytest.approx(7.0, rel=0.02)
    assert times.of(128) == pytest.approx(2 * times.of(64))


def test_the_first_forward_of_a_size_is_not_believed_if_it_is_a_hiccup() -> None:
    times = ForwardTimes({1: 6.0, 32: 6.1})
    times.observe(64, 500.0)
    assert times.of(64) == pytest.approx(12.2)


def test_a_size_that_is_cheaper_than_a_smaller_one_is_preferred() -> None:
    times = ForwardTimes({1: 20.0, 2: 22.0, 4: 18.0, 8: 25.0})
    assert num_worth([0.3, 0.01, 0.01, 0.01], times, overhead_ms=0.0) == 3


def test_times_follow_what_is_observed_and_a_hiccup_does_little() -> None:
    times = ForwardTimes({1: 20.0, 8: 40.0, 16: 30.0})
    for _ in range(200):
        times.observe(8, 22.0)
    assert times.of(8) == pytest.approx(22.0, abs=0.1)
    assert (times.of(1), times.of(16)) == (20.0, 30.0)
    times.observe(8, 500.0)
    assert times.of(8) < 23.5


def test_without_a_measurement_there_are_no_times() -> None:
    for wrong in ({}, {1: 0.0}, {0: 1.0}):
        with pytest.raises(ValueError, match="forward times must be positive"):
            ForwardTimes(wrong)


def test_free_rows_are_taken_however_improbable() -> None:
    assert num_worth([0.5, 0.1, 0.01], FLAT) == 3


def test_costly_rows_are_taken_only_by_probable_paths() -> None:
    times = ForwardTimes({1: 10.0, 2: 11.0, 33: 42.0})
    # One more row takes a tenth of the time, so it is worth it while it brings a tenth of the tokens.
    assert num_worth([0.9, 0.8, 0.05, 0.04], times, overhead_ms=0.0) == 2


def test_a_step_is_climbed_where_enough_waits_behind_it() -> None:
    probable, improbable = [0.95] * 14, [0.95] * 7 + [0.05] * 7
    assert num_worth(probable, FLAT, overhead_ms=0.0) == 14
    assert num_worth(improbable, FLAT, overhead_ms=0.0) == 7


def test_rows_that_a_forward_is_filled_up_with_cost_nothing() -> None:
    times = ForwardTimes({16: 5.0, 32: 5.5, 64: 8.0}, is_filled_up=True)
    assert [times.of(rows) for rows in (1, 16, 17, 32, 33, 64)] == [5.0, 5.0, 5.5, 5.5, 8.0, 8.0]
    # More rows than the largest size take several forwards.
    assert [times.of(rows) for rows in (65, 80, 128, 129, 160)] == [13.0, 13.0, 16.0, 21.0, 21.5]
    assert num_worth([0.9] * 5 + [1e-6] * 30, times, overhead_ms=0.0) == 15
    assert num_worth([0.9] * 5 + [1e-6] * 30, times, num_sharing=4, overhead_ms=0.0) == 7


def test_a_forward_of_one_size_is_learnt_for_all_rows_that_are_filled_up_to_it() -> None:
    times = ForwardTimes({128: 4.0}, is_filled_up=True)
    for _ in range(200):
        times.observe(3, 5.0)
    assert [times.of(rows) for rows in (1, 128, 129)] == pytest.approx([5.0, 5.0, 10.0], rel=0.01)
    for _ in range(200):
        times.observe(200, 8.0)
    assert times.of(1) == pytest.approx(4.0, rel=0.01)


def test_sessions_that_share_a_forward_take_fewer_rows_each() -> None:
    probabilities = [0.6, 0.4, 0.25, 0.15, 0.1, 0.06]
    times = ForwardTimes({1: 20.0, 8: 21.0, 64: 100.0})
    assert num_worth(probabilities, times, 1) > num_worth(probabilities, times, 8)


@given(
    st.lists(st.floats(0, 1), max_size=20).map(lambda values: sorted(values, reverse=True)),
    st.floats(0, 5),
    st.integers(1, 4),
)
def test_no_other_number_of_rows_brings_more(probabilities: list[float], overhead_ms: float, num_sharing: int) -> None:
    def rate(count: int) -> float:
        return (1 + sum(probabilities[:count])) / (FLAT.of(num_sharing * (1 + count)) + overhead_ms)

    count = num_worth(probabilities, FLAT, num_sharing, overhead_ms)
    assert rate(count) >= max(rate(other) for other in range(len(probabilities) + 1)) - 1e-12


NEAR = DraftTimings(latency_ms=2.0, forward_ms=10.0, accepted_per_chain=2.0, num_timeouts=0)
FAR = DraftTimings(latency_ms=42.0, forward_ms=10.0, accepted_per_chain=2.0, num_timeouts=0)
STUCK = DraftTimings(latency_ms=2.0, forward_ms=10.0, accepted_per_chain=2.0, num_timeouts=STUCK_AFTER_TIMEOUTS)


def test_off_never_waits() -> None:
    assert patience_ms(Waiting.NEVER, NEAR) == 0


def test_pearl_waits_for_a_near_drafter_and_not_for_a_far_one() -> None:
    assert NEAR.latency_ms is not None
    assert NEAR.latency_ms < patience_ms(Waiting.WORTH, NEAR) <= NEAR.forward_ms
    assert patience_ms(Waiting.WORTH, FAR) == 0


def test_what_is_never_accepted_is_not_waited_for() -> None:
    assert patience_ms(Waiting.WORTH, DraftTimings(2.0, 10.0, 0.1, 0)) == 0


def test_speculative_waits_for_a_far_drafter_too() -> None:
    assert FAR.latency_ms is not None
    assert patience_ms(Waiting.ALWAYS, FAR) > FAR.latency_ms


def test_nobody_waits_for_a_stuck_drafter() -> None:
    assert patience_ms(Waiting.ALWAYS, STUCK) == 0
    assert patience_ms(Waiting.WORTH, STUCK) == 0


def test_a_miss_is_worth_a_wait_below_the_critical_batch_and_none_from_there_on() -> None:
    # A wait of a fifth of a forward brings 2 - 0.2 tokens, and costs each of the others a fifth of 3 tokens.
    assert critical_batch(NEAR) == pytest.approx(1 + 1.8 / 0.6)
    for num_sessions in range(1, 9):
        waits = patience_ms(Waiting.BY_BATCH, replace(NEAR, num_sessions=num_sessions)) > 0
        assert waits == (num_sessions < 4)
        assert patience_ms(Waiting.WORTH, replace(NEAR, num_sessions=num_sessions)) > 0


def test_the_critical_batch_falls_as_drafts_come_later_and_counts_no_more_than_others_are_held() -> None:
    batches = [critical_batch(replace(NEAR, latency_ms=latency_ms)) for latency_ms in (0.5, 1.0, 2.0, 4.0, 8.0)]
    assert batches == sorted(batches, reverse=True)
    assert critical_batch(FAR) < 1, "it brings less than it costs the session itself"
    assert critical_batch(replace(NEAR, latency_ms=8.0)) == pytest.approx(1 + (2 - 0.8) / (HOLD_SHARE * 3))
    assert critical_batch(replace(NEAR, forward_ms=0.0)) == math.inf


def test_an_unknown_drafter_gets_a_chance() -> None:
    assert patience_ms(Waiting.WORTH, DraftTimings(None, 10.0, 1.0, 0)) > 0
