"""What a verifier learns about the ways to go on."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.core.auto.history import (
    MAX_PROBE_SPACING,
    PLAIN,
    PROBE_ALLOWANCE,
    DecayedRate,
    StrategyHistory,
    TemperatureClass,
)
from tests.core.auto.simulated_costs import BEST_FIRST, PEARL, PLAIN_MS


def test_rates_are_ratios_of_sums() -> None:
    evidence = DecayedRate()
    for _ in range(50):
        evidence.add(1, 0.2)
        evidence.add(1, 3.0)
    assert evidence.rate == pytest.approx(2 / 3.2)  # the mean of the ratios would be 2.7


def test_what_was_not_tried_for_long_grows_uncertain() -> None:
    experience = StrategyHistory(PLAIN_MS)
    record = experience.record(BEST_FIRST, TemperatureClass.GREEDY)
    for num_tokens in [1, 3, 5, 2] * 5:
        experience.count(record, TemperatureClass.GREEDY, num_tokens, 1.2, True)
    rate, error = record.evidence.rate, record.evidence.error
    record.fade(experience.num_rounds + 2000)
    assert record.evidence.rate == pytest.approx(rate)
    assert record.evidence.error > 2 * error
    record.fade(10**9)
    assert record.evidence.rate == pytest.approx(rate)


def test_a_plain_change_ends_the_past() -> None:
    experience = StrategyHistory(PLAIN_MS)
    record = experience.record(BEST_FIRST, TemperatureClass.GREEDY)
    for _ in range(700):
        experience.count(record, TemperatureClass.GREEDY, 4, 1.2, True)
    for _ in range(8):
        experience.count(record, TemperatureClass.GREEDY, 1, 10.0, True)
    assert record.evidence.rate < 1


def test_sessions_that_find_a_way_bad_at_the_same_time_put_its_next_probe_off_once() -> None:
    alone, together = StrategyHistory(PLAIN_MS), StrategyHistory(PLAIN_MS)
    for experience, count in ((alone, 1), (together, 30)):
        record = experience.record(PEARL, TemperatureClass.GREEDY)
        for _ in range(count):
            experience.fail(record)
    records = [experience.record(PEARL, TemperatureClass.GREEDY) for experience in (alone, together)]
    assert records[0].retry_at == records[1].retry_at > 0


def test_the_error_of_a_rate_is_that_of_repeated_measurements() -> None:
    random = np.random.default_rng(5)
    rates, errors = [], []
    for _ in range(300):
        evidence = DecayedRate()
        for _ in range(100):
            evidence.add(float(random.integers(1, 8)), float(random.uniform(0.8, 1.6)))
        rates.append(evidence.rate)
        errors.append(evidence.error)
    assert np.mean(errors) == pytest.approx(np.std(rates), rel=0.15)


def test_nothing_is_known_without_rounds() -> None:
    assert DecayedRate().error == math.inf


def test_a_record_that_is_doubted_keeps_its_rate_and_counts_little() -> None:
    experience = StrategyHistory(PLAIN_MS)
    record = experience.record(PEARL, TemperatureClass.GREEDY)
    for _ in range(100):
        experience.count(record, TemperatureClass.GREEDY, 3, 1.2, True)
    experience.fail(record)
    experience.discount(record)
    assert record.evidence.rate == pytest.approx(3 / 1.2)
    assert record.evidence.weight == pytest.approx(16)
    assert record.retry_at == 0


@pytest.mark.parametrize(("hiccups", "expected"), [(0, 1 / 1.2), (1, 1.0)])
def test_measured_plain_rounds_replace_the_estimate_unless_they_vary_wildly(hiccups: int, expected: float) -> None:
    experience = StrategyHistory(PLAIN_MS)
    record = experience.record(PLAIN, TemperatureClass.GREEDY)
    for number in range(10):
        experience.count(record, TemperatureClass.GREEDY, 1, 6.0 if number < hiccups else 1.2 - 0.2 * hiccups, True)
    assert experience.plain_rate(TemperatureClass.GREEDY) == pytest.approx(expected, abs=0.08)
    assert experience.plain_rate(TemperatureClass.HIGH) == 1.0


def test_probes_that_clearly_lose_put_the_next_one_off_longer_and_longer() -> None:
    experience = StrategyHistory(PLAIN_MS)
    record = experience.record(PEARL, TemperatureClass.GREEDY)

    def rounds_until_due() -> int:
        begin = experience.num_rounds
        while not experience.is_probe_due:
            experience.count(record, TemperatureClass.GREEDY, 1, 1.0, True)
        return experience.num_rounds - begin

    waits = []
    for _ in range(6):
        experience.lose_probe(is_clear=True)
        waits.append(rounds_until_due())
    assert waits[1] == 2 * waits[0]
    assert waits[-1] == waits[-2] == MAX_PROBE_SPACING
    experience.win_probe(record)
    experience.lose_probe(is_clear=False)
    assert rounds_until_due() == waits[0]


def test_probes_are_paid_from_a_part_of_all_time_and_great_debts_are_forgiven() -> None:
    experience = StrategyHistory(PLAIN_MS)
    record = experience.record(PEARL, TemperatureClass.GREEDY)
    experience.pay_probe(PROBE_ALLOWANCE + 1)
    assert not experience.can_pay_probe
    for _ in range(100):
        experience.count(record, TemperatureClass.GREEDY, 1, 1.0, True)
    assert experience.can_pay_probe
    experience.pay_probe(1e9)
    assert experience.probe_cost < 100
