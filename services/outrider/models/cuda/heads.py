"""Brings queries, keys and values from their product into attention and into the pool."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.models.cuda.overlap import launch_options, overlaps

HEADS_BLOCK = 8
"""Heads of a row that one program turns."""


def store_heads(
    heads: Tensor,
    turns: Tensor,
    positions: Tensor,
    places: Tensor,
    norms: Tensor | None,
    epsilon: float,
    queries: Tensor,
    layer_data: Tensor,
) -> None:
    """Norms and turns queries and keys, and puts keys and values into the pool.

    Args:
        heads: [rows, (query heads + 2 * key-value heads) * head_dim]: queries, keys, values; dimensions 2i and 2i + 1
            of queries and keys are turned together.
        turns: float32 [positions, head_dim / 2, 2]: cosines and sines.
        positions: int32 [rows].
        places: int32 [rows]: where in the pool the keys and values of each row go.
        norms: [query heads + key-value heads, head_dim]: weights of the norms, in the order of `heads`' dimensions;
            None if the model has no such norms.
        epsilon: That of the norms.
        queries: [rows, query heads, head_dim], written. They are not scaled.
        layer_data: [2, key-value heads, slots, head_dim], written: a layer's keys and values in the pool.
    """
    num_rows, num_queries, head_dim = queries.shape
    num_keys = layer_data.shape[1]
    grid = (num_rows, triton.cdiv(num_queries + 2 * num_keys, HEADS_BLOCK))
    is_early = overlaps(heads.device)
    store_heads_kernel[grid](
        heads,
        turns,
        positions,
        places,
        turns if norms is None else norms,  # without norms it is not read
        queries,
        layer_data,
        epsilon,
        layer_data.stride(0),
        layer_data.stride(1),
        num_queries,
        num_keys,
        head_dim,
        norms is not None,
        HEADS_BLOCK,
        is_early,
        num_warps=4,
        **launch_options(is_early),
    )


@triton.jit
def store_heads_kernel(
    heads: tl.tensor,
    turns: tl.tensor,
    positions: tl.tensor,
    places: tl.tensor,
    norms: tl.tensor,
    queries: tl.tensor,
    data: tl.tensor,
    epsilon: tl.tensor,
    half_stride: tl.int64,
    head_stride: tl.int64,
    NUM_QUERIES: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """Computes `store_heads` of some heads of one row in each program."""
    if IS_EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, HEAD_DIM)
    is_query = number < NUM_QUERIES
    is_value = number >= NUM_QUERIES + NUM_KEYS
    inside = number < NUM_QUERIES + 2 * NUM_KEYS
    width: tl.constexpr = (NUM_QUERIES + 2 * NUM_KEYS) * HEAD_DIM
    offsets = row.to(tl.int64) * width + number[:, None] * HEAD_DIM + dims
    # No kernel writes these meanwhile.
    turn = tl.load(turns + tl.load(positions + row) * HEAD_DIM + dims)
    place = tl.load(places + row).to(tl.int64) * HEAD_DIM
    if HAS_NORMS:
        weights = tl.load(norms + number[:, None] * HEAD_DIM + dims, ~is_value[:, None], 0.0).to(tl.float32)
    if IS_EARLY:
        gdc_wait()
    given = tl.load(heads + offsets, inside[:, None], 0.0).to(tl.float32)
    turned = given
    if HAS_NORMS:
        factor = 1.0 / tl.sqrt_rn(tl.sum(given * given, 1) / HEAD_DIM + epsilon)
        turned = given * (factor[:, None] * weights)
    x, y = tl.split(tl.reshape(turned, (BLOCK, HEAD_DIM // 2, 2)))
    cosine, sine = tl.split(tl.reshape(turn, (HEAD_DIM // 2, 2)))
    cosine, sine = cosine[None, :], sine[None, :]
    turned = tl.reshape(tl.join(x * cosine - y * sine, x * sine + y * cosine), (BLOCK, HEAD_DIM))
    found = tl.where(is_value[:, None], given, turned)
    own = queries + row.to(tl.int64) * (NUM_QUERIES * HEAD_DIM) + number[:, None] * HEAD_DIM + dims
    tl.store(own, found.to(queries.dtype.element_ty), is_query[:, None])
    half = is_value.to(tl.int64)
    head = number - NUM_QUERIES - half * NUM_KEYS
    kept = data + (half * half_stride + head * head_stride + place)[:, None] + dims
    tl.store(kept, found.to(data.dtype.element_ty), (inside & ~is_query)[:, None])
