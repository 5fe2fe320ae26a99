"""What an engine takes a round to cost beside its forward."""

from __future__ import annotations

import pytest

from outrider.core.costs import ForwardTimes
from outrider.verifier.timings import FIRST_OVERHEAD_MS, Activity, EngineTimings


def timings_of(num_sessions: int) -> EngineTimings:
    timings = EngineTimings(ForwardTimes({1: 5.0, 201: 7.0}))
    timings.set_sessions([Activity.DRAFTING] * num_sessions)
    return timings


def test_until_an_activity_is_known_it_costs_what_a_lesser_one_does() -> None:
    timings = timings_of(2)
    assert timings.overhead_ms(Activity.DRAFTING) == FIRST_OVERHEAD_MS
    timings.add_overhead(3.0)
    assert timings.overhead_ms(Activity.DRAFTING) == 3.0
    assert timings.overhead_ms(Activity.RETRIEVING) == FIRST_OVERHEAD_MS


def test_the_forward_of_others_that_a_round_has_waited_for_is_no_overhead() -> None:
    timings = timings_of(2)
    # 50 rows take 5.5 ms and 101 take 6: the rest of what others took is overhead, as all rows could be one forward.
    timings.set_others(50, 51, 5.5)
    timings.add_overhead(5.7)
    assert timings.overhead_ms(Activity.DRAFTING) == pytest.approx(5.7 - (6.0 - 5.5), abs=0.02)
    timings = timings_of(2)
    timings.set_others(50, 51, 5.5)
    timings.set_others(50, 0, 5.5)
    timings.add_overhead(5.7)
    assert timings.overhead_ms(Activity.DRAFTING) == 5.7
