"""The rotary embedding: positions as angles by which pairs of dimensions are turned (RoFormer, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryTable:
    """Holds the rotary embedding of every position, as complex numbers; grown by doubling."""

    def __init__(self, inv_freq: Tensor, attention_scaling: float) -> None:
        self._inv_freq = inv_freq.float()
        self._scaling = attention_scaling
        self._table = self._compute(1024)

    def up_to(self, last_position: int) -> Tensor:
        """Returns the turns of all positions up to one, and of more: complex64 [positions, head_dim / 2]."""
        if last_position >= self._table.shape[0]:
            # The last position is at least 1024 here, so twice as many positions include it.
            self._table = self._compute(2 * last_position)
        return self._table

    def _compute(self, num_positions: int) -> Tensor:
        positions = torch.arange(num_positions, device=self._inv_freq.device, dtype=torch.float32)
        # As the library computes them: the product rounded to float32 before the cosine.
        angles = positions[:, None] * self._inv_freq
        return torch.complex(angles.cos() * self._scaling, angles.sin() * self._scaling)


def interleave_halves(x: Tensor) -> Tensor:
    """Reorders the last dimension: (0, 1, ..., d-1) to (0, d/2, 1, d/2 + 1, ...)."""
    return x.reshape(*x.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
