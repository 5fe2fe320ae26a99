"""The controller of `Method.AUTO`, round by round."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.auto.controller import SECOND_TRIED_AFTER, Controller
from outrider.core.auto.history import Strategy, StrategyHistory, TemperatureClass
from outrider.core.params import Method, Rows
from tests.core.auto.simulated_costs import (
    BEST_FIRST,
    DOUBLE,
    OFF,
    PEARL,
    PLAIN_MS,
    RETRIEVAL,
    WAYS,
)


def _controller(experience: StrategyHistory | None = None, ways: tuple[Strategy, ...] = WAYS) -> Controller:
    return Controller(experience or StrategyHistory(PLAIN_MS), 0.0, ways)


def _go(controller: Controller, num_rounds: int, num_tokens: int, round_ms: float) -> list[Strategy]:
    """So many equal rounds, whatever the way; only plain ones are plain."""
    ways = []
    for _ in range(num_rounds):
        ways.append(controller.way())
        if ways[-1] == OFF:
            controller.observe(1, PLAIN_MS)
        else:
            controller.observe(num_tokens, round_ms)
    return ways


class TestGuard:
    @pytest.mark.parametrize("slowdown", [1.15, 1.25, 3.0])
    def test_the_first_session_leaves_a_way_that_is_worse_than_off_within_eight_rounds(self, slowdown: float) -> None:
        ways = _go(_controller(), 9, 1, slowdown * PLAIN_MS)
        assert ways[0] == BEST_FIRST
        assert ways[-1] in (OFF, RETRIEVAL)

    def test_later_sessions_do_not_begin_with_it(self) -> None:
        experience = StrategyHistory(PLAIN_MS)
        _go(_controller(experience), 9, 1, 1.2 * PLAIN_MS)
        assert _controller(experience).way() in (OFF, RETRIEVAL)

    def test_a_way_that_is_better_than_off_is_not_left_for_a_hiccup(self) -> None:
        controller = _controller()
        _go(controller, 4, 3, 1.2 * PLAIN_MS)
        _go(controller, 1, 1, 20 * PLAIN_MS)
        assert controller.way() == BEST_FIRST

    def test_an_established_way_that_stalls_is_left_after_two_rounds(self) -> None:
        experience = StrategyHistory(PLAIN_MS)
        controller = _controller(experience, (BEST_FIRST, OFF))
        _go(controller, 200, 4, 1.2 * PLAIN_MS)
        assert _go(controller, 3, 1, 10 * PLAIN_MS) == [BEST_FIRST, BEST_FIRST, OFF]

    def test_what_stalls_is_not_left_for_another_way_with_the_same_speculator(self) -> None:
        experience = StrategyHistory(PLAIN_MS)
        pearl = experience.record(PEARL, TemperatureClass.GREEDY)
        controller = _controller(experience, (BEST_FIRST, PEARL, OFF))
        _go(controller, 100, 4, 1.2 * PLAIN_MS)
        for _ in range(100):
            experience.count(pearl, TemperatureClass.GREEDY, 4, 1.25, True)
        _go(controller, 2, 1, 10 * PLAIN_MS)
        assert controller.way() == OFF


class TestProbes:
    def test_the_first_way_is_the_first_preference_and_no_other_is_tried_for_a_few_hundred_rounds(self) -> None:
        for ways in (WAYS, (OFF, PEARL, BEST_FIRST)):
            expected = next(way for way in ways if way != OFF)
            ways_gone = _go(_controller(ways=ways), SECOND_TRIED_AFTER, 2, 1.2 * PLAIN_MS)
            assert set(ways_gone) == {expected}

    @pytest.mark.parametrize("slowdown", [1.05, 1.1, 1.2])
    def test_the_second_preference_is_tried_soon_if_the_first_is_worse_than_off(self, slowdown: float) -> None:
        controller = _controller(ways=(BEST_FIRST, PEARL, OFF))
        assert PEARL in _go(controller, 100, 1, slowdown * PLAIN_MS)

    def test_a_probe_that_falls_far_behind_is_given_up_after_two_rounds(self) -> None:
        controller = _controller(ways=(BEST_FIRST, PEARL, OFF))
        _go(controller, SECOND_TRIED_AFTER, 4, 1.2 * PLAIN_MS)
        while (way := controller.way()) == BEST_FIRST:
            controller.observe(4, 1.2 * PLAIN_MS)
        assert way == PEARL
        ways = _go(controller, 3, 1, 10 * PLAIN_MS)
        assert ways == [PEARL, PEARL, BEST_FIRST]

    def test_sessions_probe_at_different_places(self) -> None:
        def first_probe(number: int) -> int:
            experience = StrategyHistory(PLAIN_MS)
            _go(_controller(experience), SECOND_TRIED_AFTER, 2, 1.2 * PLAIN_MS)
            controller = Controller(experience, 0.0, WAYS, number)
            return _go(controller, 60, 2, 1.2 * PLAIN_MS).index(PEARL)

        assert len({first_probe(number) for number in range(8)}) > 1


class TestAttribution:
    def test_the_first_round_after_a_switch_does_not_count_for_the_way(self) -> None:
        experience = StrategyHistory(PLAIN_MS)
        controller = _controller(experience)
        assert _go(controller, 1, 1, 4 * PLAIN_MS) == [BEST_FIRST]
        _go(controller, 9, 3, 1.2 * PLAIN_MS)
        assert experience.record(BEST_FIRST, TemperatureClass.GREEDY).evidence.rate == pytest.approx(3 / 1.2)

    def test_a_way_whose_rounds_are_now_short_and_now_long_is_judged_by_its_whole_time(self) -> None:
        controller = _controller(ways=(PEARL, OFF))
        for number in range(100):
            controller.way()
            controller.observe(1, PLAIN_MS * (0.2 if number % 2 else 3.0))
        assert controller.decisions()[0].num_rounds <= 30

    def test_classes_of_temperatures_are_learnt_apart(self) -> None:
        experience = StrategyHistory(PLAIN_MS)
        _go(_controller(experience), 20, 1, 1.3 * PLAIN_MS)
        assert Controller(experience, 0.0, WAYS).way() != BEST_FIRST
        assert Controller(experience, 0.8, WAYS).way() == BEST_FIRST
        assert Controller(experience, 0.9, WAYS).way() == BEST_FIRST
        assert [TemperatureClass.of(t).name for t in (0.0, 0.7, 0.85, 1.5)] == ["GREEDY", "LOW", "HIGH", "HIGH"]

    def test_a_higher_load_does_not_change_what_is_known(self) -> None:
        experience = StrategyHistory(PLAIN_MS)
        _go(_controller(experience), 100, 3, 1.2 * PLAIN_MS)
        record = experience.record(BEST_FIRST, TemperatureClass.GREEDY)
        rate = record.evidence.rate
        experience.plain_ms = 4 * PLAIN_MS
        _go(_controller(experience), 100, 3, 4 * 1.2 * PLAIN_MS)
        assert record.evidence.rate == pytest.approx(rate)


class TestAvailability:
    DRAFTED = (BEST_FIRST, PEARL, DOUBLE)

    def test_what_is_not_available_is_not_gone(self) -> None:
        controller = _controller()
        controller.set_available([RETRIEVAL, OFF])
        assert not set(_go(controller, 400, 1, PLAIN_MS)) & set(self.DRAFTED)

    def test_a_lost_speculator_ends_its_ways_at_once_and_its_return_brings_them_back(self) -> None:
        controller = _controller()
        _go(controller, 50, 4, 1.2 * PLAIN_MS)
        controller.set_available([RETRIEVAL, OFF])
        assert controller.way() not in self.DRAFTED
        _go(controller, 5, 1, PLAIN_MS)
        controller.set_available(WAYS)
        assert controller.way() == BEST_FIRST

    def test_a_speculator_that_comes_late_is_used_at_once(self) -> None:
        controller = _controller()
        controller.set_available([RETRIEVAL, OFF])
        _go(controller, 2, 1, PLAIN_MS)
        controller.set_available(WAYS)
        assert controller.way() == BEST_FIRST

    def test_speculators_that_come_late_in_each_session_do_not_make_it_forget(self) -> None:
        experience = StrategyHistory(PLAIN_MS)
        for _ in range(10):
            controller = _controller(experience)
            controller.set_available([RETRIEVAL, OFF])
            _go(controller, 2, 1, PLAIN_MS)
            controller.set_available(WAYS)
            _go(controller, 30, 4, 1.2 * PLAIN_MS)
        assert experience.record(BEST_FIRST, TemperatureClass.GREEDY).evidence.weight > 200

    def test_a_round_belongs_to_the_way_that_was_said_before_it(self) -> None:
        controller = _controller()
        assert controller.way() == BEST_FIRST
        controller.set_available([OFF])
        controller.observe(3, 12.0)
        assert [decision.way for decision in controller.decisions()] == [BEST_FIRST]

    def test_plain_rounds_are_always_there(self) -> None:
        controller = Controller(StrategyHistory(PLAIN_MS), 0.0, [PEARL])
        controller.set_available([])
        assert controller.way() == OFF


class TestInterface:
    def test_a_session_of_one_way_goes_it(self) -> None:
        assert set(_go(_controller(ways=(OFF,)), 30, 1, PLAIN_MS)) == {OFF}

    @pytest.mark.parametrize(
        "ways", [(PEARL, PEARL), (Strategy(Method.AUTO), OFF), (Strategy(Method.OFF, Rows.TREE), PEARL)], ids=str
    )
    def test_ways_that_make_no_sense_are_refused(self, ways: tuple[Strategy, ...]) -> None:
        with pytest.raises(ValueError, match="ways must be different"):
            Controller(StrategyHistory(PLAIN_MS), 0.0, ways)

    def test_what_is_not_a_round_is_refused(self) -> None:
        controller = _controller()
        with pytest.raises(ValueError, match="no way was asked for"):
            controller.observe(1, 10.0)
        controller.way()
        for num_tokens, round_ms in ((-1, 10.0), (1, -1.0), (1, float("nan")), (1, float("inf"))):
            with pytest.raises(ValueError, match="a round cannot commit"):
                controller.observe(num_tokens, round_ms)
        with pytest.raises(ValueError, match="not ways of this controller"):
            controller.set_available([Strategy(Method.CARD)])
        for plain_ms in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="plain_ms"):
                StrategyHistory(plain_ms)

    @settings(max_examples=40, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.integers(0, 2),
                st.integers(0, 13),
                st.floats(0, 1e4),
                st.sets(st.sampled_from(WAYS)) | st.none(),
            ),
            max_size=250,
        )
    )
    def test_whatever_happens_the_way_is_available_and_the_decisions_add_up(
        self, rounds: list[tuple[int, int, float, set[Strategy] | None]]
    ) -> None:
        experience = StrategyHistory(PLAIN_MS)
        controllers = [Controller(experience, temperature, WAYS) for temperature in (0.0, 0.0, 1.0)]
        available = [set(WAYS) for _ in controllers]
        num_tokens = [0 for _ in controllers]
        for index, count, round_ms, changed in rounds:
            controller = controllers[index]
            if changed is not None:
                controller.set_available(changed)
                available[index] = changed | {OFF}
            way = controller.way()
            assert way == controller.way()
            assert way in available[index]
            controller.observe(count, round_ms)
            num_tokens[index] += count
        for controller, expected in zip(controllers, num_tokens, strict=True):
            assert sum(decision.num_tokens for decision in controller.decisions()) == expected
        assert experience.num_rounds == len(rounds)
