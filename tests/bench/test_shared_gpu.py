"""A GPU that both models share, simulated: the stubs draft as real models do, and methods differ as they should."""

from __future__ import annotations

import time
from typing import Any

import pytest

from outrider.core.params import SamplingParams
from outrider.models.packing import Segment
from outrider_bench.workers.shared_gpu import WAYS, SharedDevice, main, measure, models


def device() -> SharedDevice:
    return SharedDevice(forward_ms=4.0, row_us=0.0, draft_ms=1.0, draft_row_us=0.0, slowed=5.0)


def test_a_way_that_there_is_not_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["shared_gpu", "--ways", "off,on"])
    with pytest.raises(SystemExit):
        main()
    error = capsys.readouterr().err
    assert (
        "--ways must be of off, speculative, opt-tree, best-first, ahead, auto, retrieval, retrieving, got on" in error
    )


def test_a_step_beside_a_forward_is_slow_and_makes_it_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + max(seconds, 1e-5)))
    alone = device()
    alone.wait(alone.begin_steps(1, 2))
    assert (now[0] - 100.0) * 1e3 == pytest.approx(2.0, abs=0.05)
    shared = device()
    shared.begin(1)
    began, free_at = now[0], shared.free_at
    shared.wait(shared.begin_steps(1, 2))
    # 4 ms next to the forward complete .8 of 2 ms; the rest comes after it.
    assert (now[0] - began) * 1e3 == pytest.approx(4.0 + 1.2, abs=0.05)
    assert (shared.free_at - free_at) * 1e3 == pytest.approx(0.8)
    assert (alone.num_steps, shared.num_steps) == (2, 2)


@pytest.mark.parametrize("hard", [0.0, 0.3, 1.0])
def test_the_draft_model_is_wrong_where_a_token_is_hard(hard: float) -> None:
    target, draft = (model.runner._table.argmax(1) for model in models(device(), hard))  # type: ignore[attr-defined]
    assert (target != draft).float().mean().item() == pytest.approx(hard, abs=0.05)


def test_a_loop_of_more_rows_than_fit_at_once_finds_for_each_session_what_follows_its_own_token() -> None:
    shared = device()
    _, draft = models(shared, hard=0.0)
    runner: Any = draft.runner
    segments = [Segment(runner.new_cache(), [7] * 4 + [10 + number], 1) for number in range(40)]
    found = runner.draft(segments, [SamplingParams(temperature=0.0)] * 40, [0] * 40, 4)
    best = runner._table.argmax(1)
    for number, steps in enumerate(found):
        token_id = 10 + number
        for ids, _ in steps:
            token_id = int(best[token_id])
            assert ids[0] == token_id
    # 128 rows are the rows of 25 sessions.
    assert shared.num_steps == 2 * 4


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_every_way_drafts_what_it_should(way: str) -> None:
    pace = await measure(WAYS[way], device(), num_sessions=2, num_tokens=60, hard=0.2)
    assert pace.forward_ms >= 4.0
    assert (pace.steps_per_forward > 0) == (way not in {"off", "retrieval"})
    if way in {"speculative", "opt-tree", "best-first"}:
        assert pace.tokens_per_round > 1.5
