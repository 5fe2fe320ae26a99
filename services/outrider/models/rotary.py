"""The rotary embedding: turns pairs of dimensions by angles that depend on the position (RoFormer, section 3.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RotaryTable:
    """Holds the rotary embedding of every position, as complex numbers; grown by doubling."""

    def __init__(self, inv_freq: Tensor, attention_scaling: float) -> None:
        self._inv_freq = inv_freq.float()
        self._scaling = attention_scaling
        self._table = self._compute(1024)

    def up_to(self, last_position: int) -> Tensor:
        """Returns the turns of all positions up to `last_position`, and maybe of more: complex64 [positions, head_dim /
        2]."""
        if last_position >= self._table.shape[0]:
            # The next power of two: no more than the contexts of most models.
            self._table = self._compute(1 << last_position.bit_length())
        return self._table

    def _compute(self, num_positions: int) -> Tensor:
        positions = torch.arange(num_positions, device=self._inv_freq.device, dtype=torch.float32)
        # As in the library: the product is rounded to float32 before the cosine.
        angles = positions[:, None] * self._inv_freq
        return torch.complex(angles.cos() * self._scaling, angles.sin() * self._scaling)


def interleave_halves(x: Tensor) -> Tensor:
    """Reorders the last dimension: (0, 1, ..., d-1) to (0, d/2, 1, d/2 + 1, ...)."""
    return x.reshape(*x.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)


def interleaved_norms(module: Any, num_queries: int, num_keys: int, dtype: torch.dtype) -> Tensor:
    """Returns the weights of the norms of queries and keys: [queries and keys, head_dim], halves interleaved.

    The mean of a head's squares does not depend on the order of its dimensions, but the weights must follow it.
    """
    queries, keys = (interleave_halves(norm.weight.to(dtype)) for norm in (module.q_norm, module.k_norm))
    return torch.cat([queries.expand(num_queries, -1), keys.expand(num_keys, -1)])
