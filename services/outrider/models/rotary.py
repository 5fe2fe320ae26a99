"""The rotary embedding: positions as angles by which pairs of dimensions are turned (RoFormer, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.models.cpu.kernels import Array, as_array


class RotaryTable:
    """Holds the rotary embedding of every position, as complex numbers; grown by doubling."""

    def __init__(self, inv_freq: Tensor, attention_scaling: float) -> None:
        self._inv_freq = inv_freq.float()
        self._scaling = attention_scaling
        self._table = self._compute(1024)
        self._array: Array | None = None

    def up_to(self, last_position: int) -> Tensor:
        """Returns the turns of all positions up to one, and of more: complex64 [positions, head_dim / 2]."""
        if last_position >= self._table.shape[0]:
            # The next power of two: no more than the contexts of most models.
            self._table, self._array = self._compute(1 << last_position.bit_length()), None
        return self._table

    def array_up_to(self, last_position: int) -> Array:
        """Returns the same for the kernels of a CPU: float32 [positions, head_dim / 2, 2], cosines and sines."""
        table = self.up_to(last_position)
        # Kept: every layer asks for it.
        if self._array is None:
            self._array = as_array(torch.view_as_real(table))
        return self._array

    def _compute(self, num_positions: int) -> Tensor:
        positions = torch.arange(num_positions, device=self._inv_freq.device, dtype=torch.float32)
        # As the library computes them: the product rounded to float32 before the cosine.
        angles = positions[:, None] * self._inv_freq
        return torch.complex(angles.cos() * self._scaling, angles.sin() * self._scaling)


def interleave_halves(x: Tensor) -> Tensor:
    """Reorders the last dimension: (0, 1, ..., d-1) to (0, d/2, 1, d/2 + 1, ...)."""
    return x.reshape(*x.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
