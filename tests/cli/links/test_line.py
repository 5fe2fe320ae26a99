"""What one direction of a link does, by a clock and a chance that the test holds in its hands."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from outrider_cli.links.line import BadSetting, LinkDirection, LinkSettings, settings_from

PACKET = 1250
"""10 000 bits: 10 ms at a megabit a second."""


def a_line(*, rate_mbit: float = 0.0, max_queue_s: float = math.inf, seed: int = 0, **settings: float) -> LinkDirection:
    line = LinkDirection(random.Random(seed).random, max_queue_s)
    line.use(LinkSettings(**settings), rate_mbit)
    return line


def test_a_line_without_settings_lets_everything_through_at_once() -> None:
    assert a_line().enter(5.0, PACKET) == 5.0


def test_a_delay_is_the_same_for_everything() -> None:
    line = a_line(delay_ms=20)
    assert [line.enter(now, PACKET) for now in (1.0, 1.001, 7.0)] == pytest.approx([1.02, 1.021, 7.02])


def test_jitter_stays_within_its_bound_and_varies() -> None:
    line = a_line(delay_ms=20, jitter_ms=5)
    late = [(line.enter(float(now), PACKET) or 0.0) - now for now in range(500)]
    assert min(late) >= 0.02
    assert max(late) < 0.025
    assert max(late) - min(late) > 0.004


def test_jitter_never_reorders() -> None:
    line = a_line(jitter_ms=50)
    due = [line.enter(now / 1000, PACKET) or 0.0 for now in range(500)]
    assert due == sorted(due)


def test_a_shorter_delay_does_not_overtake_what_is_on_its_way() -> None:
    line = a_line(delay_ms=100)
    first = line.enter(1.0, PACKET)
    line.use(LinkSettings(delay_ms=1), 0.0)
    assert line.enter(1.01, PACKET) == first
    assert line.enter(1.2, PACKET) == pytest.approx(1.201)


def test_bytes_take_the_time_that_the_rate_gives_them_one_after_the_other() -> None:
    line = a_line(rate_mbit=1, delay_ms=20)
    assert [line.enter(1.0, PACKET) for _ in range(3)] == pytest.approx([1.03, 1.04, 1.05])
    assert line.enter(2.0, PACKET) == pytest.approx(2.03)  # a line that has been idle has saved nothing up


def test_a_rate_that_is_lifted_holds_nothing_back() -> None:
    line = a_line(rate_mbit=0.001)
    line.enter(1.0, PACKET)
    line.use(LinkSettings(), 0.0)
    assert line.enter(100.0, PACKET) == 100.0


def test_what_would_wait_too_long_is_lost_and_delays_nobody() -> None:
    line = a_line(rate_mbit=1, max_queue_s=0.025)
    came = [line.enter(1.0, PACKET) for _ in range(5)]
    assert came[:3] == pytest.approx([1.01, 1.02, 1.03])
    assert came[3:] == [None, None]
    assert (line.num_bytes, line.num_lost) == (3 * PACKET, 2)


def test_as_many_are_lost_as_was_said() -> None:
    line = a_line(loss=0.1)
    for now in range(10_000):
        line.enter(float(now), PACKET)
    assert 900 < line.num_lost < 1100
    assert line.num_bytes == (10_000 - line.num_lost) * PACKET


def test_a_line_with_a_seed_does_the_same_again() -> None:
    runs = []
    for _ in range(2):
        line = a_line(loss=0.2, jitter_ms=5, seed=7)
        runs.append([line.enter(float(now), 1) for now in range(50)])
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
