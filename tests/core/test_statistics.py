"""Counts and means."""

from __future__ import annotations

import pytest

from outrider.core.params import Source
from outrider.core.statistics import Counts, RoundTime, RunningMean, Statistics


def test_the_acceptance_length_counts_the_next_token() -> None:
    statistics = Statistics()
    assert statistics.mean_acceptance_length == 0
    statistics.count_round(4, [Source.DRAFT, Source.DRAFT, Source.RING], is_hit=True)
    statistics.count_round(0, [], is_hit=False)
    assert statistics.mean_acceptance_length == 1 + 3 / 2
    assert (statistics.num_empty_rounds, statistics.num_hits, statistics.num_drafted_tokens) == (1, 1, 4)
    assert statistics.accepted_by_source == {Source.DRAFT: 2, Source.RING: 1}


def test_what_a_generation_counts_is_counted_in_the_totals() -> None:
    totals = Counts()
    first, second = Statistics(totals=totals), Statistics(totals=totals)
    first.count_round(4, [Source.DRAFT], is_hit=True)
    second.count_round(2, [Source.DRAFT, Source.RING], is_hit=False)
    second.add(num_speculator_losses=1)
    assert (first.num_rounds, first.num_speculator_losses) == (1, 0)
    assert (totals.num_rounds, totals.num_drafted_tokens, totals.num_speculator_losses) == (2, 6, 1)
    assert totals.accepted_by_source == {Source.DRAFT: 2, Source.RING: 1}


def test_a_count_that_is_not_declared_is_refused() -> None:
    with pytest.raises(AttributeError, match="num_rouns"):
        Statistics().add(num_rouns=1)


def test_overhead_is_what_neither_forward_nor_waiting_explains() -> None:
    assert RoundTime(round_ms=12.0, forward_ms=9.0, wait_ms=2.0).overhead_ms == pytest.approx(1.0)
    assert RoundTime(round_ms=10.0, forward_ms=9.0, wait_ms=2.0).overhead_ms == 0


def test_a_running_mean_starts_at_its_first_value_and_forgets_slowly() -> None:
    mean = RunningMean(0.25)
    assert mean.get(default=7.0) == 7.0
    mean.add(4.0)
    assert mean.value == 4.0
    mean.add(8.0)
    assert mean.value == 5.0
