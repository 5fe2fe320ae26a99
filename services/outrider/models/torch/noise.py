"""The Gumbel noise of whole rows: computed in torch for any device, and cached."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from outrider.core.noise import FMIX32, LOWBIAS32, gumbel_rows, row_key

BLOCK_ENTRIES = 32_768
"""Token entries of a block: 16 output indices of a vocabulary of 2048 tokens, one of a large vocabulary."""
MAX_BLOCK_ROWS = 16


class NoiseRows:
    """Computes the noise of whole rows, for one vocabulary size and device, and caches it.

    Output indices are drawn in order, and again after a rejected draft. So a block of consecutive indices is computed
    in one go (a row of 2048 costs 26 us alone and 10 us in a block of 16), and the blocks used last are kept.
    """

    def __init__(self, vocab_size: int, device: torch.device, *, capacity_bytes: int = 64 * 2**20) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._block_rows = max(1, min(MAX_BLOCK_ROWS, BLOCK_ENTRIES // vocab_size))
        self._capacity = max(2, capacity_bytes // (4 * self._block_rows * vocab_size))
        self._blocks: OrderedDict[tuple[int, int], tuple[Tensor, ...]] = OrderedDict()
        self._token_ids = np.arange(vocab_size)

    def row(self, seed: int, output_index: int) -> Tensor:
        """Returns the Gumbel noise of every token at one output index: float32 [vocab]. Shared: do not write to it."""
        number, offset = divmod(output_index, self._block_rows)
        block = self._blocks.get((seed, number))
        if block is None:
            block = self._blocks[seed, number] = self._compute(seed, number)
            if len(self._blocks) > self._capacity:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end((seed, number))
        return block[offset]

    def _compute(self, seed: int, number: int) -> tuple[Tensor, ...]:
        indices = range(number * self._block_rows, (number + 1) * self._block_rows)
        if self._device.type == "cpu":
            # numpy has the unsigned 32-bit words that torch lacks, and less overhead a call.
            rows = torch.from_numpy(gumbel_rows(seed, indices, self._token_ids))
        else:
            rows = torch.stack([gumbel_tensor(seed, index, self._vocab_size, self._device) for index in indices])
        return rows.unbind(0)


def hash_tensor(seed: int, output_index: int, vocab_size: int, device: torch.device) -> Tensor:
    """Computes one row of `outrider.core.noise.hash_rows` for the ids 0 .. vocab_size-1: int64 [vocab], below 2**32."""
    first, second = row_key(seed, output_index)
    words = _finalise(torch.arange(vocab_size, device=device) ^ first, LOWBIAS32)
    return _finalise(words ^ second, FMIX32)


def gumbel_tensor(seed: int, output_index: int, vocab_size: int, device: torch.device) -> Tensor:
    """`outrider.core.noise.gumbel` of the ids 0 .. vocab_size-1, in torch: float32 [vocab]."""
    # In float64 like `outrider.core.noise.gumbel`: in float32 the largest hashes would become infinite noise.
    uniform = (hash_tensor(seed, output_index, vocab_size, device).double() + 0.5) * 2.0**-32
    return (-torch.log(-torch.log(uniform))).float()


def _finalise(words: Tensor, constants: tuple[int, int, int, int, int]) -> Tensor:
    """Applies one round of the hash to int64 words below 2**32."""
    first, factor, second, factor_2, third = constants
    # Torch has no unsigned words: products wrap at 64 bits, which leaves their low 32 bits right.
    words = ((words ^ (words >> first)) * factor) & 0xFFFFFFFF
    words = ((words ^ (words >> second)) * factor_2) & 0xFFFFFFFF
    return words ^ (words >> third)
