"""The controller comes close to the best fixed strategy in simulated worlds, at little risk."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from outrider.core.auto.controller import MIN_ROUNDS
from outrider.core.auto.history import INITIAL_TRIAL_BUDGET, StrategyHistory
from outrider.core.auto.strategies import Strategy
from tests.core.auto.simulated_costs import (
    BEST_FIRST,
    DOUBLE,
    GOOD,
    NUM_TOKENS,
    PEARL,
    PLAIN,
    PLAIN_COST,
    PLAIN_MS,
    RETRIEVAL,
    STRATEGIES,
    UNTRAINED,
    WORLDS,
    Cost,
    Trace,
    World,
    run_auto,
    run_fixed,
)

SEEDS = range(3)


@cache
def _fixed(name: str, num_sessions: int, seed: int) -> dict[Strategy, float]:
    """Tokens per time of a plain round, for each fixed strategy."""
    return {
        strategy: PLAIN_MS * run_fixed(lambda _: WORLDS[name], strategy, num_sessions, seed=seed).tokens_per_ms()
        for strategy in STRATEGIES
    }


@cache
def _auto(
    name: str, num_sessions: int, seed: int, num_parallel: int = 1, strategies: tuple[Strategy, ...] = STRATEGIES
) -> Trace:
    world = WORLDS[name]
    return run_auto(lambda _: world, num_sessions, strategies, num_parallel=num_parallel, seed=seed)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


class TestThroughput:
    @pytest.mark.parametrize("name", WORLDS)
    @pytest.mark.parametrize("num_sessions", [9, pytest.param(40, marks=pytest.mark.slow)])
    def test_a_new_process_is_near_the_best_and_no_slower_than_off(self, name: str, num_sessions: int) -> None:
        to_best, to_off = [], []
        for seed in SEEDS:
            rate = PLAIN_MS * _auto(name, num_sessions, seed).tokens_per_ms()
            fixed = _fixed(name, num_sessions, seed)
            to_best.append(rate / max(fixed.values()))
            to_off.append(rate / fixed[PLAIN])
        assert _mean(to_best) >= 0.96
        assert min(to_best) >= 0.95
        assert min(to_off) >= 0.98

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["best-first is clearly best", "categories differ", "noise"])
    def test_a_wrong_preference_is_found_out(self, name: str) -> None:
        """A controller keeps its first preference for a few hundred rounds, and makes up for them later."""
        strategies = (PEARL, DOUBLE, BEST_FIRST, RETRIEVAL, PLAIN)
        shares = []
        for seed in SEEDS:
            rate = PLAIN_MS * _auto(name, 150, seed, strategies=strategies).tokens_per_ms()
            shares.append(rate / max(_fixed(name, 150, seed).values()))
        assert _mean(shares) >= 0.95

    @pytest.mark.parametrize("name", ["best-first is clearly best", "untrained draft", "only retrieval pays"])
    def test_many_sessions_at_a_time_learn_together(self, name: str) -> None:
        rate = PLAIN_MS * _auto(name, 60, 0, num_parallel=16).tokens_per_ms()
        fixed = _fixed(name, 60, 0)
        assert rate >= 0.95 * max(fixed.values())
        assert rate >= 0.98 * fixed[PLAIN]

    @pytest.mark.parametrize("estimate", [0.85, 1.15, 1.3])
    def test_a_wrong_estimate_of_plain_rounds_is_measured_right(self, estimate: float) -> None:
        for seed in SEEDS:
            history = StrategyHistory(estimate * PLAIN_MS)
            trace = run_auto(lambda _: UNTRAINED, 9, history=history, seed=seed)
            assert PLAIN_MS * trace.tokens_per_ms() >= 0.98

    @pytest.mark.slow
    def test_long_texts_use_the_strategy_that_suits_them(self) -> None:
        """One strategy suits half of the texts, another the other half: a choice by text beats every fixed strategy."""
        world = World(
            GOOD.costs | {PEARL: Cost(0.7, 1.2 * PLAIN_MS), BEST_FIRST: Cost(0.7, 1.2 * PLAIN_MS)},
            by_category=({PEARL: 0.5}, {BEST_FIRST: 0.5}),
        )
        strategies = (PEARL, BEST_FIRST, PLAIN)
        fixed = max(
            run_fixed(lambda _: world, strategy, 16, num_tokens=4096).tokens_per_ms() for strategy in strategies
        )
        auto = run_auto(lambda _: world, 16, strategies, num_tokens=4096).tokens_per_ms()
        assert auto >= 1.1 * fixed

    @pytest.mark.parametrize("slowdown", [1.05, 1.1, 1.15, 1.25])
    def test_an_untrained_draft_costs_less_than_two_percent(self, slowdown: float) -> None:
        drafted = Cost(0.0, slowdown * PLAIN_MS)
        world = World(UNTRAINED.costs | {PEARL: drafted, BEST_FIRST: drafted, DOUBLE: drafted})
        for seed in SEEDS:
            rate = run_auto(lambda _: world, 9, seed=seed).tokens_per_ms()
            assert rate >= 0.98 * run_fixed(lambda _: world, PLAIN, 9, seed=seed).tokens_per_ms()


class TestChange:
    NUM_COMMITTED = 30 * NUM_TOKENS

    @pytest.mark.parametrize("kind", ["dead", "ten times slower", "half as slow again"])
    def test_a_draft_that_fails_is_left_and_used_again_later(self, kind: str) -> None:
        drafted = {"dead": Cost(0.0, 12.0), "ten times slower": Cost(0.3, 100.0), "half as slow again": Cost(0.3, 15.0)}
        bad = World(GOOD.costs | dict.fromkeys((PEARL, BEST_FIRST, DOUBLE), drafted[kind]))
        trace = run_auto(lambda n: bad if self.NUM_COMMITTED <= n < 2 * self.NUM_COMMITTED else GOOD, 140)
        change, back = self._round_of(trace, self.NUM_COMMITTED), self._round_of(trace, 2 * self.NUM_COMMITTED)
        is_drafted = [strategy.method.has_draft_model for strategy in trace.strategies]
        assert _mean(is_drafted[change - 200 : change]) >= 0.9
        assert _mean(is_drafted[change + 200 : back]) <= 0.1
        assert _mean(is_drafted[back + 2000 :]) >= 0.9
        assert PLAIN_MS * trace.tokens_per_ms(change + 200, back) >= 1.0
        # The cost of the change itself: a few dozen plain rounds, not hundreds.
        lost = sum(trace.times_ms[change : change + 200]) / PLAIN_MS - sum(trace.tokens[change : change + 200])
        assert lost <= 120

    @staticmethod
    def _round_of(trace: Trace, num_tokens: int) -> int:
        count = 0
        for index, tokens in enumerate(trace.tokens):
            count += tokens
            if count >= num_tokens:
                return index
        raise AssertionError("the trace is too short")


class TestHysteresis:
    @pytest.mark.parametrize("name", ["best-first is clearly best", "categories differ", "noise"])
    def test_a_session_rarely_changes_its_strategy(self, name: str) -> None:
        for seed in SEEDS:
            assert _auto(name, 40, seed).num_switches <= 0.8 * 40

    def test_between_strategies_of_one_worth_it_changes_only_to_try(self) -> None:
        same = Cost(0.7, 1.2 * PLAIN_MS)
        world = World(GOOD.costs | {PEARL: same, BEST_FIRST: same, DOUBLE: same})
        trace = run_auto(lambda _: world, 1, num_tokens=10_000)
        assert trace.num_switches <= 0.02 * trace.num_rounds

    def test_a_good_strategy_is_used_for_some_rounds_at_least(self) -> None:
        trace = _auto("best-first is clearly best", 40, 0)
        lengths = [
            num_rounds for runs in trace.runs() for strategy, num_rounds, _, _ in runs[:-1] if strategy == BEST_FIRST
        ]
        assert lengths
        assert min(lengths) >= MIN_ROUNDS


class TestTrials:
    @pytest.mark.parametrize("name", WORLDS)
    @pytest.mark.parametrize("num_parallel", [1, 8])
    def test_excursions_lose_little_time(self, name: str, num_parallel: int) -> None:
        """Measured from outside: extra time of short runs of another strategy over the usual one."""
        trace = _auto(name, 150, 0, num_parallel=num_parallel)
        lost_ms = sum(
            max(0.0, time_ms - num_tokens / (rate / PLAIN_MS))
            for time_ms, num_tokens, rate in trace.excursions(_fixed(name, 40, 0))
        )
        allowance_ms = (INITIAL_TRIAL_BUDGET + 20) * PLAIN_MS
        assert lost_ms <= 0.02 * sum(trace.times_ms) + allowance_ms

    @pytest.mark.parametrize("name", ["best-first is clearly best", "untrained draft", "nothing pays"])
    def test_little_time_goes_into_strategies_that_lose(self, name: str) -> None:
        trace, fixed = _auto(name, 150, 0), _fixed(name, 40, 0)
        losers = {strategy for strategy in STRATEGIES if fixed[strategy] < 0.9 * max(fixed.values())}
        pairs = list(zip(trace.strategies, trace.times_ms, strict=True))
        assert sum(time_ms for strategy, time_ms in pairs if strategy in losers) <= 0.05 * sum(trace.times_ms)

    def test_a_bad_strategy_is_tried_less_and_less_often(self) -> None:
        world = World({PLAIN: PLAIN_COST, PEARL: Cost(0.0, 1.5 * PLAIN_MS)})
        trace = run_auto(lambda _: world, 1, (PEARL, PLAIN), num_tokens=6000)
        begins = [
            index
            for index, strategy in enumerate(trace.strategies)
            if strategy == PEARL and (index == 0 or trace.strategies[index - 1] != PEARL)
        ]
        gaps = [after - before for before, after in pairwise(begins)]
        assert len(begins) >= 3
        assert gaps[1] > 1.5 * gaps[0]
        assert len(begins) <= 12


def test_a_dear_switch_does_not_hide_a_better_strategy() -> None:
    world = World(GOOD.costs | {BEST_FIRST: Cost(0.85, 1.2 * PLAIN_MS)})
    trace = run_auto(lambda _: world, 60, (PEARL, BEST_FIRST, PLAIN))
    assert _mean([strategy == BEST_FIRST for strategy in trace.strategies[-500:]]) >= 0.9


@pytest.mark.parametrize("name", ["best-first is clearly best", "untrained draft"])
def test_decisions_add_up_in_the_order_of_first_use(name: str) -> None:
    trace = _auto(name, 9, 0)
    for session, decisions in trace.decisions.items():
        rounds = [index for index, number in enumerate(trace.sessions) if number == session]
        assert sum(decision.num_rounds for decision in decisions) == len(rounds)
        assert sum(decision.num_tokens for decision in decisions) == NUM_TOKENS
        assert sum(decision.time_ms for decision in decisions) == pytest.approx(
            sum(trace.times_ms[index] for index in rounds)
        )
        assert [decision.strategy for decision in decisions] == list(dict.fromkeys(trace.strategies[i] for i in rounds))


def test_the_same_rounds_give_the_same_strategies() -> None:
    first, second = (run_auto(lambda _: GOOD, 12, num_parallel=4, seed=7) for _ in range(2))
    assert first.strategies == second.strategies
