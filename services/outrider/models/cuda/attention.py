"""Attention over paths of the pool, with sums in the order of positions.

A path is a causal sequence with its own table of places: blocks of the pool below its root, and a list of places from
there on. So a row of a chain and a row of a tree are alike: both see the positions up to their own, one after the
other. There is no other mask.

Rows of one path are computed in *tiles* of 16 query rows (of 64 if more than 16 query heads share a key-value head),
keys in tiles of 64 positions, and positions in *splits* of 256 that several programs share among them. The program that
finishes a tile last adds the results of its splits in ascending order, as a program that computes all of them does. All
of these sizes are fixed, and all limits are those of positions: a row's bits depend on its own path alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.models.cuda.inputs import SPLIT, TILES, tile_of
from outrider.models.cuda.overlap import launch_options, overlaps

KEYS = 64
"""Positions of a tile of keys."""
NUM_WARPS = 4
"""Warps of a program."""
PROGRAMS_PER_PROCESSOR = 3
"""Programs that a multiprocessor of a GPU runs at the same time."""
WIDTHS = (16, 32, 64, 128, 256)
"""Head widths that the kernel supports."""


class Paths(Protocol):
    """Names the tensors, all int32, that say what the rows of a forward see.

    Position p of a path lies at the place `tables[first of its table + p // block_size] * block_size + p % block_size`
    below the path's root, and at `tails[first of its tail + p - root]` from there on.
    """

    positions: Tensor
    """[rows]: position of each row."""
    tables: Tensor
    """[blocks]: tables of all sessions, one after the other."""
    tails: Tensor
    """[places]: places from the roots of all paths on, by position, one path after the other."""
    row_list: Tensor
    """[rows without padding]: rows by path, and by position within a path."""
    tiles: Tensor
    """[tiles, 6]: first row in `row_list`, number of rows, first of the table, root, first of the tail, end."""
    work: Tensor
    """[items, 2]: tile and split. The items of a tile stand together, in ascending order.

    A single item with split -1 stands for all splits of its tile: one program computes them, with the same bits. That
    is for prompts, which have enough tiles for all programs: results of splits then need not go through memory.
    """
    num_work: Tensor
    """[1]: number of items; `work` is not read after them."""
    first_results: Tensor
    """[tiles]: rows of all items before the first item of each tile: the results of splits lie one after the other. Not
    read for tiles with split -1."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Holds room for the results of splits, for one forward at a time. All layers share it."""

    sums: Tensor
    """float32 [results, head_dim]: weighted values for each split, key-value head, row and query head."""
    peaks: Tensor
    """float32 [results]: greatest scores, as powers of two."""
    totals: Tensor
    """float32 [results]: sums of the weights."""
    counters: Tensor
    """int32 [tiles * key-value heads]: splits that are done. Zero between launches."""
    num_programs: int
    """Programs of a launch. It changes no bits."""

    @classmethod
    def make(cls, max_results: int, max_counters: int, head_dim: int, device: torch.device) -> Scratch:
        """Allocates the room: half a KiB and a little for each result of width 128.

        Args:
            max_results: Most rows of all items of `Paths.work`, times the query heads.
            max_counters: Most tiles, times the key-value heads.
            head_dim: Width of a head.
            device: Device of the model.
        """
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        return cls(
            torch.empty(max_results, head_dim, device=device),
            torch.empty(max_results, device=device),
            torch.empty(max_results, device=device),
            torch.zeros(max_counters, dtype=torch.int32, device=device),
            PROGRAMS_PER_PROCESSOR * processors,
        )


def stages_of(head_dim: int, itemsize: int) -> int:
    """Returns how many tiles of keys and values are in flight at a time, including the one that is computed with.

    Args:
        head_dim: Width of a head.
        itemsize: Bytes of a key's dimension.
    """
    # As many as fit into the 99 KB of shared memory that a program of a smaller GPU may have.
    return 3 if head_dim * itemsize <= 256 else 2


def check_shape(queries_per_key: int, head_dim: int) -> None:
    """Raises ValueError if the kernel does not support a model's heads.

    Args:
        queries_per_key: Query heads that share a key-value head.
        head_dim: Width of a head.
    """
    if head_dim not in WIDTHS:
        raise ValueError(f"head_dim must be one of {', '.join(map(str, WIDTHS))}, got {head_dim}")
    if not 1 <= queries_per_key <= TILES[-1]:
        raise ValueError(f"queries_per_key must be in [1, {TILES[-1]}], got {queries_per_key}")


def attend(
    queries: Tensor, layer_data: Tensor, paths: Paths, block_size: int, scale: float, out: Tensor, scratch: Scratch
) -> None:
    """Computes the attention of one layer. The keys and values of these rows must be in their places.

    Args:
        queries: [rows, query heads, head_dim], not scaled, of the type of the pool.
        layer_data: [2, key-value heads, slots, head_dim]: a layer's keys and values in the pool.
        paths: What the rows see. A tile has at most `tile_of(queries per key)` // queries per key rows.
        block_size: Slots of a block of the pool, a multiple of 64.
        scale: Factor of the scores.
        out: [rows, query heads * head_dim], written. Rows outside of all tiles are left as they are.
        scratch: Room for the results of splits.
    """
    num_queries, head_dim = queries.shape[1:]
    num_heads = layer_data.shape[1]
    is_early = overlaps(queries.device)
    attend_kernel[(scratch.num_programs,)](
        queries,
        layer_data,
        paths.positions,
        paths.tables,
        paths.tails,
        paths.row_list,
        paths.tiles,
        paths.work,
        paths.num_work,
        paths.first_results,
        out,
        scratch.sums,
        scratch.peaks,
        scratch.totals,
        scratch.counters,
        scale * LOG2_E,
        layer_data.stride(0),
        layer_data.stride(1),
        num_heads,
        num_queries // num_heads,
        head_dim,
        block_size,
        tile_of(num_queries // num_heads),
        KEYS,
        SPLIT,
        is_early,
        num_warps=NUM_WARPS,
        num_stages=stages_of(head_dim, layer_data.element_size()),
        **launch_options(is_early),
    )


LOG2_E = 1.4426950408889634
"""Factor that turns powers of e into powers of two, which a GPU computes."""


@triton.jit
def attend_kernel(
    queries: tl.tensor,
    data: tl.tensor,
    positions: tl.tensor,
    tables: tl.tensor,
    tails: tl.tensor,
    row_list: tl.tensor,
    tiles: tl.tensor,
    work: tl.tensor,
    num_work: tl.tensor,
    first_results: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    counters: tl.tensor,
    scale: tl.tensor,
    half_stride: tl.int64,
    head_stride: tl.int64,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """Computes items of work, each of them for one key-value head, until none is left."""
    if IS_EARLY:
        gdc_launch_dependents()
    lanes = tl.arange(0, TILE)
    dims = tl.arange(0, HEAD_DIM)
    num_items = tl.load(num_work) * NUM_HEADS
    if IS_EARLY:  # noqa: SIM102 (a kernel's `and` does not stop at what is False)
        # Programs without an item make room at once. The first one waits even if there are no items at all.
        if (tl.program_id(0) < num_items) | (tl.program_id(0) == 0):
            gdc_wait()
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        index, head = item // NUM_HEADS, item % NUM_HEADS
        tile, split = tl.load(work + 2 * index), tl.load(work + 2 * index + 1)
        entry = tiles + 6 * tile
        first_row, num_rows, first_block = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        root, first_tail, end = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
        is_used = lanes < num_rows * GROUP
        rows = tl.load(row_list + first_row + lanes // GROUP, is_used, 0)
        # A padding row sees nothing.
        own = tl.load(positions + rows, is_used, -1)
        offsets = (rows * (NUM_HEADS * GROUP) + head * GROUP + lanes % GROUP)[:, None] * HEAD_DIM + dims
        q = tl.load(queries + offsets, is_used[:, None], 0.0)
        keys = data + head * head_stride
        num_splits = tl.cdiv(end, SPLIT)
        has_all = (split < 0) | (num_splits == 1)
        first_split = tl.maximum(split, 0)
        last_split = tl.where(has_all, num_splits, first_split + 1)
        peak = tl.full((TILE,), float("-inf"), tl.float32)
        total = tl.zeros((TILE,), tl.float32)
        sum_ = tl.zeros((TILE, HEAD_DIM), tl.float32)
        for its_split in range(first_split, last_split):
            start = its_split * SPLIT
            its_peak, its_total, its_sum = _attend_split(
                q, own, keys, keys + half_stride, tables + first_block, tails + first_tail, root, end, start,
                tl.minimum(start + SPLIT, end), scale, HEAD_DIM, BLOCK_SIZE, TILE, KEYS
            )  # fmt: skip
            peak, total, sum_ = _added(peak, total, sum_, its_peak, its_total, its_sum)
        if has_all:
            tl.store(out + offsets, (sum_ / total[:, None]).to(out.dtype.element_ty), is_used[:, None])
        else:
            # Read again: there are no registers to keep it over all positions.
            num_used = tl.load(entry + 1) * GROUP
            first_result = tl.load(first_results + tile).to(tl.int64) * (GROUP * NUM_HEADS) + head * num_used
            line = first_result + lanes
            own_line = line + tl.load(work + 2 * index + 1) * (num_used * NUM_HEADS)
            tl.store(peaks + own_line, peak, is_used)
            tl.store(totals + own_line, total, is_used)
            tl.store(sums + own_line[:, None] * HEAD_DIM + dims, sum_, is_used[:, None])
            # All threads have written before one of them counts.
            tl.debug_barrier()
            counter = counters + tile * NUM_HEADS + head
            if tl.atomic_add(counter, 1) == num_splits - 1:
                _combine(out, row_list + tl.load(entry), head, peaks + first_result, totals + first_result,
                         sums + first_result * HEAD_DIM, num_used, num_splits, NUM_HEADS, GROUP, HEAD_DIM)  # fmt: skip
                tl.store(counter, 0)


@triton.jit
def _attend_split(
    q: tl.tensor,
    own: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    tail: tl.tensor,
    root: tl.tensor,
    end: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """Attends to the positions from `start` to `stop`; returns greatest scores, sums of weights, weighted values."""
    dims = tl.arange(0, HEAD_DIM)
    peak = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    sum_ = tl.zeros((TILE, HEAD_DIM), tl.float32)
    at = start + tl.arange(0, KEYS)
    # Looked up one tile ahead, so that several tiles of keys and values are copied while others are computed with.
    place = _places(table, tail, root, end, at, BLOCK_SIZE)
    for _ in range(start, stop, KEYS):
        # Values after the end may be anything, even NaN, which a weight of 0 does not remove.
        is_there = (at < end)[:, None]
        offsets = place[:, None] * HEAD_DIM + dims
        k = tl.load(keys + offsets, is_there, 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(at[None, :] <= own[:, None], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that sees nothing yet has no peak, and infinity minus infinity is NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(values + offsets, is_there, 0.0)
        sum_ = tl.dot(weights.to(v.dtype), v, sum_ * shrink[:, None], input_precision="ieee")
        peak = new_peak
        at += KEYS
        place = _places(table, tail, root, end, at, BLOCK_SIZE)
    return peak, total, sum_


@triton.jit
def _places(
    table: tl.tensor, tail: tl.tensor, root: tl.tensor, end: tl.tensor, at: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """Looks up where positions lie in the pool. Results from `end` on are arbitrary."""
    is_there, is_below = at < end, at < root
    block = tl.load(table + at // BLOCK_SIZE, is_there & is_below, 0)
    place = tl.load(tail + at - root, is_there & (at >= root), 0)
    return tl.where(is_below, block * BLOCK_SIZE + at % BLOCK_SIZE, place)


@triton.jit
def _added(
    peak: tl.tensor, total: tl.tensor, sum_: tl.tensor, its_peak: tl.tensor, its_total: tl.tensor, its_sum: tl.tensor
) -> tl.tensor:
    """Adds the results of a split to those of all splits before it. Adding to nothing does not round."""
    new_peak = tl.maximum(peak, its_peak)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    shrink, its_shrink = tl.exp2(peak - base), tl.exp2(its_peak - base)
    # If the compiler chose which product is rounded, it might choose differently at each of the two calls.
    total = tl.fma(total, shrink, its_total * its_shrink)
    shrink, its_shrink = tl.broadcast_to(shrink[:, None], sum_.shape), its_shrink[:, None]
    return new_peak, total, tl.fma(sum_, shrink, its_sum * its_shrink)


@triton.jit
def _combine(
    out: tl.tensor,
    row_list: tl.tensor,
    head: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    num_used: tl.tensor,
    num_splits: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Adds the results of a tile's splits, in ascending order, and writes what rows attend to."""
    dims = tl.arange(0, HEAD_DIM)
    stride = num_used * NUM_HEADS
    # Few lanes at a time, so that there are registers for several splits that are read at once.
    for first in range(0, num_used, 16):
        lanes = first + tl.arange(0, 16)
        is_used = lanes < num_used
        peak = tl.full((16,), float("-inf"), tl.float32)
        total = tl.zeros((16,), tl.float32)
        sum_ = tl.zeros((16, HEAD_DIM), tl.float32)
        for split in range(0, num_splits, 4):
            line = lanes + split * stride
            left = num_splits - split
            peak_0, total_0, sum_0 = _result(peaks, totals, sums, line, is_used, left > 0, HEAD_DIM)
            peak_1, total_1, sum_1 = _result(peaks, totals, sums, line + stride, is_used, left > 1, HEAD_DIM)
            peak_2, total_2, sum_2 = _result(peaks, totals, sums, line + 2 * stride, is_used, left > 2, HEAD_DIM)
            peak_3, total_3, sum_3 = _result(peaks, totals, sums, line + 3 * stride, is_used, left > 3, HEAD_DIM)
            peak, total, sum_ = _added(peak, total, sum_, peak_0, total_0, sum_0)
            peak, total, sum_ = _added(peak, total, sum_, peak_1, total_1, sum_1)
            peak, total, sum_ = _added(peak, total, sum_, peak_2, total_2, sum_2)
            peak, total, sum_ = _added(peak, total, sum_, peak_3, total_3, sum_3)
        rows = tl.load(row_list + lanes // GROUP, is_used, 0)
        offsets = (rows * (NUM_HEADS * GROUP) + head * GROUP + lanes % GROUP)[:, None] * HEAD_DIM + dims
        tl.store(out + offsets, (sum_ / total[:, None]).to(out.dtype.element_ty), is_used[:, None])


@triton.jit
def _result(
    peaks: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    line: tl.tensor,
    is_used: tl.tensor,
    is_there: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """Reads the results of a split for some lanes. If there is no such split, they add nothing."""
    # Other programs wrote them, so this processor's own cache is bypassed.
    is_read = is_used & is_there
    peak = tl.load(peaks + line, is_read, float("-inf"), cache_modifier=".cg")
    total = tl.load(totals + line, is_read, 0.0, cache_modifier=".cg")
    places = line[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)
    return peak, total, tl.load(sums + places, is_read[:, None], 0.0, cache_modifier=".cg")
