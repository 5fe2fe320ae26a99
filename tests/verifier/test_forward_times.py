"""What the engine knows of the time of its forwards when it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.core.costs import Contexts
from outrider.models.backend import CPU
from outrider.verifier.service import VerifierService
from outrider.verifier.settings import VerifierSettings
from outrider_client.client import Client
from tests.support.cuda_twins import EAGER_TWIN
from tests.support.services import running_verifier, target_model
from tests.support.tiny_models import build


@pytest.mark.slow
def test_where_forwards_are_filled_up_all_rows_of_one_cost_the_same() -> None:
    runner = EAGER_TWIN.make_runner(build("llama"), num_blocks=16)
    service = VerifierService(VerifierSettings(), replace(target_model(), runner=runner))
    _, told_ms, times = service._load_model(None)
    assert list(told_ms) == [1, 128]
    assert times.of(1) == times.of(128) == told_ms[1]
    assert times.of(129) == 2 * times.of(128)


def test_where_they_are_not_every_number_has_its_own_time() -> None:
    model = replace(target_model(), runner=CPU.make_runner(build("llama"), num_blocks=16))
    _, told_ms, times = VerifierService(VerifierSettings(), model)._load_model(None)
    assert {1, 2, 3, 16, 32} <= told_ms.keys()
    assert all(times.of(rows) == time_ms for rows, time_ms in told_ms.items())


async def test_forwards_are_predicted_behind_the_contexts_of_the_sessions_that_share_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[Contexts | None, Contexts]] = []
    async with running_verifier() as verifier, Client(verifier.address) as client:
        times = verifier.engine.timings.forward_times

        def observe(_num_rows: int, _time_ms: float, contexts: Contexts | None = None) -> None:
            seen.append((contexts, times.contexts))

        monkeypatch.setattr(times, "observe", observe)
        result = await client.complete("def add(a, b):", method="off", max_tokens=4, ignore_eos=True)
    # The first token comes of the prompt's own forward, which says nothing of those that follow.
    expected = [Contexts(result.num_prompt_tokens + index, 1) for index in range(3)]
    assert seen == [(contexts, contexts) for contexts in expected]
