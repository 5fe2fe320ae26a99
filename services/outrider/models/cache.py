"""One session's keys and values, and the cheap ways to forget a part of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one slot of a cache holds: a key and a value for every layer and every key-value head."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_slot(self) -> int:
        """Size of one slot, in bytes."""
        return self.num_layers * 2 * self.num_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """One session's keys and values of one model: a preallocated tensor that grows by doubling.

    Slot i of a chain holds position i. The slots of a tree follow those of the trunk, in the order of their rows.
    """

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        self.length = 0
        """Slots used."""
        self.shape = shape
        self._data = self._allocate(max(1, capacity))
        self._set_views()

    def _set_views(self) -> None:
        self.slots = self._data.transpose(1, 2)
        """[layers, capacity, 2, heads, head_dim]: key and value of every slot."""
        self.heads = self._data.flatten(0, 1).transpose(1, 2).unsqueeze(1)
        """[2 * layers, 1, heads, capacity, head_dim]: for each layer its keys, then its values. The same memory."""

    @property
    def capacity(self) -> int:
        """Slots that fit without growing."""
        return self._data.shape[2]

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return self.capacity * self.shape.bytes_per_slot

    def truncate(self, length: int) -> None:
        """Forgets everything from slot `length` on. Takes constant time.

        Raises:
            ValueError: `length` is negative or more than the slots used.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be in [0, {self.length}], got {length}")
        self.length = length

    @torch.inference_mode()
    def keep(self, start: int, slots: Sequence[int]) -> None:
        """Moves the rows at `slots` together behind slot `start`, and forgets all others from `start` on.

        Args:
            start: Slots before it stay as they are.
            slots: Ascending, none below `start`: the path that was accepted, out of a tree that began at `start`.

        Raises:
            ValueError: `slots` are not ascending or not all in [start, length).
        """
        bounds = [start - 1, *slots, self.length]
        if start < 0 or any(a >= b for a, b in pairwise(bounds)):
            raise ValueError(f"slots must be ascending and in [{start}, {self.length}), got {list(slots)}")
        # A path that begins with the first rows of the tree, as the best one often does, is in its place already.
        first = next((i for i, slot in enumerate(slots) if slot != start + i), len(slots))
        moved = slots[first:]
        if moved:
            rows = self.slots[:, torch.tensor(moved, device=self.shape.device)]
            self.slots[:, start + first : start + len(slots)] = rows
        self.length = start + len(slots)

    @torch.inference_mode()
    def reserve(self, num_slots: int) -> None:
        """Makes room for `num_slots` slots in total."""
        if num_slots > self.capacity:
            grown = self._allocate(max(num_slots, 2 * self.capacity))
            grown[:, :, : self.length] = self._data[:, :, : self.length]
            self._data = grown
            self._set_views()

    def _allocate(self, capacity: int) -> Tensor:
        s = self.shape
        return torch.empty(s.num_layers, 2, capacity, s.num_heads, s.head_dim, dtype=s.dtype, device=s.device)
