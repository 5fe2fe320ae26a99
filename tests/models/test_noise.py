"""Noise of whole rows: the same bits in torch and numpy, and from a cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.core.noise import gumbel, hash_rows
from outrider.models.torch.noise import NoiseRows, gumbel_tensor, hash_tensor

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_torch_and_numpy_hash_to_the_same_bits(seed: int) -> None:
    for index in (0, 1, 4095):
        expected = hash_rows(seed, [index], np.arange(5000))[0].astype(np.int64)
        assert (hash_tensor(seed, index, 5000, CPU).numpy() == expected).all()
        assert (gumbel_tensor(seed, index, 5000, CPU).numpy() == gumbel(seed, index, np.arange(5000))).all()


@pytest.mark.parametrize("vocab_size", [50, 2048, 151_936])
def test_noise_rows_are_the_noise_of_their_index(vocab_size: int) -> None:
    rows = NoiseRows(vocab_size, CPU, capacity_bytes=1)
    for index in (0, 15, 16, 1000, 3, 0):
        assert (rows.row(6, index).numpy() == gumbel(6, index, np.arange(vocab_size))).all()
