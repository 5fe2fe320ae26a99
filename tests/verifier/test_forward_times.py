"""What the engine knows of the time of its forwards when it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.models.runner import Runner
from outrider.verifier.service import VerifierService
from outrider.verifier.settings import VerifierSettings
from tests.support.cuda_twins import EAGER_TWIN
from tests.support.services import target_model
from tests.support.tiny_models import build


@pytest.mark.slow
def test_where_forwards_are_filled_up_all_rows_of_one_cost_the_same() -> None:
    runner = Runner(build("llama"), use_kernels=False, num_blocks=16, acceleration=EAGER_TWIN)
    service = VerifierService(VerifierSettings(), replace(target_model(), runner=runner))
    _, told_ms, times = service._load_model(None)
    assert list(told_ms) == [1, 128]
    assert times.of(1) == times.of(128) == told_ms[1]
    assert times.of(129) == 2 * times.of(128)


def test_where_they_are_not_every_number_has_its_own_time() -> None:
    model = replace(target_model(), runner=Runner(build("llama"), num_blocks=16))
    _, told_ms, times = VerifierService(VerifierSettings(), model)._load_model(None)
    assert {1, 2, 3, 16, 32} <= told_ms.keys()
    assert all(times.of(rows) == time_ms for rows, time_ms in told_ms.items())
