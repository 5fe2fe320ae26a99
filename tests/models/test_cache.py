"""A session's cache by itself."""

from __future__ import annotations

import pytest
import torch

from outrider.models.packing import CacheShape, KVCache

SHAPE = CacheShape(num_layers=2, num_heads=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))


@torch.inference_mode()
def filled(length: int) -> KVCache:
    """A cache whose slot i holds the number i."""
    cache = KVCache(SHAPE, 4)
    cache.reserve(length)
    cache.slots[:, :length] = torch.arange(length).float().view(1, -1, 1, 1, 1)
    cache.length = length
    return cache


def contents(cache: KVCache) -> list[int]:
    return cache.slots[1, : cache.length, 1, 0, 0].int().tolist()


def test_growing_keeps_what_is_there_and_at_least_doubles() -> None:
    cache = filled(8)
    cache.reserve(9)
    assert cache.capacity == 16
    assert contents(cache) == list(range(8))
    cache.reserve(100)
    assert cache.capacity == 100


def test_truncating_forgets_the_end() -> None:
    cache = filled(8)
    cache.truncate(3)
    assert contents(cache) == [0, 1, 2]


@pytest.mark.parametrize("slots", [[4, 5, 7], [5, 7], [7], [4, 5, 6], []])
def test_keeping_moves_the_slots_together(slots: list[int]) -> None:
    cache = filled(8)
    cache.keep(4, slots)
    assert contents(cache) == [0, 1, 2, 3, *slots]


@pytest.mark.parametrize("slots", [[5, 4], [5, 5], [3], [8]])
def test_keeping_what_is_not_there_is_refused(slots: list[int]) -> None:
    with pytest.raises(ValueError, match=r"ascending and in \[4, 8\)"):
        filled(8).keep(4, slots)


@pytest.mark.parametrize("length", [-1, 9])
def test_truncating_beyond_the_end_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=r"in \[0, 8\]"):
        filled(8).truncate(length)


def test_the_memory_held_is_known() -> None:
    cache = filled(8)
    assert cache.num_bytes == cache.slots.numel() * 4
