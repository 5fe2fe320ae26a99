"""Noise rows as tensors: computed in blocks ahead of their use, and kept for a while."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from outrider.core.noise import FMIX32, LOWBIAS32, gumbel_rows, row_key

#: A block covers this many token entries: 16 output indices of a 2048-token vocabulary, one of a large one.
BLOCK_ENTRIES = 32_768
MAX_BLOCK_ROWS = 16


class NoiseRows:
    """The noise of whole rows, for one vocabulary size and device.

    Output indices are drawn in order, and again after a rejected draft. So a block of consecutive indices is
    computed in one go (a row of 2048 costs 26 us alone and 10 us in a block of 16) and the blocks
    used last are kept.
    """

    def __init__(self, vocab_size: int, device: torch.device, *, capacity_bytes: int = 64 * 2**20) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._block_rows = max(1, min(MAX_BLOCK_ROWS, BLOCK_ENTRIES // vocab_size))
        self._capacity = max(2, capacity_bytes // (4 * self._block_rows * vocab_size))
        self._blocks: OrderedDict[tuple[int, int], tuple[Tensor, ...]] = OrderedDict()
        self._token_ids = np.arange(vocab_size)

    def row(self, seed: int, output_index: int) -> Tensor:
        """Gumbel noise of every token at one output index: float32 [vocab]. Shared: do not write to it."""
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
            # numpy has the 32-bit words that torch lacks, and less overhead a call.
            rows = torch.from_numpy(gumbel_rows(seed, indices, self._token_ids))
        else:
            rows = torch.stack([gumbel_tensor(seed, index, self._vocab_size, self._device) for index in indices])
        return rows.unbind(0)


def hash_tensor(seed: int, output_index: int, vocab_size: int, device: torch.device) -> Tensor:
    """`outrider.core.noise.hash_tokens` of the ids 0 .. vocab_size-1, in torch: int64 [vocab], below 2**32."""
    first, second = row_key(seed, output_index)
    words = _finalise(torch.arange(vocab_size, device=device) ^ first, LOWBIAS32)
    return _finalise(words ^ second, FMIX32)


def gumbel_tensor(seed: int, output_index: int, vocab_size: int, device: torch.device) -> Tensor:
    """`outrider.core.noise.gumbel` of the ids 0 .. vocab_size-1, in torch: float32 [vocab]."""
    uniform = (hash_tensor(seed, output_index, vocab_size, device).double() + 0.5) * 2.0**-32
    return (-torch.log(-torch.log(uniform))).float()


def _finalise(words: Tensor, constants: tuple[int, int, int, int, int]) -> Tensor:
    """One round. Products wrap at 64 bits, which leaves their low 32 bits right."""
    first, factor, second, factor_2, third = constants
    words = ((words ^ (words >> first)) * factor) & 0xFFFFFFFF
    words = ((words ^ (words >> second)) * factor_2) & 0xFFFFFFFF
    return words ^ (words >> third)
