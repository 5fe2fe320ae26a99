"""A session's cache in a pool: its slots, its blocks, and prefixes that are found again."""

from __future__ import annotations

import pytest
import torch

from outrider.core.blocks import OutOfBlocks
from outrider.models.kv_cache import TILE, CacheShape, KVCache, KVPool

SHAPE = CacheShape(num_layers=2, num_heads=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))
TEXT = list(range(1000, 1000 + 4 * TILE))


def a_pool(num_blocks: int = 8) -> KVPool:
    return KVPool(SHAPE, num_blocks)


@torch.inference_mode()
def write(cache: KVCache, length: int) -> None:
    """Appends a chain: slot i holds the number i."""
    cache.reserve(cache.length + length)
    slots = torch.arange(cache.length, cache.length + length)
    cache.pool.data[:, :, :, cache.places(slots.numpy())] = slots.float()[:, None]
    cache.append(slots.tolist())


def filled(length: int, pool: KVPool | None = None, salt: str | None = None) -> KVCache:
    cache = (pool or a_pool()).new_cache(salt)
    write(cache, length)
    return cache


def contents(cache: KVCache) -> list[int]:
    slots = torch.arange(cache.length).numpy()
    return cache.pool.data[1, 1, 0, cache.places(slots), 0].int().tolist()


def test_a_cache_holds_the_blocks_of_what_was_said() -> None:
    cache = filled(TILE)
    assert cache.num_blocks == 1
    write(cache, 1)
    assert cache.num_blocks == 2
    assert contents(cache) == list(range(TILE + 1))


@pytest.mark.parametrize(("first", "count"), [(0, 1), (TILE - 1, 1), (TILE, 1), (5, 3 * TILE), (0, 4 * TILE), (7, 0)])
def test_a_run_of_slots_lies_where_each_of_them_does(first: int, count: int) -> None:
    cache = filled(4 * TILE)
    cache._table.reverse()  # scattered, as after other sessions
    slots = torch.arange(first, first + count).numpy()
    assert cache.chain_places(first, count) == cache.places(slots).tolist()


def test_truncating_forgets_the_end_and_gives_its_blocks_back() -> None:
    cache = filled(3 * TILE)
    cache.truncate(3)
    assert contents(cache) == [0, 1, 2]
    assert cache.pool.blocks.num_held == 1


@pytest.mark.parametrize("slots", [[4, 5, 7], [5, 7], [7], [4, 5, 6], []])
def test_keeping_moves_the_slots_together(slots: list[int]) -> None:
    cache = filled(8)
    cache.keep(4, slots)
    assert contents(cache) == [0, 1, 2, 3, *slots]


def test_keeping_moves_slots_over_the_end_of_a_block() -> None:
    cache = filled(2 * TILE)
    cache.keep(TILE - 2, [TILE + 5, TILE + 6, TILE + 9])
    assert contents(cache)[-4:] == [TILE - 3, TILE + 5, TILE + 6, TILE + 9]


@pytest.mark.parametrize("slots", [[5, 4], [5, 5], [3], [8]])
def test_keeping_what_is_not_there_is_refused(slots: list[int]) -> None:
    with pytest.raises(ValueError, match=r"ascending and in \[4, 8\)"):
        filled(8).keep(4, slots)


@pytest.mark.parametrize("length", [-1, 9])
def test_truncating_beyond_the_end_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=r"in \[0, 8\]"):
        filled(8).truncate(length)


def test_slots_that_do_not_hold_their_own_position_are_known_as_the_tail() -> None:
    cache = filled(8)
    cache.reserve(12)
    cache.append([8, 8, 9, 9])
    assert (cache.chain_len, cache.tail_positions) == (9, [8, 9, 9])
    cache.keep(8, [9, 10])
    assert (cache.chain_len, cache.tail_positions) == (10, [])


@pytest.mark.parametrize("size", [0, -64, 63, 100])
def test_a_block_that_is_no_multiple_of_a_tile_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size must be a positive multiple of 64, got {size}"):
        KVPool(SHAPE, 8, size)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block, got 0"):
        KVPool(SHAPE, 0)


def test_a_cache_that_finds_no_room_keeps_what_it_has() -> None:
    pool = a_pool(2)
    cache = filled(TILE, pool)
    with pytest.raises(OutOfBlocks):
        cache.reserve(3 * TILE)
    assert contents(cache) == list(range(TILE))


def test_a_published_prefix_is_found_but_for_its_last_token() -> None:
    pool = a_pool()
    first = filled(3 * TILE + 5, pool, "a")
    first.publish(TEXT)
    second = pool.new_cache("a")
    assert second.find_prefix(TEXT[: 3 * TILE]) == 2 * TILE
    assert contents(second) == list(range(2 * TILE))
    third = pool.new_cache("a")
    assert third.find_prefix([*TEXT[: 2 * TILE + 1], *TEXT[: 2 * TILE]]) == 2 * TILE


@pytest.mark.parametrize("salt", ["b", "", None])
def test_a_prefix_of_another_salt_is_not_found(salt: str | None) -> None:
    pool = a_pool()
    filled(3 * TILE, pool, "a").publish(TEXT)
    assert pool.new_cache(salt).find_prefix(TEXT) == 0


def test_a_text_that_is_to_be_run_as_a_whole_finds_nothing_and_is_found() -> None:
    pool = a_pool()
    filled(3 * TILE, pool, "a").publish(TEXT)
    whole = pool.new_cache("a")
    whole.finds = False
    assert whole.find_prefix(TEXT) == 0
    assert pool.new_cache("a").find_prefix(TEXT) == 3 * TILE
    alone = pool.new_cache("b")
    alone.finds = False
    alone.reserve(2 * TILE)
    alone.append(range(2 * TILE))
    alone.publish(TEXT)
    assert pool.new_cache("b").find_prefix(TEXT) == 2 * TILE


def test_a_prefix_outlives_the_session_that_published_it() -> None:
    pool = a_pool()
    first = filled(2 * TILE, pool, "a")
    first.publish(TEXT)
    first.clear()
    assert (pool.blocks.num_held, pool.blocks.num_cached) == (0, 2)
    second = pool.new_cache("a")
    assert second.find_prefix(TEXT) == 2 * TILE
    assert contents(second) == list(range(2 * TILE))


def test_who_goes_on_inside_a_shared_block_writes_to_a_copy() -> None:
    pool = a_pool()
    first = filled(2 * TILE, pool, "a")
    first.publish(TEXT)
    second = pool.new_cache("a")
    second.find_prefix(TEXT)
    second.truncate(TILE + 3)
    second.reserve(TILE + 4)
    with torch.inference_mode():
        pool.data[:, :, :, second.places(torch.tensor([TILE + 3]).numpy())] = -1.0
    second.append([TILE + 3])
    assert contents(second) == [*range(TILE + 3), -1]
    assert contents(first) == list(range(2 * TILE))


def test_several_texts_of_one_prompt_share_its_blocks_and_each_goes_on_in_a_copy() -> None:
    pool = a_pool()
    first = filled(TILE + 20, pool)
    others = [pool.new_cache() for _ in range(2)]
    for other in others:
        other.join(first, TILE + 9)
        assert contents(other) == list(range(TILE + 9))
    assert pool.blocks.num_held == 2
    with torch.inference_mode():
        for number, cache in enumerate((*others, first), start=1):
            cache.reserve(cache.length + 1)
            pool.data[:, :, :, cache.places(torch.arange(cache.length, cache.length + 1).numpy())] = -float(number)
            cache.append([cache.length])
    assert contents(first) == [*range(TILE + 20), -3]
    assert [contents(other)[-1] for other in others] == [-1, -2]
    for cache in (first, *others):
        cache.clear()
    assert pool.blocks.num_held == 0


def test_a_cache_takes_nothing_over_that_the_other_one_does_not_hold() -> None:
    pool = a_pool()
    cache = filled(5, pool)
    cache.join(filled(9, pool), 4)  # `cache` already holds more
    cache.join(filled(9, pool), 10)  # the other one has lost its blocks, or never had them
    assert contents(cache) == list(range(5))


def test_a_tree_is_not_published() -> None:
    pool = a_pool()
    cache = filled(TILE - 1, pool, "a")
    cache.reserve(TILE + 2)
    cache.append([TILE, TILE - 1, TILE])
    cache.publish(TEXT)
    assert pool.new_cache("a").find_prefix(TEXT) == 0


def test_what_a_dropped_cache_held_comes_back_when_blocks_are_taken_and_not_in_the_middle_of_that() -> None:
    pool = a_pool(num_blocks=2)
    dropped = filled(2 * TILE, pool)
    del dropped
    # The garbage collector may have dropped it in any thread, while the engine's own goes through the free blocks.
    assert pool.blocks.num_held == 2
    assert contents(filled(2 * TILE, pool)) == list(range(2 * TILE))
