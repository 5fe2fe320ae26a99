"""How often the target agrees with drafted tokens is learnt from its verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.core.calibration import (
    MAX_ACCEPTANCE_RATE,
    MAX_COUNTED_RANK,
    MIN_ACCEPTANCE_RATE,
    AcceptanceRate,
    DraftCalibration,
    MissExponent,
    RetrievalCalibration,
)
from outrider.core.params import Source


def test_without_evidence_a_claim_stands() -> None:
    calibration = DraftCalibration()
    logprob = math.log(0.4)
    assert calibration.corrected(calibration.key(False, 1, 2, logprob), logprob) == logprob


@pytest.mark.parametrize(("claimed", "true"), [(0.5, 0.9), (0.9, 0.5), (0.1, 0.02)])
def test_claims_come_to_what_is_true(claimed: float, true: float) -> None:
    calibration, rng = DraftCalibration(), np.random.default_rng(0)
    logprob = math.log(claimed)
    key = calibration.key(False, 0, 1, logprob)
    for agreed in rng.random(2000) < true:
        calibration.add([(key, logprob)], 0 if agreed else -1)
    assert math.exp(calibration.corrected(key, logprob)) == pytest.approx(true, abs=0.07)


def test_ranks_depths_and_temperatures_learn_apart() -> None:
    calibration = DraftCalibration()
    logprob = math.log(0.5)
    used = calibration.key(False, 0, 1, logprob)
    for _ in range(50):
        calibration.add([(used, logprob)], -1)
    for other in (
        calibration.key(True, 0, 1, logprob),
        calibration.key(False, 1, 1, logprob),
        calibration.key(False, 0, 5, logprob),
    ):
        assert calibration.corrected(other, logprob) == logprob
    assert calibration.corrected(used, logprob) < logprob - 1


def test_only_the_candidate_that_the_target_said_has_agreed() -> None:
    calibration = DraftCalibration()
    logprob = math.log(0.3)
    first, second = (calibration.key(False, rank, 1, logprob) for rank in (0, 1))
    for _ in range(100):
        calibration.add([(first, logprob), (second, logprob)], 1)
    assert calibration.corrected(first, logprob) < logprob < calibration.corrected(second, logprob)


def test_old_evidence_fades() -> None:
    calibration = DraftCalibration()
    logprob = math.log(0.5)
    key = calibration.key(True, 0, 1, logprob)
    for agreed in (*[-1] * 2000, *[0] * 2000):
        calibration.add([(key, logprob)], agreed)
    assert math.exp(calibration.corrected(key, logprob)) > 0.9


def test_nothing_is_ever_certain() -> None:
    calibration = DraftCalibration()
    key = calibration.key(True, 0, 1, 0.0)
    for _ in range(100):
        calibration.add([(key, 0.0)], 0)
    assert calibration.corrected(key, 0.0) < 0


def test_a_claim_whose_probability_is_zero_as_a_number_is_corrected_too() -> None:
    calibration = DraftCalibration()
    logprob = -1e6
    key = calibration.key(False, 3, 1, logprob)
    calibration.add([(key, logprob)], -1)
    assert -math.inf < calibration.corrected(key, logprob) <= logprob


def test_the_acceptance_rate_begins_sensibly_and_follows_what_the_target_says() -> None:
    measured = AcceptanceRate()
    assert measured.value == pytest.approx(0.7)
    for _ in range(100):
        measured.add(9, is_refused=True)
    assert measured.value == pytest.approx(0.9, abs=0.03)
    for _ in range(100):
        measured.add(1, is_refused=True)
    assert measured.value == pytest.approx(0.5, abs=0.03)


def test_the_acceptance_rate_stays_where_the_theorem_holds() -> None:
    measured = AcceptanceRate()
    for _ in range(1000):
        measured.add(8, is_refused=False)
    assert measured.value == MAX_ACCEPTANCE_RATE
    for _ in range(1000):
        measured.add(0, is_refused=True)
    assert measured.value == MIN_ACCEPTANCE_RATE


def test_a_verdict_on_nothing_changes_nothing() -> None:
    measured = AcceptanceRate()
    before = measured.value
    measured.add(0, is_refused=False)
    assert measured.value == before


@pytest.mark.parametrize("exponent", [0.1, 0.5, 1.0, 2.0])
def test_the_exponent_of_misses_that_follow_a_power_law_is_found(exponent: float) -> None:
    measured, rng = MissExponent(), np.random.default_rng(1)
    found = []
    for uniform in rng.random(4000):
        # The F best are missed with probability (F + 1) ** -r.
        rank = int(min(1e9, max(uniform, 1e-12) ** (-1 / exponent))) - 1
        measured.add(rank if rank < MAX_COUNTED_RANK else None)
        found.append(measured.value)
    # It averages some sixty outcomes, and is drawn towards 1.
    assert np.mean(found[1000:]) == pytest.approx((8 + 64 * exponent) / 72, rel=0.12)


def test_without_outcomes_the_exponent_is_one_and_few_do_not_move_it_far() -> None:
    measured = MissExponent()
    assert measured.value == 1.0
    measured.add(None)
    assert 0.8 < measured.value < 1.0
    for _ in range(500):
        measured.add(None)
    assert measured.value < 0.25
    for _ in range(500):
        measured.add(0)
    assert measured.value > 1.0


def test_fine_classes_tell_small_shares_apart_and_agree_with_the_others_above_one_half() -> None:
    calibration = RetrievalCalibration()
    shares = [0.95, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.0001]
    keys = [calibration.key(Source.RECYCLED, 1, share, is_fine=True) for share in shares]
    assert keys[:2] == [calibration.key(Source.RECYCLED, 1, share) for share in shares[:2]]
    assert [key[2] for key in keys] == [2, 1, -1, -1, -2, -3, -4, -5, -6, -6]
    rates = [calibration.rate(key) for key in keys]
    assert rates == sorted(rates, reverse=True)
    assert calibration.rate(calibration.key(Source.RECYCLED, 1, 0.4)) == rates[2]
    calibration.add(keys[4], True)
    assert calibration.rate(keys[4]) > rates[4]
    assert calibration.rate(keys[5]) == rates[5]
