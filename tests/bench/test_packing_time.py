"""The rounds whose layout is timed are real rounds: every row has its place, and trees are no chains."""

from __future__ import annotations

import pytest

from outrider_bench.workers.packing_time import FORMS, NUM_ROWS, Round, measure


@pytest.mark.parametrize("form", ["chain", "tree"])
def test_a_round_has_all_rows_of_all_sessions(form: str) -> None:
    round_ = Round(form, 3)
    segments = round_.segments()
    assert [len(segment.token_ids) for segment in segments] == [NUM_ROWS] * 3
    assert all(segment.is_chain == (form == "chain") for segment in segments)
    round_.pack(segments)
    assert round_._packer.num_rows == 3 * NUM_ROWS


def test_a_loop_has_a_row_of_every_session_in_each_step() -> None:
    round_ = Round("loop", 3)
    for _ in range(2):
        segments = round_.segments()
        assert [len(segment.token_ids) for segment in segments] == [1] * 3
        length = segments[0].cache.length
        round_.pack(segments)
        assert all(segment.cache.length == length for segment in segments)
    assert round_._loop is not None
    (steps,) = [each for each in round_._loop._steps.values() if each._taken]
    assert steps.length == NUM_ROWS - 1
    parts = steps._taken[round_._loop._forwards.packer.turn][1]
    assert parts["positions"][:, :3].tolist() == [[length + step] * 3 for step in range(1, NUM_ROWS - 1)]
    # Belongs to no session.
    assert not parts["positions"][:, 3:].any()


@pytest.mark.parametrize("form", FORMS)
def test_making_and_laying_out_take_time(form: str) -> None:
    assert min(measure(form, 2, num_repeats=1)) > 0
