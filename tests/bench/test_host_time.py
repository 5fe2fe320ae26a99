"""The host's cost of a round: the stub models draft and verify as real ones do."""

from __future__ import annotations

import pytest

from outrider_bench.workers.host_time import WAYS, main, measure


def test_a_way_that_there_is_not_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["host_time", "--ways", "off,on"])
    with pytest.raises(SystemExit):
        main()
    assert "--ways must be of alone, off, speculator, in-process, got on" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_drafts_of_the_stub_are_right_and_the_time_of_each_process_is_told(way: str) -> None:
    cost = await measure(way, num_sessions=1, num_tokens=60, forward_ms=2.0)
    # On a busy machine a round may not wait until the chain of 5 is there.
    assert 1 < cost.tokens <= 6 if way in {"speculator", "in-process"} else cost.tokens == 1
    assert cost.wall_ms >= 2.0
    if cost.tokens == 1:
        assert 0 <= cost.gap_ms < cost.wall_ms
    assert 0 < cost.engine_cpu_ms < 1.1 * cost.verifier_cpu_ms
    assert way == "speculator" or cost.speculator_cpu_ms == 0
