"""Chains judged on a GPU get the tokens that a CPU gives them for the same logits."""

from __future__ import annotations

import pytest
import torch

from outrider.models.acceptance import judge
from outrider.models.sampling import Sampler
from tests.support.ratio_cases import FILTERS, random_round

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU with CUDA"),
]


@pytest.mark.parametrize(("vocab_size", "num_rounds"), [(300, 40), (2048, 20), (151_936, 5)])
def test_a_gpu_keeps_and_draws_what_a_cpu_does(vocab_size: int, num_rounds: int) -> None:
    num_chains = num_equal = 0
    for seed in range(num_rounds):
        logits, of_round = random_round(seed, 4 * FILTERS, vocab_size=vocab_size, is_coarse=seed % 2 == 1)
        found = judge(Sampler(), logits.cuda(), of_round), judge(Sampler(), logits, of_round)
        num_chains += len(of_round)
        num_equal += sum(one == other for one, other in zip(*found, strict=True))
    # p is of float32, so now and then a uniform falls between the two results.
    assert num_equal >= num_chains - max(1, num_chains // 1000)
