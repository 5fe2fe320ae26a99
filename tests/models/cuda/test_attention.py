"""Attention on a GPU, interpreted: equal to the CPU's, and bit by bit the same whatever runs next to a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.core.params import Source
from outrider.core.tree import DraftTree, Node
from outrider.models.kv_cache import CacheShape, KVCache, KVPool
from outrider.models.packing import Segment
from outrider.models.torch.plan import Plan
from tests.models.cuda.paths import paths_of

pytest.importorskip("triton")

from outrider.models.cuda.attention import Scratch, attend, check_shape

# Lanes without a row divide 0 by 0; their results are not stored.
pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")]

SCALE = 0.3
CPU = torch.device("cpu")


def pool_of(num_heads: int, head_dim: int, num_blocks: int = 40, block_size: int = 64) -> KVPool:
    pool = KVPool(CacheShape(1, num_heads, head_dim, torch.float32, CPU), num_blocks, block_size)
    pool.data.fill_(float("nan"))  # unwritten slots must not be read
    return pool


def cache_of(pool: KVPool, length: int, seed: int = 0, *, room: int = 0) -> KVCache:
    """A cache with so many random keys and values, the same for each seed, and its blocks."""
    cache = pool.new_cache()
    cache.reserve(length + room)
    if length:
        values = torch.randn(2, length, pool.shape.num_heads, pool.shape.head_dim, generator=seeded(seed))
        pool.data[0].index_copy_(2, torch.from_numpy(cache.places(np.arange(length))), values.transpose(1, 2))
        cache.append(range(length))
    return cache


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(pool: KVPool, group: int, num_rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Queries, and keys and values, of random rows."""
    num_heads, head_dim = pool.shape.num_heads, pool.shape.head_dim
    queries = torch.randn(num_rows, num_heads * group, head_dim, generator=seeded(seed))
    return queries, torch.randn(num_rows, 2, num_heads, head_dim, generator=seeded(seed + 1))


def run(segments: Sequence[Segment], queries: Tensor, keys_values: Tensor, *, num_programs: int = 3) -> Tensor:
    """Puts keys and values into the pool, and attends with the kernel. The rows are appended to the caches."""
    pool = segments[0].cache.pool
    group = queries.shape[1] // pool.shape.num_heads
    plan = Plan(segments, group)
    paths = paths_of(segments, group)
    pool.data[0].index_copy_(2, paths.places.long(), keys_values.permute(1, 2, 0, 3))
    scratch = scratch_of(paths, group, pool, num_programs)
    for _ in range(2):  # the second launch may find only the counters, as the first one left them
        out = torch.full((len(queries), queries[0].numel()), float("nan"))
        poison(scratch)
        attend(queries, pool.data[0], paths, pool.block_size, SCALE, out, scratch)
        assert not scratch.counters.any()
    plan.commit()
    return out


def scratch_of(paths: Any, group: int, pool: KVPool, num_programs: int) -> Scratch:
    """Room for exactly the results of the splits."""
    shape, tiles = pool.shape, paths.work[: int(paths.num_work[0]), 0]
    num_rows = int(paths.tiles[tiles.long(), 1].sum())
    made = Scratch.make(num_rows * group * shape.num_heads, len(paths.tiles) * shape.num_heads, shape.head_dim, CPU)
    scratch = Scratch(made.sums, made.peaks, made.totals, made.counters, num_programs)
    poison(scratch)
    return scratch


def poison(scratch: Scratch) -> None:
    for tensor in (scratch.sums, scratch.peaks, scratch.totals):
        tensor.fill_(float("nan"))


def expected(segments: Sequence[Segment], queries: Tensor, keys_values: Tensor) -> Tensor:
    """The same on the CPU, whose pool may hold no NaN."""
    group = queries.shape[1] // segments[0].cache.pool.shape.num_heads
    plan = Plan(segments, group)
    found = plan.attend(0, queries, keys_values, SCALE)
    plan.commit()
    return found


@pytest.mark.parametrize("end", [1, 63, 64, 65, 255, 256, 257, 520])
def test_a_row_equals_the_cpus_at_every_length(end: int) -> None:
    pool = pool_of(2, 32)
    queries, keys_values = rows_of(pool, 2, 1)
    found = run([Segment(cache_of(pool, end - 1, room=1), [1], 1)], queries, keys_values)
    known = expected([Segment(cache_of(pool, end - 1, room=1), [1], 1)], queries, keys_values)
    torch.testing.assert_close(found, known, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 5, 8])
def test_rows_of_a_prompt_equal_the_cpus_for_every_shape_of_heads(head_dim: int, group: int) -> None:
    pool = pool_of(1, head_dim)
    queries, keys_values = rows_of(pool, group, 40)
    found = run([Segment(cache_of(pool, 30, room=40), [1] * 40, 1)], queries, keys_values)
    known = expected([Segment(cache_of(pool, 30, room=40), [1] * 40, 1)], queries, keys_values)
    torch.testing.assert_close(found, known, rtol=1e-4, atol=1e-5)


def test_blocks_of_several_tiles_are_read_where_they_lie() -> None:
    pool = pool_of(2, 32, 6, block_size=128)
    queries, keys_values = rows_of(pool, 4, 2)
    other = pool.new_cache()
    other.reserve(130)  # so that the blocks are not the first ones of the pool
    found = run([Segment(cache_of(pool, 300, room=2), [1, 2], 1)], queries, keys_values)
    plain = pool_of(2, 32)
    known = expected([Segment(cache_of(plain, 300, room=2), [1, 2], 1)], queries, keys_values)
    torch.testing.assert_close(found, known, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [0, 60, 250])
def test_a_prompt_has_the_bits_of_its_rows_one_by_one(length: int) -> None:
    num_rows = 22
    pool = pool_of(2, 32)
    queries, keys_values = rows_of(pool, 4, num_rows)
    together = run([Segment(cache_of(pool, length, room=num_rows), [1] * num_rows, 1)], queries, keys_values)
    cache = cache_of(pool, length, room=num_rows)
    for row in range(num_rows):
        alone = run([Segment(cache, [1], 1)], queries[row : row + 1], keys_values[row : row + 1])
        assert torch.equal(alone[0], together[row]), f"row {row}"


def tree_of(num_committed: int, parents: Sequence[int]) -> tuple[DraftTree, list[Node]]:
    """A tree whose nodes hang on earlier ones; -1 is the root."""
    tree = DraftTree([1] * num_committed, 1000)
    nodes: list[Node] = []
    for token_id, parent in enumerate(parents):
        node = tree.add(tree.root if parent < 0 else nodes[parent], token_id, -0.1, Source.DRAFT)
        assert node is not None
        nodes.append(node)
    return tree, nodes


def lineage(parents: Sequence[int], node: int) -> list[int]:
    """A node's ancestors and itself, from the root down."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


@pytest.mark.parametrize("num_committed", [3, 62, 254, 511])
def test_a_path_of_a_tree_has_the_bits_of_a_chain(num_committed: int) -> None:
    parents = [-1, -1, 0, 0, 2, 1, 5, 4, 3]
    pool = pool_of(2, 32, 80)
    queries, keys_values = rows_of(pool, 4, 1 + len(parents))
    _, nodes = tree_of(num_committed + 1, parents)
    cache = cache_of(pool, num_committed, room=1 + len(parents))
    segment = Segment.of_tree(cache, [1], nodes, num_logits=1)
    assert segment.visible is not None
    in_tree = run([segment], queries, keys_values)
    for node in range(len(parents)):
        rows = [0, *(1 + number for number in lineage(parents, node))]
        chain = Segment(cache_of(pool, num_committed, room=len(rows)), [1] * len(rows), 1)
        in_chain = run([chain], queries[rows], keys_values[rows])
        assert torch.equal(in_chain[-1], in_tree[1 + node]), f"node {node}"


def test_a_tree_equals_the_cpus_and_goes_on_from_its_nodes() -> None:
    parents = [-1, -1, 0, 0, 1]
    pools = pool_of(2, 32), pool_of(2, 32)
    pools[1].data.zero_()
    results = []
    for pool, way in zip(pools, (run, expected), strict=True):
        cache = cache_of(pool, 130, room=20)
        _, nodes = tree_of(130, [*parents, 3, 4])
        slots = {node: 130 + index for index, node in enumerate(nodes[:5])}
        first = way([Segment.of_tree(cache, [], nodes[:5], num_logits=5)], *rows_of(pool, 2, 5))
        # Two more nodes, whose ancestors are in the cache.
        later = Segment.of_tree(cache, [], nodes[5:], slots, num_logits=2)
        results.append(torch.cat((first, way([later], *rows_of(pool, 2, 2, seed=5)))))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@settings(max_examples=8)
@given(data=st.data())
def test_forests_equal_the_cpus(data: st.DataObject) -> None:
    shapes = []
    for _ in range(data.draw(st.integers(1, 3))):
        parents: list[int] = []
        for node in range(data.draw(st.integers(0, 9))):
            parents.append(data.draw(st.integers(-1, node - 1)))
        shapes.append((data.draw(st.sampled_from([0, 5, 63, 64, 250])), data.draw(st.integers(1, 9)), parents))
    results = []
    for way in (run, expected):
        pool = pool_of(2, 32)
        if way is expected:
            pool.data.zero_()
        segments = []
        for length, num_pending, parents in shapes:
            cache = cache_of(pool, length, seed=length, room=num_pending + len(parents))
            _, nodes = tree_of(length + num_pending, parents)
            segments.append(Segment.of_tree(cache, [1] * num_pending, nodes, num_logits=1))
        results.append(way(segments, *rows_of(pool, 4, sum(len(segment.token_ids) for segment in segments))))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_neighbours_and_programs_change_no_bit() -> None:
    pool = pool_of(2, 32, 80)
    queries, keys_values = rows_of(pool, 4, 2)
    alone = run([Segment(cache_of(pool, 300, room=2), [1, 2], 2)], queries, keys_values, num_programs=1)
    others = [Segment(cache_of(pool, length, length, room=9), [1] * 9, 1) for length in (0, 40, 290)]
    more_queries, more = rows_of(pool, 4, 27, seed=9)
    segments = [others[0], others[1], Segment(cache_of(pool, 300, room=2), [1, 2], 2), others[2]]
    packed = torch.cat((more_queries[:18], queries, more_queries[18:]))
    found = run(segments, packed, torch.cat((more[:18], keys_values, more[18:])), num_programs=7)
    assert torch.equal(found[18:20], alone)


def test_all_splits_of_a_tile_in_one_program_have_the_bits_of_several() -> None:
    num_rows = 30
    pool = pool_of(2, 32)
    queries, keys_values = rows_of(pool, 4, num_rows)
    apart = run([Segment(cache_of(pool, 500, room=num_rows), [1] * num_rows, 1)], queries, keys_values)
    paths = paths_of([Segment(cache_of(pool, 500, room=num_rows), [1] * num_rows, 1)], 4)
    pool.data[0].index_copy_(2, paths.places.long(), keys_values.permute(1, 2, 0, 3))
    num_tiles = len(paths.tiles)
    paths.work = torch.tensor([(tile, -1) for tile in range(num_tiles)], dtype=torch.int32)
    paths.num_work = torch.tensor([num_tiles], dtype=torch.int32)
    out = torch.full_like(apart, float("nan"))
    scratch = scratch_of(paths, 4, pool, 3)
    attend(queries, pool.data[0], paths, 64, SCALE, out, scratch)
    assert torch.equal(out, apart)
    assert scratch.sums.isnan().all()


def test_rows_in_no_tile_are_left_as_they_are() -> None:
    pool = pool_of(1, 32)
    queries, keys_values = rows_of(pool, 4, 1)
    paths = paths_of([Segment(cache_of(pool, 300, room=1), [1], 1)], 4)
    pool.data[0].index_copy_(2, paths.places.long(), keys_values.permute(1, 2, 0, 3))
    out = torch.zeros(3, 4 * 32)
    padded = torch.cat((queries, torch.full((2, 4, 32), float("nan"))))
    attend(padded, pool.data[0], paths, 64, SCALE, out, scratch_of(paths, 4, pool, 2))
    assert out[0].isfinite().all()
    assert (out[0] != 0).any()
    assert (out[1:] == 0).all()


def test_nothing_is_written_before_all_splits_of_a_tile_are_done() -> None:
    pool = pool_of(1, 32)
    queries, keys_values = rows_of(pool, 4, 1)
    paths = paths_of([Segment(cache_of(pool, 600, room=1), [1], 1)], 4)
    pool.data[0].index_copy_(2, paths.places.long(), keys_values.permute(1, 2, 0, 3))
    paths.num_work -= 1
    out = torch.zeros(1, 4 * 32)
    attend(queries, pool.data[0], paths, 64, SCALE, out, scratch_of(paths, 4, pool, 2))
    assert (out == 0).all()


def test_attention_in_bfloat16_is_that_of_rounded_weights() -> None:
    pool = pool_of(2, 32)
    queries, keys_values = (tensor.bfloat16() for tensor in rows_of(pool, 4, 5))
    cache = cache_of(pool, 70, room=5)
    paths = paths_of([Segment(cache, [1] * 5, 1)], 4)
    data = pool.data[0].bfloat16()
    data.index_copy_(2, paths.places.long(), keys_values.permute(1, 2, 0, 3))
    out = torch.zeros(5, 8 * 32, dtype=torch.bfloat16)
    attend(queries, data, paths, 64, SCALE, out, scratch_of(paths, 4, pool, 2))
    text = data[:, :, torch.from_numpy(cache.places(np.arange(75)))].float()
    keys, values = (tensor.repeat_interleave(4, 0) for tensor in text)
    scores = torch.einsum("rhd,hpd->hrp", queries.float(), keys) * SCALE
    hidden = torch.arange(75) > torch.arange(70, 75)[:, None]
    known = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values
    torch.testing.assert_close(out.float(), known.transpose(0, 1).flatten(1), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((4, 96), "head_dim must be one of .*128.*, got 96"), ((65, 64), r"queries_per_key must be in \[1, 64\], got 65")],
)
def test_a_shape_that_the_kernel_is_not_made_for_is_refused(shape: tuple[int, int], message: str) -> None:
    check_shape(5, 128)
    with pytest.raises(ValueError, match=message):
        check_shape(*shape)
