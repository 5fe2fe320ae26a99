"""With a draft that cannot pay, `auto` is hardly slower than plain rounds, from a process's first generation on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from outrider.core.auto.controller import MAX_FUTILE_ROUNDS, MAX_PENDING_ROUNDS, Controller
from outrider.core.auto.history import INITIAL_TRIAL_BUDGET, TRIAL_SHARE, StrategyHistory, TemperatureClass
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
    Cost,
    Trace,
    World,
    run_auto,
)

NUM_SESSIONS = 20
NUM_PROMPT_TOKENS = 100
DRAFTED = (BEST_FIRST, PEARL, DOUBLE)
DRAFTED_ONLY = (BEST_FIRST, PEARL, PLAIN)


def hostile(rounds: float, reading_rounds: float, slowdown: float) -> World:
    """A draft that is always wrong.

    Args:
        rounds: Time of a round with it, in plain rounds, if it runs on a machine of its own.
        reading_rounds: See `World`.
        slowdown: See `World`.
    """
    drafted = Cost(0.0, rounds * slowdown * PLAIN_MS)
    retrieved = Cost(0.0, 1.03 * PLAIN_MS, restart=0)
    costs = {PLAIN: PLAIN_COST, RETRIEVAL: retrieved} | dict.fromkeys(DRAFTED, drafted)
    return World(costs, reading_rounds=reading_rounds, slowdown=slowdown)


def share_of_off(trace: Trace) -> float:
    return PLAIN_MS * trace.tokens_per_ms()


def run_with(world: Callable[[int], World], draft_ms: float, seed: int, num_sessions: int = NUM_SESSIONS) -> Trace:
    """A process that knows the time of a draft forward from its first session on."""
    history = StrategyHistory(PLAIN_MS)
    history.draft_ms = draft_ms
    return run_auto(world, num_sessions, DRAFTED_ONLY, history=history, num_prompt_tokens=NUM_PROMPT_TOKENS, seed=seed)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("slowdown", "least"), [(1.0, 0.98), (2.0, 0.96)], ids=["apart", "on one core"])
def test_a_draft_as_slow_as_the_target_costs_little(slowdown: float, least: float, seed: int) -> None:
    world = hostile(1.3, reading_rounds=8, slowdown=slowdown)
    assert share_of_off(run_with(lambda _: world, PLAIN_MS, seed)) >= least


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("slowdown", "least"), [(1.0, 0.98), (2.0, 0.96)], ids=["apart", "on one core"])
def test_a_draft_that_is_twenty_times_slower_costs_little(slowdown: float, least: float, seed: int) -> None:
    world = hostile(1.4, reading_rounds=160, slowdown=slowdown)
    assert share_of_off(run_with(lambda _: world, 20 * PLAIN_MS, seed)) >= least


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("slowdown", "least"), [(1.0, 0.98), (2.0, 0.96)], ids=["apart", "on one core"])
def test_a_draft_that_is_good_for_fifty_tokens_and_then_useless_costs_little(
    slowdown: float, least: float, seed: int
) -> None:
    bad = hostile(1.2, reading_rounds=1, slowdown=slowdown)
    good = replace(bad, costs=bad.costs | dict.fromkeys((BEST_FIRST, PEARL), Cost(0.7, 1.2 * slowdown * PLAIN_MS)))
    trace = run_with(lambda num_tokens: good if num_tokens % NUM_TOKENS < 50 else bad, 0.1 * PLAIN_MS, seed)
    assert share_of_off(trace) >= least


@pytest.mark.slow
def test_all_trials_together_take_two_per_cent_of_the_time_at_most() -> None:
    """Over all sessions: the time of rounds with a drafter awake, beyond that of plain rounds."""
    world = hostile(1.3, reading_rounds=30, slowdown=2.0)
    trace = run_with(lambda _: world, 2 * PLAIN_MS, seed=0, num_sessions=200)
    pairs = zip(trace.strategies, trace.times_ms, strict=True)
    lost_ms = sum(time_ms - PLAIN_MS for strategy, time_ms in pairs if strategy.method.has_draft_model)
    assert PLAIN_MS < lost_ms <= 0.02 * sum(trace.times_ms)


def test_a_drafter_that_reads_on_another_machine_is_waited_for_and_then_used() -> None:
    drafted = replace(GOOD, reading_rounds=40.0)
    trace = run_with(lambda _: drafted, 0.2 * PLAIN_MS, seed=0)
    first = trace.strategies[:NUM_TOKENS]
    assert set(first) == {BEST_FIRST}
    assert share_of_off(trace) > 1.3


def _begin(history: StrategyHistory, strategies: tuple[Strategy, ...] = DRAFTED_ONLY, number: int = 0) -> Controller:
    return Controller(history, 0.0, strategies, number, NUM_PROMPT_TOKENS)


class TestReading:
    def test_one_that_slows_the_target_down_is_given_up_when_it_has_cost_enough(self) -> None:
        history = StrategyHistory(PLAIN_MS)
        controller, lost = _begin(history), 0.0
        while controller.strategy() == BEST_FIRST:
            controller.observe(1, 3 * PLAIN_MS, is_pending=True)
            lost += 2.0
        assert 10 <= lost <= 20
        assert controller.strategy() == PLAIN
        assert history.trial_cost == pytest.approx(lost)
        assert _begin(history).strategy() == PLAIN, "the next session does not begin with it"

    def test_its_rounds_say_nothing_of_the_strategy(self) -> None:
        history = StrategyHistory(PLAIN_MS)
        controller = _begin(history)
        for _ in range(50):
            controller.strategy()
            controller.observe(1, PLAIN_MS, is_pending=True)
        assert controller.strategy() == BEST_FIRST
        for _ in range(6):
            controller.observe(4, 1.2 * PLAIN_MS)
            assert controller.strategy() == BEST_FIRST
        assert controller.decisions()[0].num_rounds == 56

    def test_what_it_costs_is_learnt_and_decides_if_the_next_one_can_be_paid(self) -> None:
        history = StrategyHistory(PLAIN_MS)
        history.draft_ms = PLAIN_MS
        expected = history.reading_cost(800)
        assert expected == pytest.approx(100.0)
        assert not history.can_afford(expected)
        for _ in range(8):
            history.learn_reading(800, lost=0.0)  # on a machine of its own
        assert history.can_afford(history.reading_cost(800))
        assert history.can_afford(), "a drafter that is awake has nothing to read"

    def test_what_it_slows_rounds_down_is_charged(self) -> None:
        history = StrategyHistory(PLAIN_MS)
        controller = _begin(history)
        controller.strategy()
        controller.observe(1, 1.5 * PLAIN_MS, is_pending=True)
        assert history.trial_cost == pytest.approx(0.5)

    def test_a_drafter_that_never_says_anything_is_left(self) -> None:
        controller = _begin(StrategyHistory(PLAIN_MS), (BEST_FIRST, PLAIN))
        for _ in range(MAX_PENDING_ROUNDS):
            assert controller.strategy() == BEST_FIRST
            controller.observe(1, PLAIN_MS, is_pending=True)
        assert controller.strategy() == PLAIN

    def test_what_follows_when_the_drafter_is_sent_to_sleep_is_charged_and_not_learnt(self) -> None:
        history = StrategyHistory(PLAIN_MS)
        controller = _begin(history)
        while controller.strategy() == BEST_FIRST:
            controller.observe(1, 3 * PLAIN_MS, is_pending=True)
        charged = history.trial_cost
        for _ in range(5):
            assert controller.is_probing
            controller.observe(1, 3 * PLAIN_MS)
            controller.strategy()
        assert history.trial_cost == pytest.approx(charged + 10)
        controller.observe(1, PLAIN_MS)
        assert not controller.is_probing, "it sleeps"
        for _ in range(20):
            controller.strategy()
            controller.observe(1, PLAIN_MS)
        decision = controller.decisions()[-1]
        assert decision.strategy == PLAIN
        assert history.plain_rate(TemperatureClass.GREEDY) == pytest.approx(1.0, abs=0.01)


class TestHoldingBack:
    def test_a_drafter_that_is_too_slow_is_not_begun_with_until_the_budget_allows_it(self) -> None:
        history = StrategyHistory(PLAIN_MS)
        history.draft_ms = 20 * PLAIN_MS
        controller = _begin(history)
        assert controller.strategy() == BEST_FIRST
        controller.hold_drafts()
        assert controller.strategy() == PLAIN
        # The draft model is expected to read a prompt in this many plain rounds; one round in a hundred may be spent.
        reading = history.reading_cost(NUM_PROMPT_TOKENS)
        used = [strategy for number in range(300) for strategy in self._generate(_begin(history, number=number))]
        first = used.index(BEST_FIRST)
        assert first >= (reading - INITIAL_TRIAL_BUDGET) / TRIAL_SHARE
        assert used[first : first + 300].count(BEST_FIRST) <= 2 * MAX_FUTILE_ROUNDS

    @staticmethod
    def _generate(controller: Controller) -> list[Strategy]:
        used = []
        for _ in range(NUM_TOKENS):
            used.append(controller.strategy())
            controller.observe(1, PLAIN_MS)
        return used

    def test_what_is_known_to_be_good_is_not_held_back(self) -> None:
        history = StrategyHistory(PLAIN_MS)
        controller = _begin(history)
        for _ in range(50):
            controller.strategy()
            controller.observe(4, 1.2 * PLAIN_MS)
        controller.hold_drafts()
        assert controller.strategy() == BEST_FIRST


class TestFutility:
    @pytest.mark.parametrize("rounds", [1.0, 1.05, 1.3, 2.5])
    def test_a_good_draft_that_turns_bad_is_left_within_a_few_rounds(self, rounds: float) -> None:
        history = StrategyHistory(PLAIN_MS)
        for _ in range(3):
            controller = _begin(history)
            for _ in range(30):
                controller.strategy()
                controller.observe(4, 1.2 * PLAIN_MS)
        num_rounds = 0
        while controller.strategy() == BEST_FIRST:
            controller.observe(1, rounds * PLAIN_MS)
            num_rounds += 1
        assert num_rounds <= 10

    def test_in_that_text_it_is_soon_not_returned_to(self) -> None:
        history = StrategyHistory(PLAIN_MS)
        for _ in range(3):
            controller = _begin(history, (BEST_FIRST, PLAIN))
            for _ in range(30):
                controller.strategy()
                controller.observe(3, 1.2 * PLAIN_MS)
        used = []
        for _ in range(400):
            used.append(controller.strategy())
            controller.observe(1, (1.0 if used[-1] == PLAIN else 1.2) * PLAIN_MS)
        assert used[100:].count(BEST_FIRST) <= 0.1 * 300
