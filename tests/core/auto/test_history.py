"""The records of strategies, and the budget of trials."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.core.auto.history import (
    INITIAL_TRIAL_BUDGET,
    MAX_TRIAL_DEBT,
    MAX_TRIAL_SPACING,
    DecayedRate,
    StrategyHistory,
    TemperatureClass,
)
from outrider.core.auto.strategies import PLAIN
from tests.core.auto.simulated_costs import BEST_FIRST, PEARL, PLAIN_MS


def test_rates_are_ratios_of_sums() -> None:
    rate = DecayedRate()
    for _ in range(50):
        rate.add(1, 0.2)
        rate.add(1, 3.0)
    assert rate.value == pytest.approx(2 / 3.2)  # the mean of the ratios would be 2.7


def test_what_was_not_tried_for_long_grows_uncertain() -> None:
    history = StrategyHistory(PLAIN_MS)
    record = history.record(BEST_FIRST, TemperatureClass.GREEDY)
    for num_tokens in [1, 3, 5, 2] * 5:
        history.add_round(record, TemperatureClass.GREEDY, num_tokens, 1.2, True)
    rate, error = record.rate.value, record.rate.error
    record.decay(history.num_rounds + 2000)
    assert record.rate.value == pytest.approx(rate)
    assert record.rate.error > 2 * error
    record.decay(10**9)
    assert record.rate.value == pytest.approx(rate)


def test_a_plain_change_ends_the_past() -> None:
    history = StrategyHistory(PLAIN_MS)
    record = history.record(BEST_FIRST, TemperatureClass.GREEDY)
    for _ in range(700):
        history.add_round(record, TemperatureClass.GREEDY, 4, 1.2, True)
    for _ in range(8):
        history.add_round(record, TemperatureClass.GREEDY, 1, 10.0, True)
    assert record.rate.value < 1


def test_failures_found_at_the_same_time_count_once() -> None:
    alone, together = StrategyHistory(PLAIN_MS), StrategyHistory(PLAIN_MS)
    for history, count in ((alone, 1), (together, 30)):
        record = history.record(PEARL, TemperatureClass.GREEDY)
        for _ in range(count):
            history.record_failure(record)
    records = [history.record(PEARL, TemperatureClass.GREEDY) for history in (alone, together)]
    assert records[0].retry_at == records[1].retry_at > 0


def test_the_error_of_a_rate_is_that_of_repeated_measurements() -> None:
    random = np.random.default_rng(5)
    rates, errors = [], []
    for _ in range(300):
        rate = DecayedRate()
        for _ in range(100):
            rate.add(float(random.integers(1, 8)), float(random.uniform(0.8, 1.6)))
        rates.append(rate.value)
        errors.append(rate.error)
    assert np.mean(errors) == pytest.approx(np.std(rates), rel=0.15)


def test_nothing_is_known_without_rounds() -> None:
    assert DecayedRate().error == math.inf


def test_a_record_that_is_doubted_keeps_its_rate_and_counts_little() -> None:
    history = StrategyHistory(PLAIN_MS)
    record = history.record(PEARL, TemperatureClass.GREEDY)
    for _ in range(100):
        history.add_round(record, TemperatureClass.GREEDY, 3, 1.2, True)
    history.record_failure(record)
    history.discount(record)
    assert record.rate.value == pytest.approx(3 / 1.2)
    assert record.rate.weight == pytest.approx(16)
    assert record.retry_at == 0


@pytest.mark.parametrize(("hiccups", "expected"), [(0, 1 / 1.2), (1, 1.0)])
def test_measured_plain_rounds_replace_the_estimate_if_steady(hiccups: int, expected: float) -> None:
    history = StrategyHistory(PLAIN_MS)
    record = history.record(PLAIN, TemperatureClass.GREEDY)
    for number in range(10):
        history.add_round(record, TemperatureClass.GREEDY, 1, 6.0 if number < hiccups else 1.2 - 0.2 * hiccups, True)
    assert history.plain_rate(TemperatureClass.GREEDY) == pytest.approx(expected, abs=0.08)
    assert history.plain_rate(TemperatureClass.HIGH) == 1.0


def test_trials_that_clearly_lose_delay_the_next_one_more_and_more() -> None:
    history = StrategyHistory(PLAIN_MS)
    record = history.record(PEARL, TemperatureClass.GREEDY)

    def rounds_until_due() -> int:
        begin = history.num_rounds
        while not history.is_trial_due:
            history.add_round(record, TemperatureClass.GREEDY, 1, 1.0, True)
        return history.num_rounds - begin

    waits = []
    for _ in range(6):
        history.record_lost_trial(is_clear=True)
        waits.append(rounds_until_due())
    assert waits[1] == 2 * waits[0]
    assert waits[-1] == waits[-2] == MAX_TRIAL_SPACING
    history.record_won_trial(record)
    history.record_lost_trial(is_clear=False)
    assert rounds_until_due() == waits[0]


def test_trials_have_a_budget_and_great_debts_are_forgiven() -> None:
    history = StrategyHistory(PLAIN_MS)
    record = history.record(PEARL, TemperatureClass.GREEDY)
    history.charge_trial(INITIAL_TRIAL_BUDGET + 1)
    assert not history.can_afford()
    for _ in range(100):
        history.add_round(record, TemperatureClass.GREEDY, 1, 1.0, True)
    assert history.can_afford()
    history.charge_trial(1e9)
    assert history.trial_cost < 2 * MAX_TRIAL_DEBT
