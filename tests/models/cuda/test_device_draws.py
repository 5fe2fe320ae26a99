"""Draws on a GPU equal those on a CPU for the same logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.models.sampling import Sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU with CUDA"),
]

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.3, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1e38, "top_k": 3},
    {"temperature": 1e-30},
]


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(300, 2000), (2048, 1000), (151_936, 200)])
def test_a_gpu_draws_and_ranks_as_a_cpu_does(vocab_size: int, num_rows: int) -> None:
    logits = 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(seed=row, **FILTERS[row % len(FILTERS)]) for row in range(num_rows)]
    indices = [row % 50 for row in range(num_rows)]
    on_gpu = logits.cuda()
    assert Sampler().draw(on_gpu, params, indices) == Sampler().draw(logits, params, indices)
    assert Sampler().candidates(on_gpu, params, indices, 8) == Sampler().candidates(logits, params, indices, 8)
