"""Tests one direction of a link, with a clock and random numbers that the test controls."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from outrider_cli.links.direction import BadSetting, LinkDirection, LinkSettings, settings_from

PACKET = 1250
"""10 000 bits: 10 ms at a megabit a second."""


def a_direction(
    *, rate_mbit: float = 0.0, max_queue_s: float = math.inf, seed: int = 0, **settings: float
) -> LinkDirection:
    direction = LinkDirection(random.Random(seed).random, max_queue_s)
    direction.use(LinkSettings(**settings), rate_mbit)
    return direction


def test_jitter_stays_within_its_bound_and_varies() -> None:
    direction = a_direction(delay_ms=20, jitter_ms=5)
    late = [(direction.enter(float(now), PACKET) or 0.0) - now for now in range(500)]
    assert min(late) >= 0.02
    assert max(late) < 0.025
    assert max(late) - min(late) > 0.004


def test_a_shorter_delay_does_not_overtake_what_is_on_its_way() -> None:
    direction = a_direction(delay_ms=100)
    first = direction.enter(1.0, PACKET)
    direction.use(LinkSettings(delay_ms=1), 0.0)
    assert direction.enter(1.01, PACKET) == first
    assert direction.enter(1.2, PACKET) == pytest.approx(1.201)


def test_bytes_take_the_time_that_the_rate_gives_them_one_after_the_other() -> None:
    direction = a_direction(rate_mbit=1, delay_ms=20)
    assert [direction.enter(1.0, PACKET) for _ in range(3)] == pytest.approx([1.03, 1.04, 1.05])
    assert direction.enter(2.0, PACKET) == pytest.approx(2.03)  # an idle direction saves nothing up


def test_a_rate_that_is_lifted_holds_nothing_back() -> None:
    direction = a_direction(rate_mbit=0.001)
    direction.enter(1.0, PACKET)
    direction.use(LinkSettings(), 0.0)
    assert direction.enter(100.0, PACKET) == 100.0


def test_what_would_wait_too_long_is_lost_and_delays_nobody() -> None:
    direction = a_direction(rate_mbit=1, max_queue_s=0.025)
    came = [direction.enter(1.0, PACKET) for _ in range(5)]
    assert came[:3] == pytest.approx([1.01, 1.02, 1.03])
    assert came[3:] == [None, None]
    assert (direction.num_bytes, direction.num_lost) == (3 * PACKET, 2)


def test_as_many_are_lost_as_was_said() -> None:
    direction = a_direction(loss=0.1)
    for now in range(10_000):
        direction.enter(float(now), PACKET)
    assert 900 < direction.num_lost < 1100
    assert direction.num_bytes == (10_000 - direction.num_lost) * PACKET


def test_a_direction_with_a_seed_does_the_same_again() -> None:
    runs = []
    for _ in range(2):
        direction = a_direction(loss=0.2, jitter_ms=5, seed=7)
        runs.append([direction.enter(float(now), 1) for now in range(50)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delay_ms": -1}, "delay_ms must be >= 0, a number, got -1"),
        ({"jitter_ms": math.nan}, "jitter_ms must be >= 0, a number, got nan"),
        ({"rate_up_mbit": "fast"}, "rate_up_mbit must be >= 0, a number, got 'fast'"),
        ({"loss": 1.5}, r"loss must be in \[0, 1\], got 1.5"),
        ({"speed": 1}, "speed is no setting"),
    ],
)
def test_a_wrong_setting_is_named_with_its_rule(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting, match=f"^{message}"):
        settings_from(LinkSettings(), settings)


def test_a_change_leaves_all_other_settings_as_they_are() -> None:
    known = LinkSettings(delay_ms=20, loss=0.5)
    assert settings_from(known, {"loss": 0}) == LinkSettings(delay_ms=20)
