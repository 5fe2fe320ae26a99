"""What an engine measures as a round's cost besides its forward."""

from __future__ import annotations

from outrider.core.costs import ForwardTimes
from outrider.rounds.timings import FIRST_OVERHEAD_MS, Activity, EngineTimings


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
