"""Waiting policies: the target waits only while that pays."""

from __future__ import annotations

import pytest

from outrider.core.costs import STUCK_AFTER_TIMEOUTS, DraftTimings, Waiting, patience_ms, waiting_of
from outrider.core.params import DoubleParams, Fallback, Method, SaguaroParams, SpeculationParams

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


def test_an_unknown_drafter_gets_a_chance() -> None:
    assert patience_ms(Waiting.WORTH, DraftTimings(None, 10.0, 1.0, 0)) > 0


def test_only_draft_then_verify_waits_whatever_a_draft_is_worth() -> None:
    params = SpeculationParams(Method.PEARL)
    waiting = {method: waiting_of(method, params) for method in Method}
    assert waiting[Method.OFF] is Waiting.NEVER
    assert waiting[Method.SPECULATIVE] is Waiting.ALWAYS
    assert all(waiting[method] is Waiting.WORTH for method in (Method.PEARL, Method.CARD, Method.BEST_FIRST))


@pytest.mark.parametrize(
    ("fallback", "expected"),
    [
        (Fallback.AUTO, Waiting.WORTH),
        (Fallback.DRAFT, Waiting.ALWAYS),
        (Fallback.RETRIEVAL, Waiting.NEVER),
        (Fallback.PLAIN, Waiting.NEVER),
    ],
)
def test_saguaros_fallback_says_what_a_miss_is_worth(fallback: Fallback, expected: Waiting) -> None:
    params = SpeculationParams(Method.SAGUARO, saguaro=SaguaroParams(fallback=fallback))
    assert waiting_of(Method.SAGUARO, params) is expected


def test_draft_and_target_take_turns_where_double_is_serial() -> None:
    params = SpeculationParams(Method.DOUBLE, double=DoubleParams(serial=True))
    assert waiting_of(Method.DOUBLE, params) is Waiting.ALWAYS
    assert waiting_of(Method.DOUBLE, SpeculationParams(Method.DOUBLE)) is Waiting.WORTH
