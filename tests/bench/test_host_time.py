"""What a round costs the host: the stub models draft and verify as real ones do."""

from __future__ import annotations

import pytest

from outrider_bench.workers.host_time import WAYS, measure

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("way", WAYS)
async def test_drafts_of_the_stub_are_right_and_the_time_of_each_process_is_told(way: str) -> None:
    cost = await measure(way, num_sessions=1, num_tokens=60)
    # On a busy machine a round may not wait until the chain of 5 is there.
    assert cost.tokens == 1 if way == "off" else 1 < cost.tokens <= 6
    assert cost.wall_ms > 0
    assert 0 < cost.engine_cpu_ms < cost.verifier_cpu_ms
    assert cost.verifier_cpu_ms > 0
    assert way == "speculator" or cost.speculator_cpu_ms == 0
