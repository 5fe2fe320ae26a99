"""The inputs of a forward on a GPU: paths match the segments, and one copy brings everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.models.cuda.inputs import SPLIT, Inputs, Packer, Shape, parts_of, share_work, share_work_of_steps, tile_of
from outrider.models.kv_cache import CacheShape, KVPool
from outrider.models.packing import Segment

SHAPE = CacheShape(num_layers=1, num_heads=1, head_dim=4, dtype=torch.float32, device=torch.device("cpu"))


def a_tree(data: st.DataObject, pool: KVPool) -> Segment:
    """Random rows of a tree, of which the first may be committed tokens, after a trunk of random length."""
    cache = pool.new_cache()
    length = data.draw(st.integers(0, 150), label="trunk")
    num_pending = data.draw(st.integers(1, 4), label="pending")
    num_rows = num_pending + data.draw(st.integers(0, 20), label="nodes")
    cache.reserve(length + num_rows)
    if length:
        cache.append(range(length))
    visible = np.zeros((num_rows, length + num_rows), dtype=np.bool_)
    for row in range(num_rows):
        parent = row - 1 if row < num_pending else data.draw(st.integers(num_pending - 1, row - 1))
        visible[row, :length] = True
        if row:
            visible[row] |= visible[parent]
        visible[row, length + row] = True
    return Segment(cache, list(range(num_rows)), 0, (visible.sum(1) - 1).tolist(), visible)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), queries_per_key=st.sampled_from([1, 4, 16]))
def test_every_row_is_in_one_tile_and_sees_what_its_segment_says(data: st.DataObject, queries_per_key: int) -> None:
    pool = KVPool(SHAPE, 32, num_scratch_slots=1)
    segments = [a_tree(data, pool) for _ in range(data.draw(st.integers(1, 3)))]
    shape = Shape(128)
    packer = Packer(pool, queries_per_key, [shape], 512)
    inputs = Inputs(packer.buffer, shape)
    packer.begin(shape)
    expected = []
    for segment in segments:
        assert segment.position_ids is not None
        # In two pieces: what does not fit into a forward comes in the next, and finds the first in the pool.
        cut = data.draw(st.integers(0, len(segment.token_ids) - 1), label="cut")
        for first, last in ((0, cut), (cut, len(segment.token_ids))):
            assert first == last or packer.add(segment, segment.position_ids, first, last)
        expected += [segment.cache.places(np.flatnonzero(seen)).tolist() for seen in segment.seen()]
    packer.finish([])
    found: dict[int, list[int]] = {}
    num_tiles = len({tile for tile, _ in inputs.work[: int(inputs.num_work[0])].tolist()})
    for first, count, table, root, tail, _ in inputs.tiles[:num_tiles].tolist():
        assert count <= tile_of(queries_per_key) // queries_per_key
        for row in inputs.row_list[first : first + count].tolist():
            assert row not in found
            found[row] = [
                int(inputs.tables[table + p // 64]) * 64 + p % 64 if p < root else int(inputs.tails[tail + p - root])
                for p in range(int(inputs.positions[row]) + 1)
            ]
    assert [found[row] for row in range(len(expected))] == expected
    # The other rows belong to no session, and are written where nothing reads.
    assert set(inputs.places[len(expected) :].tolist()) == {pool.num_slots}


def test_the_heaviest_child_goes_on_with_the_path() -> None:
    pool = KVPool(SHAPE, 4, num_scratch_slots=1)
    cache = pool.new_cache()
    cache.reserve(8)
    # Row 0 has the children 1 and 2, and row 2 the child 3.
    visible = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=np.bool_)
    shape = Shape(16)
    packer = Packer(pool, 1, [shape], 64)
    inputs = Inputs(packer.buffer, shape)
    packer.begin(shape)
    assert packer.add(Segment(cache, [5, 6, 7, 8], 0, [0, 1, 1, 2], visible), [0, 1, 1, 2], 0, 4)
    packer.finish([3])
    assert inputs.row_list[:4].tolist() == [0, 2, 3, 1]
    assert inputs.token_ids[:5].tolist() == [5, 6, 7, 8, 0]
    assert inputs.wanted[:2].tolist() == [3, 0]


def test_a_row_that_does_not_see_every_position_before_its_own_is_refused() -> None:
    pool = KVPool(SHAPE, 4, num_scratch_slots=1)
    cache = pool.new_cache()
    cache.reserve(8)
    visible = np.array([[1, 0], [0, 1]], dtype=np.bool_)
    packer = Packer(pool, 1, [Shape(16)], 64)
    packer.begin(Shape(16))
    with pytest.raises(ValueError, match="one slot for every position"):
        packer.add(Segment(cache, [1, 2], 0, [0, 1], visible), [0, 1], 0, 2)


def test_a_row_beside_a_node_that_has_been_through_a_forward_does_not_see_it() -> None:
    pool = KVPool(SHAPE, 4, num_scratch_slots=1)
    cache = pool.new_cache()
    cache.reserve(4)
    # The third slot holds a draft, at the position that a committed token would have.
    cache.append(range(3))
    shape = Shape(16)
    packer = Packer(pool, 1, [shape], 64)
    inputs = Inputs(packer.buffer, shape)
    packer.begin(shape)
    visible = np.array([[1, 1, 0, 1]], dtype=np.bool_)
    assert packer.add(Segment(cache, [7], 0, [2], visible), [2], 0, 1)
    packer.finish([])
    _, _, table, root, tail, end = inputs.tiles[0].tolist()
    assert (root, end) == (2, 3)
    assert [int(inputs.tables[table]), int(inputs.tails[tail])] == [0, int(cache.places(np.array([3]))[0])]


def test_what_does_not_fit_changes_nothing() -> None:
    pool = KVPool(SHAPE, 4, num_scratch_slots=1)
    packer = Packer(pool, 1, [Shape(16)], 64)
    packer.begin(Shape(16))
    cache = pool.new_cache()
    cache.reserve(17)
    segment = Segment(cache, list(range(17)), 0)
    assert not packer.add(segment, range(17), 0, 17)
    assert packer.num_rows == 0
    assert packer.add(segment, range(17), 0, 16)


@pytest.mark.parametrize(("num_rows", "splits"), [(63, [0, 1]), (64, [-1])])
def test_splits_of_many_tiles_are_not_shared_among_programs(num_rows: int, splits: list[int]) -> None:
    pool = KVPool(SHAPE, 8, num_scratch_slots=1)
    cache, shape = pool.new_cache(), Shape(64)
    cache.reserve(264 + num_rows)
    cache.append(range(264))
    packer = Packer(pool, 64, [shape], 512)
    inputs = Inputs(packer.buffer, shape)
    packer.begin(shape)
    # With 64 query heads per key-value head, each row is a tile.
    assert packer.add(Segment(cache, [0] * num_rows, 0), range(264, 264 + num_rows), 0, num_rows)
    packer.finish([])
    expected = [[tile, split] for tile in range(num_rows) for split in splits]
    assert inputs.work[: int(inputs.num_work[0])].tolist() == expected
    assert inputs.first_results[:num_rows].tolist() == [2 * tile for tile in range(num_rows)]


@pytest.mark.parametrize(("num_rows", "is_shared"), [(1, True), (16, True), (17, False)])
def test_splits_are_shared_as_long_as_there_is_room_for_the_results_of_their_rows(
    num_rows: int, is_shared: bool
) -> None:
    parts = parts_of(np.zeros(Shape(64).num_fixed, dtype=np.int32), Shape(64))
    # Two tiles of 512 splits each.
    parts["tiles"][:2, 1], parts["tiles"][:2, 5] = num_rows, 512 * SPLIT
    share_work(parts, 2)
    assert (parts["num_work"][0] == 1024) == is_shared
    assert parts["first_results"][:2].tolist() == [0, 512 * num_rows]


@pytest.mark.parametrize("num_tiles", [0, 1, 3, 64])
def test_work_of_steps_is_what_each_of_them_has_alone(num_tiles: int) -> None:
    shape, num_steps = Shape(64), 7
    parts = parts_of(np.zeros((num_steps, shape.num_fixed), dtype=np.int32), shape)
    parts["work"][:], parts["first_results"][:] = 9, 9  # left by an earlier loop
    ends = np.add.outer(np.arange(num_steps), [SPLIT - 4, SPLIT - 2, 40] * 22)[:, :num_tiles]
    parts["tiles"][:, :num_tiles, 1], parts["tiles"][:, :num_tiles, 5] = 1, ends
    alone = {name: part.copy() for name, part in parts.items()}
    share_work_of_steps(parts, num_tiles)
    for step in range(num_steps):
        share_work({name: part[step] for name, part in alone.items()}, num_tiles)
        count = alone["num_work"][step, 0]
        assert parts["num_work"][step, 0] == count
        assert parts["work"][step, :count].tolist() == alone["work"][step, :count].tolist()
        assert parts["first_results"][step].tolist() == alone["first_results"][step].tolist()
