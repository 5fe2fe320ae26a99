"""The steps of a layer that look at whole rows: the sum and norm of the residual stream, and the gate of an MLP."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.models.cuda.overlap import launch_options, overlaps

GATE_BLOCK = 1024
"""Columns of a row whose gates one program computes."""


def add_and_norm(hidden: Tensor, summand: Tensor | None, weight: Tensor, epsilon: float, out: Tensor) -> None:
    """Adds to the residual stream, and computes its RMS norm. Sums are float32.

    Args:
        hidden: [rows, size], written if there is a summand.
        summand: [rows, size], or None if nothing is added; or float32 [parts, rows, size]: parts of a sum, which are
            added up in this order first.
        weight: [size].
        epsilon: That of the norm.
        out: [rows, size], written.
    """
    num_rows, size = hidden.shape
    # Without a summand its pointer is not read.
    added = hidden if summand is None else summand
    block = triton.next_power_of_2(size)
    is_early = overlaps(hidden.device)
    add_and_norm_kernel[(num_rows,)](
        hidden,
        added,
        weight,
        out,
        epsilon,
        num_rows * size,
        size,
        block,
        0 if summand is None else (1 if summand.dim() == 2 else len(summand)),
        is_early,
        num_warps=norm_warps(size),
        **launch_options(is_early),
    )


def norm_warps(size: int) -> int:
    """Returns how many warps compute the norm of a row: a property of the model, never of the number of rows."""
    return 4 if size <= 2048 else 8


@triton.jit
def add_and_norm_kernel(
    hidden: tl.tensor,
    summand: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    epsilon: tl.tensor,
    part_stride: tl.int64,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """Computes `add_and_norm` of one row in each program."""
    if IS_EARLY:
        gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    offsets = tl.program_id(0).to(tl.int64) * SIZE + columns
    # No kernel writes them meanwhile.
    weights = tl.load(weight + columns, inside, 0.0).to(tl.float32)
    if IS_EARLY:
        gdc_wait()
    stream = tl.load(hidden + offsets, inside, 0.0)
    if NUM_PARTS > 0:
        added = tl.load(summand + offsets, inside, 0.0).to(tl.float32)
        for part in tl.static_range(1, NUM_PARTS):
            added += tl.load(summand + part * part_stride + offsets, inside, 0.0).to(tl.float32)
        stream = (stream.to(tl.float32) + added).to(hidden.dtype.element_ty)
        tl.store(hidden + offsets, stream, inside)
    # Computed from the stream as it is stored: the next layer adds to the rounded one.
    x = stream.to(tl.float32)
    factor = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / SIZE + epsilon)
    tl.store(out + offsets, (x * factor * weights).to(out.dtype.element_ty), inside)


def gate_silu(gate_up: Tensor, out: Tensor) -> None:
    """Computes silu(gate) * up.

    Args:
        gate_up: [rows, 2 * size]: gates, and then the values that are gated.
        out: [rows, size], written.
    """
    num_rows, size = out.shape
    is_early = overlaps(gate_up.device)
    grid = (num_rows, triton.cdiv(size, GATE_BLOCK))
    gate_silu_kernel[grid](gate_up, out, size, GATE_BLOCK, is_early, num_warps=4, **launch_options(is_early))


@triton.jit
def gate_silu_kernel(
    gate_up: tl.tensor, out: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
) -> None:
    """Computes `gate_silu` of some columns of one row in each program."""
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * (2 * SIZE) + columns, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + columns, inside, 0.0).to(tl.float32)
    found = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * SIZE + columns, found.to(out.dtype.element_ty), inside)
