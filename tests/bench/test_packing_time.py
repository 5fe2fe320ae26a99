"""The rounds whose layout is timed are rounds: every row has its place, and trees are no chains."""

from __future__ import annotations

import pytest

from outrider_bench.workers.packing_time import FORMS, NUM_ROWS, Round, measure


@pytest.mark.parametrize("form", FORMS)
def test_a_round_has_all_rows_of_all_sessions(form: str) -> None:
    round_ = Round(form, 3)
    segments = round_.segments()
    assert [len(segment.token_ids) for segment in segments] == [NUM_ROWS] * 3
    assert all(segment.is_chain == (form == "chain") for segment in segments)
    round_.pack(segments)
    assert round_._packer.num_rows == 3 * NUM_ROWS
    assert min(measure(form, 2, num_repeats=1)) > 0
