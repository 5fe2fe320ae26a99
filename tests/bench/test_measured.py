"""What the methods' suite makes of generations: ratios, rates, rows, and the replay's numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_bench.measured import Measured
from outrider_bench.suites.methods.replay import NEAR, analyse
from tests.bench.experiment_samples import made, ran, replayed


def test_a_ratio_is_the_median_of_the_repeats_on_what_both_have_finished() -> None:
    blocks = []
    for repeat, seconds in enumerate((10.0, 5.0, 2.0)):
        blocks += [ran("off", 0.0, made(10.0), repeat=repeat), ran("pearl", 0.0, made(seconds), repeat=repeat)]
    # A second prompt that only one of them has finished must count for neither.
    blocks += [ran("off", 0.0, made(1000.0), prompt=1), ran("pearl", 0.0, None, prompt=1)]
    measured = Measured({"e": blocks})
    assert measured.ratio("e", "pearl", "off", 0.0) == 2.0
    assert measured.speedup("e", "pearl", 0.0) == 2.0
    assert measured.ratio("e", "off", "pearl", 0.0) == 0.5
    assert measured.speedup("e", "pearl", 0.7) is None
    assert measured.speedup("e", "card", 0.0) is None
    assert measured.speedup("other", "pearl", 0.0) is None


def test_a_ratio_can_be_asked_for_one_kind_of_prompts() -> None:
    blocks = [
        ran(label, 0.0, made(seconds[kind]), prompt=kind, category=("prose", "code")[kind])
        for label, seconds in (("off", (10.0, 10.0)), ("auto", (10.0, 2.0)))
        for kind in (0, 1)
    ]
    measured = Measured({"e": blocks})
    assert measured.speedup("e", "auto", 0.0, "prose") == 1.0
    assert measured.speedup("e", "auto", 0.0, "code") == 5.0


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=5))
def test_a_ratio_and_its_reverse_are_one_for_an_odd_number_of_repeats(pairs: list[tuple[float, float]]) -> None:
    pairs = pairs[: len(pairs) - 1 + len(pairs) % 2]
    blocks = [
        block
        for repeat, (ours, theirs) in enumerate(pairs)
        for block in (ran("a", 0.0, made(ours), repeat=repeat), ran("b", 0.0, made(theirs), repeat=repeat))
    ]
    measured = Measured({"e": blocks})
    forward, back = measured.ratio("e", "a", "b", 0.0), measured.ratio("e", "b", "a", 0.0)
    assert forward is not None
    assert back is not None
    assert forward * back == pytest.approx(1)


def test_rates_are_over_all_rounds_of_all_prompts() -> None:
    rounds = {"num_drafted": 20, "num_accepted": 6, "num_judged": 8, "num_hits": 4}
    more = {"num_drafted": 20, "num_accepted": 18, "num_judged": 22, "num_hits": 9}
    measured = Measured({"e": [ran("card", 1.0, made(1.0, **rounds)), ran("card", 1.0, made(1.0, **more), prompt=1)]})
    assert measured.tokens_per_forward("e", "card", 1.0) == pytest.approx(1 + 24 / 20)
    assert measured.acceptance("e", "card", 1.0) == pytest.approx(24 / 30)
    assert measured.hit_rate("e", "card", 1.0) == pytest.approx(13 / 20)
    assert measured.hit_rate("e", "card", 0.0) is None


def test_rows_have_what_the_suite_adds_to_them() -> None:
    rounds: dict[str, Any] = {"num_drafted": 9, "num_accepted": 6, "num_judged": 8, "decisions": {"pearl": 7}}
    blocks = [
        ran("auto", 1.0, made(1.0, **rounds, accepted_by_source={"draft": 4, "ring": 2}), prompt=p) for p in (0, 1)
    ]
    [row] = Measured({"e": blocks}).rows("e", num_prompts=2, repeats=1)
    assert row["acceptance"] == 0.75
    assert row["accepted_by_source"] == {"draft": 8, "ring": 4}
    assert row["decisions"] == {"pearl": 14}
    assert not row["partial"]


def test_off_is_not_partial_where_it_was_to_take_part_in_few_prompts() -> None:
    blocks = replayed([1.0] * 4, off_at=[0, 2])
    flags = [
        {row["method"]: row["partial"] for row in Measured({"e": blocks[:count]}).rows("e", 4, 1, num_off=2)}
        for count in (len(blocks), 3)
    ]
    assert flags == [{"spacelike": False, "off": False}, {"spacelike": True, "off": True}]


def test_a_replay_gets_faster() -> None:
    seconds = [10.0] * 20 + [8.0] * 20 + [5.0] * 18 + [2.0] * 2
    found = analyse(replayed(seconds, off_at=[0, 1, 2, 30, 45], near=[58, 59]), 60, num_cold=3)
    assert found is not None
    assert found.cold == pytest.approx(1.0)
    assert found.last_third == pytest.approx(200 / 94)
    assert found.near == pytest.approx(5.0)
    assert [number for number, _ in found.points] == [20, 40, 60]
    assert [speedup for _, speedup in found.points] == pytest.approx([1.0, 1.25, 200 / 94])
    assert found.requests[59][:2] == (59, NEAR)
    assert found.requests[59][2] == pytest.approx(5.0)


def test_the_time_of_off_is_that_of_its_own_third_of_the_replay() -> None:
    blocks = replayed([10.0] * 30, off_at=[0, 15, 25])
    slower = [
        replace(block, samples=(replace(block.samples[0], generation=made(20.0)),))
        if block.condition.method == "off" and block.samples[0].prompt_index == 25
        else block
        for block in blocks
    ]
    found = analyse(slower, 30, num_cold=1)
    assert found is not None
    assert found.last_third == pytest.approx(2.0)
    assert found.cold == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("seconds", "off_at"),
    [([10.0] * 29, [0, 15, 25]), ([10.0] * 30, [15, 25]), ([10.0] * 30, [0, 15])],
)
def test_a_replay_that_did_not_come_to_its_end_has_no_numbers(seconds: list[float], off_at: list[int]) -> None:
    assert analyse(replayed(seconds, off_at=off_at), 30, num_cold=1) is None
