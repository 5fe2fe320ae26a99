"""The controller of `auto`, round by round."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.auto.controller import SECOND_TRIED_AFTER, Controller
from outrider.core.auto.history import StrategyHistory, TemperatureClass
from outrider.core.auto.strategies import Strategy
from outrider.core.methods import AUTO, CARD, OFF
from outrider.core.params import Rows
from tests.core.auto.simulated_costs import (
    BEST_FIRST,
    DOUBLE,
    PEARL,
    PLAIN,
    PLAIN_MS,
    RETRIEVAL,
    STRATEGIES,
)


def _controller(history: StrategyHistory | None = None, strategies: tuple[Strategy, ...] = STRATEGIES) -> Controller:
    return Controller(history or StrategyHistory(PLAIN_MS), 0.0, strategies)


def _go(controller: Controller, num_rounds: int, num_tokens: int, round_ms: float) -> list[Strategy]:
    """Runs equal rounds for all strategies except plain ones. Returns the strategy of each."""
    used = []
    for _ in range(num_rounds):
        used.append(controller.strategy())
        if used[-1] == PLAIN:
            controller.observe(1, PLAIN_MS)
        else:
            controller.observe(num_tokens, round_ms)
    return used


class TestGuard:
    @pytest.mark.parametrize("slowdown", [1.15, 1.25, 3.0])
    def test_a_strategy_worse_than_off_is_left_within_eight_rounds(self, slowdown: float) -> None:
        used = _go(_controller(), 9, 1, slowdown * PLAIN_MS)
        assert used[0] == BEST_FIRST
        assert used[-1] in (PLAIN, RETRIEVAL)

    def test_later_sessions_do_not_begin_with_it(self) -> None:
        history = StrategyHistory(PLAIN_MS)
        _go(_controller(history), 9, 1, 1.2 * PLAIN_MS)
        assert _controller(history).strategy() in (PLAIN, RETRIEVAL)

    def test_a_strategy_better_than_off_is_not_left_for_a_hiccup(self) -> None:
        controller = _controller()
        _go(controller, 4, 3, 1.2 * PLAIN_MS)
        _go(controller, 1, 1, 20 * PLAIN_MS)
        assert controller.strategy() == BEST_FIRST

    def test_an_established_strategy_that_stalls_is_left_soon(self) -> None:
        history = StrategyHistory(PLAIN_MS)
        controller = _controller(history, (BEST_FIRST, PLAIN))
        _go(controller, 200, 4, 1.2 * PLAIN_MS)
        assert _go(controller, 3, 1, 10 * PLAIN_MS) == [BEST_FIRST, BEST_FIRST, PLAIN]

    def test_rounds_that_say_nothing_of_a_strategy_compare_it_with_none(self) -> None:
        controller = _controller()
        for _ in range(100):
            assert controller.strategy() == BEST_FIRST
            controller.observe(4, 1.2 * PLAIN_MS, is_typical=False)

    def test_it_is_not_left_for_another_with_the_same_speculator(self) -> None:
        history = StrategyHistory(PLAIN_MS)
        pearl = history.record(PEARL, TemperatureClass.GREEDY)
        controller = _controller(history, (BEST_FIRST, PEARL, PLAIN))
        _go(controller, 100, 4, 1.2 * PLAIN_MS)
        for _ in range(100):
            history.add_round(pearl, TemperatureClass.GREEDY, 4, 1.25, True)
        _go(controller, 2, 1, 10 * PLAIN_MS)
        assert controller.strategy() == PLAIN


class TestTrials:
    def test_a_session_begins_with_the_first_preference_and_stays(self) -> None:
        for strategies in (STRATEGIES, (PLAIN, PEARL, BEST_FIRST)):
            expected = next(strategy for strategy in strategies if strategy != PLAIN)
            used = _go(_controller(strategies=strategies), SECOND_TRIED_AFTER, 2, 1.2 * PLAIN_MS)
            assert set(used) == {expected}

    @pytest.mark.parametrize("slowdown", [1.05, 1.1, 1.2])
    def test_the_second_preference_is_tried_soon_if_the_first_is_bad(self, slowdown: float) -> None:
        controller = _controller(strategies=(BEST_FIRST, PEARL, PLAIN))
        assert PEARL in _go(controller, 100, 1, slowdown * PLAIN_MS)

    def test_a_trial_far_behind_is_given_up_after_two_rounds(self) -> None:
        controller = _controller(strategies=(BEST_FIRST, PEARL, PLAIN))
        _go(controller, SECOND_TRIED_AFTER, 4, 1.2 * PLAIN_MS)
        while (strategy := controller.strategy()) == BEST_FIRST:
            controller.observe(4, 1.2 * PLAIN_MS)
        assert strategy == PEARL
        used = _go(controller, 3, 1, 10 * PLAIN_MS)
        assert used == [PEARL, PEARL, BEST_FIRST]

    def test_sessions_begin_trials_at_different_places(self) -> None:
        def first_trial(number: int) -> int:
            history = StrategyHistory(PLAIN_MS)
            _go(_controller(history), SECOND_TRIED_AFTER, 2, 1.2 * PLAIN_MS)
            controller = Controller(history, 0.0, STRATEGIES, number)
            return _go(controller, 60, 2, 1.2 * PLAIN_MS).index(PEARL)

        assert len({first_trial(number) for number in range(8)}) > 1


class TestAttribution:
    def test_the_first_round_after_a_switch_is_not_learnt(self) -> None:
        history = StrategyHistory(PLAIN_MS)
        controller = _controller(history)
        assert _go(controller, 1, 1, 4 * PLAIN_MS) == [BEST_FIRST]
        _go(controller, 9, 3, 1.2 * PLAIN_MS)
        assert history.record(BEST_FIRST, TemperatureClass.GREEDY).rate.value == pytest.approx(3 / 1.2)

    def test_a_strategy_is_judged_by_the_whole_time_of_its_rounds(self) -> None:
        controller = _controller(strategies=(PEARL, PLAIN))
        for number in range(100):
            controller.strategy()
            controller.observe(1, PLAIN_MS * (0.2 if number % 2 else 3.0))
        assert controller.decisions()[0].num_rounds <= 30

    def test_classes_of_temperatures_are_learnt_apart(self) -> None:
        history = StrategyHistory(PLAIN_MS)
        _go(_controller(history), 20, 1, 1.3 * PLAIN_MS)
        assert Controller(history, 0.0, STRATEGIES).strategy() != BEST_FIRST
        assert Controller(history, 0.8, STRATEGIES).strategy() == BEST_FIRST
        assert Controller(history, 0.9, STRATEGIES).strategy() == BEST_FIRST
        assert [TemperatureClass.of(t).name for t in (0.0, 0.7, 0.85, 1.5)] == ["GREEDY", "LOW", "HIGH", "HIGH"]

    def test_a_higher_load_does_not_change_what_is_known(self) -> None:
        history = StrategyHistory(PLAIN_MS)
        _go(_controller(history), 100, 3, 1.2 * PLAIN_MS)
        record = history.record(BEST_FIRST, TemperatureClass.GREEDY)
        rate = record.rate.value
        history.plain_ms = 4 * PLAIN_MS
        _go(_controller(history), 100, 3, 4 * 1.2 * PLAIN_MS)
        assert record.rate.value == pytest.approx(rate)


class TestAvailability:
    DRAFTED = (BEST_FIRST, PEARL, DOUBLE)

    def test_an_unavailable_strategy_is_not_used(self) -> None:
        controller = _controller()
        controller.set_available([RETRIEVAL, PLAIN])
        assert not set(_go(controller, 400, 1, PLAIN_MS)) & set(self.DRAFTED)

    def test_a_lost_speculator_ends_its_strategies_until_it_returns(self) -> None:
        controller = _controller()
        _go(controller, 50, 4, 1.2 * PLAIN_MS)
        controller.set_available([RETRIEVAL, PLAIN])
        assert controller.strategy() not in self.DRAFTED
        _go(controller, 5, 1, PLAIN_MS)
        controller.set_available(STRATEGIES)
        assert controller.strategy() == BEST_FIRST

    def test_a_speculator_that_comes_late_is_used_at_once(self) -> None:
        controller = _controller()
        controller.set_available([RETRIEVAL, PLAIN])
        _go(controller, 2, 1, PLAIN_MS)
        controller.set_available(STRATEGIES)
        assert controller.strategy() == BEST_FIRST

    def test_speculators_that_come_late_do_not_make_it_forget(self) -> None:
        history = StrategyHistory(PLAIN_MS)
        for _ in range(10):
            controller = _controller(history)
            controller.set_available([RETRIEVAL, PLAIN])
            _go(controller, 2, 1, PLAIN_MS)
            controller.set_available(STRATEGIES)
            _go(controller, 30, 4, 1.2 * PLAIN_MS)
        assert history.record(BEST_FIRST, TemperatureClass.GREEDY).rate.weight > 200

    def test_a_round_belongs_to_the_strategy_returned_before_it(self) -> None:
        controller = _controller()
        assert controller.strategy() == BEST_FIRST
        controller.set_available([PLAIN])
        controller.observe(3, 12.0)
        assert [decision.strategy for decision in controller.decisions()] == [BEST_FIRST]

    def test_plain_rounds_are_always_there(self) -> None:
        controller = Controller(StrategyHistory(PLAIN_MS), 0.0, [PEARL])
        controller.set_available([])
        assert controller.strategy() == PLAIN


class TestInterface:
    def test_a_session_of_one_strategy_uses_it(self) -> None:
        assert set(_go(_controller(strategies=(PLAIN,)), 30, 1, PLAIN_MS)) == {PLAIN}

    @pytest.mark.parametrize(
        "strategies",
        [(PEARL, PEARL), (Strategy(AUTO), PLAIN), (Strategy(OFF, Rows.TREE), PEARL)],
        ids=str,
    )
    def test_strategies_that_make_no_sense_are_refused(self, strategies: tuple[Strategy, ...]) -> None:
        with pytest.raises(ValueError, match="strategies must be different"):
            Controller(StrategyHistory(PLAIN_MS), 0.0, strategies)

    def test_what_is_not_a_round_is_refused(self) -> None:
        controller = _controller()
        with pytest.raises(ValueError, match="no strategy was asked for"):
            controller.observe(1, 10.0)
        controller.strategy()
        for num_tokens, round_ms in ((-1, 10.0), (1, -1.0), (1, float("nan")), (1, float("inf"))):
            with pytest.raises(ValueError, match="a round cannot commit"):
                controller.observe(num_tokens, round_ms)
        with pytest.raises(ValueError, match="not strategies of this controller"):
            controller.set_available([Strategy(CARD)])
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
                st.sets(st.sampled_from(STRATEGIES)) | st.none(),
            ),
            max_size=250,
        )
    )
    def test_the_strategy_is_available_and_the_decisions_add_up(
        self, rounds: list[tuple[int, int, float, set[Strategy] | None]]
    ) -> None:
        history = StrategyHistory(PLAIN_MS)
        controllers = [Controller(history, temperature, STRATEGIES) for temperature in (0.0, 0.0, 1.0)]
        available = [set(STRATEGIES) for _ in controllers]
        num_tokens = [0 for _ in controllers]
        for index, count, round_ms, changed in rounds:
            controller = controllers[index]
            if changed is not None:
                controller.set_available(changed)
                available[index] = changed | {PLAIN}
            strategy = controller.strategy()
            assert strategy == controller.strategy()
            assert strategy in available[index]
            controller.observe(count, round_ms)
            num_tokens[index] += count
        for controller, expected in zip(controllers, num_tokens, strict=True):
            assert sum(decision.num_tokens for decision in controller.decisions()) == expected
        assert history.num_rounds == len(rounds)
