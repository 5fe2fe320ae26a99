"""Waiting policies: the target waits only while that pays."""

from __future__ import annotations

from outrider.core.params import Method
from outrider.core.patience import STUCK_AFTER_TIMEOUTS, DraftPace, patience_ms

NEAR = DraftPace(latency_ms=2.0, forward_ms=10.0, accepted_per_chain=2.0, num_timeouts=0)
FAR = DraftPace(latency_ms=42.0, forward_ms=10.0, accepted_per_chain=2.0, num_timeouts=0)
STUCK = DraftPace(latency_ms=2.0, forward_ms=10.0, accepted_per_chain=2.0, num_timeouts=STUCK_AFTER_TIMEOUTS)


def test_off_never_waits() -> None:
    assert patience_ms(Method.OFF, NEAR) == 0


def test_pearl_waits_for_a_near_drafter_and_not_for_a_far_one() -> None:
    assert NEAR.latency_ms is not None
    assert NEAR.latency_ms < patience_ms(Method.PEARL, NEAR) <= NEAR.forward_ms
    assert patience_ms(Method.PEARL, FAR) == 0


def test_what_is_never_accepted_is_not_waited_for() -> None:
    assert patience_ms(Method.PEARL, DraftPace(2.0, 10.0, 0.1, 0)) == 0


def test_speculative_waits_for_a_far_drafter_too() -> None:
    assert FAR.latency_ms is not None
    assert patience_ms(Method.SPECULATIVE, FAR) > FAR.latency_ms


def test_nobody_waits_for_a_stuck_drafter() -> None:
    assert patience_ms(Method.SPECULATIVE, STUCK) == 0
    assert patience_ms(Method.PEARL, STUCK) == 0


def test_an_unknown_drafter_gets_a_chance() -> None:
    assert patience_ms(Method.PEARL, DraftPace(None, 10.0, 1.0, 0)) > 0
