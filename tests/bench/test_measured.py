"""What the methods' suite makes of generations: ratios, rates, rows, and the replay's numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_bench.measured import Measured
from outrider_bench.samples import Block, Condition, Sample
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
    rounds = {"num_drafted": 20, "num_accepted": 6, "num_judged": 8, "num_hits": 4, "num_ready_hits": 2}
    more = {"num_drafted": 20, "num_accepted": 18, "num_judged": 22, "num_hits": 9, "num_ready_hits": 8}
    measured = Measured({"e": [ran("card", 1.0, made(1.0, **rounds)), ran("card", 1.0, made(1.0, **more), prompt=1)]})
    assert measured.tokens_per_forward("e", "card", 1.0) == pytest.approx(1 + 24 / 20)
    assert measured.acceptance("e", "card", 1.0) == pytest.approx(24 / 30)
    assert measured.hit_rate("e", "card", 1.0) == pytest.approx(13 / 20)
    assert measured.hit_rate("e", "card", 0.0) is None
    assert measured.ready_hit_rate("e", "card", 1.0) == pytest.approx(10 / 20)
    uncounted = Measured({"e": [ran("card", 1.0, made(1.0, **rounds)), ran("card", 1.0, made(1.0), prompt=1)]})
    assert uncounted.ready_hit_rate("e", "card", 1.0) == pytest.approx(2 / 10), "of the rounds where they are counted"


def test_what_a_source_gave_is_of_all_tokens() -> None:
    sources = ({"prior": 4, "ring": 2, "draft": 9}, {"prior": 1})
    blocks = [ran("double", 1.0, made(1.0, accepted_by_source=each), prompt=p) for p, each in enumerate(sources)]
    measured = Measured({"e": blocks})
    assert measured.accepted_from("e", "double", 1.0, ("prior", "ring")) == pytest.approx(7 / 200)
    assert measured.accepted_from("e", "double", 0.0, ("prior",)) is None


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


def drawn_values(blocks: list[Block], value: Any, num_draws: int = 200) -> set[float]:
    """What a value becomes with other prompts."""
    random = np.random.default_rng(0)
    return {value(Measured({"e": blocks}).resampled(random)) for _ in range(num_draws)}


def test_a_draw_of_prompts_holds_for_both_sides_of_a_ratio() -> None:
    # Prompts differ a lot, the two contenders never: drawn apart they would.
    blocks = [ran(label, 0.0, made(2.0**p), prompt=p) for label in ("off", "pearl") for p in range(6)]
    assert drawn_values(blocks, lambda one: one.speedup("e", "pearl", 0.0)) == {1.0}
    assert len(drawn_values(blocks, lambda one: one.throughput("e", "pearl", 0.0))) > 10


def test_a_draw_holds_for_all_experiments_with_the_same_prompts() -> None:
    times = {"here": 1.0, "there": 3.0}
    blocks = {
        name: [ran("auto", 0.0, made(factor * 2.0**p), prompt=p) for p in range(6)] for name, factor in times.items()
    }
    random = np.random.default_rng(0)
    for _ in range(20):
        drawn = Measured(blocks).resampled(random)
        assert drawn.kept("there", "here", "auto", 0.0) == pytest.approx(1 / 3)
        here, there = (drawn.throughput(name, "auto", 0.0) for name in times)
        assert there == pytest.approx(here / 3)


def test_prompts_are_drawn_among_their_own_kind() -> None:
    blocks = [
        ran(label, 0.0, made(seconds), prompt=p, category=("prose", "code")[p % 2])
        for p in range(6)
        for label, seconds in (("off", 10.0), ("auto", 5.0 if p % 2 else 10.0))
    ]
    # Whatever is drawn, half of it is code: 6 * 10 seconds by 3 * 10 + 3 * 5.
    assert drawn_values(blocks, lambda one: round(one.speedup("e", "auto", 0.0), 9)) == {round(4 / 3, 9)}
    assert drawn_values(blocks, lambda one: one.speedup("e", "auto", 0.0, "code")) == {2.0}


def test_rates_and_first_tokens_count_a_prompt_as_often_as_it_is_drawn() -> None:
    blocks = [
        ran("card", 1.0, made(1.0, num_drafted=20, num_accepted=6 * p, num_judged=20, num_hits=p), prompt=p)
        for p in range(3)
    ]
    for value, size in (
        (lambda one: one.tokens_per_forward("e", "card", 1.0), 1.0),
        (lambda one: one.acceptance("e", "card", 1.0), 0.0),
        (lambda one: one.hit_rate("e", "card", 1.0), 0.0),
    ):
        found = drawn_values(blocks, value)
        # All three of the first prompt, all three of the last one, and everything between.
        assert min(found) == size
        assert len(found) == 7
    slow = [ran("card", 1.0, made(float(p + 1)), prompt=p) for p in range(3)]
    assert drawn_values(slow, lambda one: one.first_token_s("e", "card", 1.0)) == {1.0, 2.0, 3.0}


def test_one_prompt_of_a_kind_cannot_vary() -> None:
    one = [ran("off", 0.0, made(1.0), prompt=p, category=("prose", "code")[p]) for p in range(2)]
    assert not Measured({"e": one}).can_vary
    assert Measured({"e": [*one, ran("off", 0.0, made(1.0), prompt=2)]}).can_vary


def at_once(label: str, seconds: float, *, repeat: int = 0, concurrency: int = 2, failed: bool = False) -> Block:
    """A turn in which two generations of 100 tokens share the machine."""
    method, _, setting = label.partition(" ")
    condition = Condition(method, setting, 0.7, concurrency)
    samples = [Sample(condition, repeat, p, "code", made(0.9 * seconds)) for p in range(2)]
    if failed:
        samples[1] = replace(samples[1], generation=None, error="INTERNAL: no")
    return Block(condition, repeat, seconds, tuple(samples))


def test_generations_at_once_are_compared_by_the_time_of_all_of_them() -> None:
    blocks = [
        at_once(label, seconds, repeat=repeat)
        for repeat, pearl in enumerate((5.0, 4.0, 2.0))
        for label, seconds in (("off", 10.0), ("pearl", pearl))
    ]
    blocks += [at_once("off", 10.0, concurrency=4), at_once("pearl", 20.0, concurrency=4)]
    measured = Measured({"e": blocks})
    assert measured.batch_ratio("e", "pearl", "off", 0.7, 2) == 2.5
    assert measured.batch_ratio("e", "pearl", "off", 0.7, 4) == 0.5
    assert measured.batch_ratio("e", "pearl", "off", 0.7, 8) is None
    assert measured.batch_ratio("e", "card", "off", 0.7, 2) is None
    # They have no times of their own, so nothing else is said about them.
    assert measured.speedup("e", "pearl", 0.7) is None


def test_a_repeat_in_which_one_of_them_failed_is_no_speed() -> None:
    blocks = [at_once("off", 10.0), at_once("pearl", 1.0, failed=True)]
    blocks += [at_once("off", 10.0, repeat=1), at_once("pearl", 5.0, repeat=1)]
    assert Measured({"e": blocks}).batch_ratio("e", "pearl", "off", 0.7, 2) == 2.0


def test_repeats_are_drawn_where_generations_share_the_machine() -> None:
    blocks = [
        at_once(label, seconds, repeat=repeat)
        for repeat, pearl in enumerate((5.0, 4.0, 2.0))
        for label, seconds in (("off", 10.0), ("pearl", pearl))
    ]
    found = drawn_values(blocks, lambda one: one.batch_ratio("e", "pearl", "off", 0.7, 2))
    assert found == {2.0, 2.5, 5.0}


def test_prompts_are_drawn_for_what_ran_alone_though_others_ran_at_once() -> None:
    alone = [ran(label, 0.7, made(t), prompt=p) for label in ("off", "pearl") for p, t in enumerate((1.0, 9.0))]
    several = [at_once("off", 10.0), at_once("pearl", 5.0)]
    found = drawn_values([*alone, *several], lambda one: one.throughput("e", "pearl", 0.7))
    assert len(found) == 3  # both prompts, or one of them twice
    assert drawn_values([*alone, *several], lambda one: one.batch_ratio("e", "pearl", "off", 0.7, 2)) == {2.0}


def test_rows_of_different_loads_have_their_own_numbers() -> None:
    alone = ran("pearl", 0.7, made(1.0, num_judged=10, num_accepted=9))
    rows = Measured({"e": [alone, at_once("pearl", 1.0)]}).rows("e", num_prompts=2, repeats=1)
    assert {row["concurrency"]: row["acceptance"] for row in rows} == {1: 0.9, 2: None}


def test_the_fastest_of_several_is_named() -> None:
    blocks = [ran(label, 0.0, made(seconds)) for label, seconds in (("off", 10.0), ("card a", 5.0), ("card b", 4.0))]
    measured = Measured({"e": blocks})
    assert measured.the_best("e", ["card a", "card b", "card c"], "off", 0.0) == (2.5, "best: card b")
    assert measured.the_best("e", ["card c"], "off", 0.0) == (None, "")


def test_every_finished_generation_is_kept_by_prompt_and_repeat() -> None:
    blocks = [ran("off", 0.0, made(2.0), prompt=1, repeat=2), ran("off", 0.0, None), at_once("pearl", 4.0)]
    kept = Measured({"e": blocks}).generations("e")
    assert {len(column) for column in kept.values()} == {3}
    assert (kept["contender"], kept["concurrency"]) == (["off", "pearl", "pearl"], [1, 2, 2])
    assert (kept["repeat"], kept["prompt"]) == ([2, 0, 0], [1, 0, 1])
    assert (kept["output_tokens"], kept["duration_s"], kept["turn_s"]) == ([100] * 3, [2.0, 3.6, 3.6], [2.0, 4.0, 4.0])


def test_a_replay_of_drawn_requests_keeps_its_kinds_together() -> None:
    seconds = [10.0] * 20 + [8.0] * 20 + [5.0] * 18 + [2.0, 2.0]
    blocks = replayed(seconds, off_at=[0, 1, 2, 30, 45], near=[58, 59])
    random = np.random.default_rng(0)
    draws = [analyse(blocks, 60, 3, random) for _ in range(50)]
    assert {one.cold for one in draws if one} == {1.0}
    assert {one.near for one in draws if one} == {5.0}
    assert {round(one.last_third, 9) for one in draws if one} == {round(200 / 94, 9)}
    varied = replayed([10.0] * 40 + [float(number) for number in range(1, 21)], off_at=[0, 30, 45])
    assert len({one.last_third for one in (analyse(varied, 60, 1, random) for _ in range(50)) if one}) > 10
