"""Moves accepted rows of trees to the places of a chain."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def move_rows(data: Tensor, moves: Tensor, spans: Tensor, num: Tensor) -> None:
    """Copies keys and values of all layers from place to place.

    A session's pairs are copied one after the other: the target of a pair may be the source of an earlier one. Pairs of
    different sessions share no place.

    Args:
        data: [layers, 2, key-value heads, slots, head_dim]: the pool, written.
        moves: int32 [pairs, 2]: source and target place.
        spans: int32 [sessions, 2]: first pair of each session, and the end of its pairs.
        num: int32 [1]: number of sessions in `spans`, which is not read after them.
    """
    num_layers, _, num_heads, _, head_dim = data.shape
    move_rows_kernel[(len(spans), num_layers)](
        data,
        moves,
        spans,
        num,
        data.stride(0),
        data.stride(2),  # keys, then values: their heads lie one after the other
        2 * num_heads,
        triton.next_power_of_2(2 * num_heads),
        head_dim,
        num_warps=4,
    )


@triton.jit
def move_rows_kernel(
    data: tl.tensor,
    moves: tl.tensor,
    spans: tl.tensor,
    num: tl.tensor,
    layer_stride: tl.int64,
    head_stride: tl.int64,
    NUM_HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Copies the rows of one session in one layer in each program."""
    session = tl.program_id(0)
    if session < tl.load(num):
        heads = tl.arange(0, HEADS_BLOCK)
        base = data + tl.program_id(1).to(tl.int64) * layer_stride
        base += heads.to(tl.int64)[:, None] * head_stride + tl.arange(0, HEAD_DIM)
        inside = (heads < NUM_HEADS)[:, None]
        last = tl.load(spans + 2 * session + 1)
        for pair in range(tl.load(spans + 2 * session), last):
            old = tl.load(moves + 2 * pair).to(tl.int64) * HEAD_DIM
            new = tl.load(moves + 2 * pair + 1).to(tl.int64) * HEAD_DIM
            row = tl.load(base + old, inside, 0.0)
            # All threads have read a row before any of them writes to a place that an earlier pair came from.
            tl.debug_barrier()
            tl.store(base + new, row, inside)
