"""Batch-invariant products: the bits of a row do not depend on the rows next to it, nor on their number.

A library chooses another kernel for another number of rows, and with it another order of sums. Here a sum goes over its
inputs in one order, sixteen at a time: weights are the tall side of each tile, and rows the wide one. Only the wide
side grows with the number of rows. If results are added to the residual stream, a matrix with too few outputs for all
processors has its inputs split among programs. The number of splits is a property of the matrix. Their sums stay apart,
and the kernel that adds them to the stream does so in ascending order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.models.cuda.overlap import launch_options, overlaps

TYPES = (torch.bfloat16, torch.float16)
"""Types of weights that these products support."""
CAPABILITY = 9
"""Major compute capability of the GPUs that they are for: only Hopper, because they were not measured on others. A100
and smaller GPUs have no room for their tiles."""
MIN_ROWS, MAX_ROWS = 16, 128
"""Rows of a tile, least and most. More rows take several tiles."""
INPUTS = 128
"""The inputs of a matrix are a multiple of this, in each of its splits."""
MAX_SPLITS = 8
"""Most splits of a matrix's inputs."""
ENOUGH_PROGRAMS = 96
"""From this many programs on, inputs are not split any further."""
MANY_OUTPUTS = 2**14
"""From this many outputs on, tiles of 128 are enough for all processors without splitting inputs."""
SHARED = 200_000
"""Bytes of shared memory for tiles that are in flight."""


def takes(weight: Tensor) -> bool:
    """Returns True if there is a product for a matrix on its device.

    Args:
        weight: [out, in].
    """
    if weight.device.type != "cuda":
        return False
    return are_for(weight.dtype, weight.shape[1], torch.cuda.get_device_capability(weight.device))


def are_for(dtype: torch.dtype, num_inputs: int, capability: tuple[int, int]) -> bool:
    """Returns True if there are products for matrices of a type and number of inputs on GPUs of a capability."""
    return dtype in TYPES and num_inputs % INPUTS == 0 and capability[0] == CAPABILITY


def splits_of(num_outputs: int, num_inputs: int) -> int:
    """Returns the number of splits of a matrix's inputs, for a caller that adds up their sums."""
    num_splits = 1
    while (
        num_outputs // 128 * num_splits < ENOUGH_PROGRAMS
        and num_splits < MAX_SPLITS
        and num_inputs % (2 * num_splits * INPUTS) == 0
    ):
        num_splits *= 2
    return num_splits


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Computes `x @ weight.T + bias`.

    Args:
        x: [rows, in]: 16, 32 or 64 rows, or a multiple of 128.
        weight: [out, in].
        bias: [out].
        out: [rows, out], written; or float32 [splits, rows, out]: sums over that many splits of the inputs, the
            first of them with the bias.
    """
    (num_rows, num_inputs), num_outputs = x.shape, len(weight)
    num_splits = 1 if out.dim() == 2 else len(out)
    rows, outputs, inputs, num_warps = tile_of(num_rows, num_outputs, num_splits)
    is_early = overlaps(x.device)
    # Any other number of rows would be left unwritten.
    assert num_rows % rows == 0, f"rows of whole tiles are computed, got {num_rows}"
    multiply_kernel[(num_rows // rows, triton.cdiv(num_outputs, outputs), num_splits)](
        x,
        weight,
        # Absent inputs are never read.
        weight if bias is None else bias,
        out,
        num_rows * num_outputs,
        num_inputs,
        num_outputs,
        num_inputs // num_splits,
        rows,
        outputs,
        inputs,
        bias is not None,
        is_early,
        num_warps=num_warps,
        num_stages=stages_of(rows, outputs, inputs),
        **launch_options(is_early),
    )


def tile_of(num_rows: int, num_outputs: int, num_splits: int) -> tuple[int, int, int, int]:
    """Returns rows, outputs and inputs of a tile, and the warps of a program. They change no bits."""
    rows = min(MAX_ROWS, max(MIN_ROWS, num_rows))
    if num_splits == 1 and num_outputs < MANY_OUTPUTS:
        return rows, 64, 128, 4
    return (rows, 128, 64, 4) if rows == MAX_ROWS else (rows, 128, 128, 8)


def stages_of(rows: int, outputs: int, inputs: int) -> int:
    """Returns how many tiles are in flight at a time, including the one that is computed with."""
    return min(8, SHARED // (2 * (rows + outputs) * inputs))


@triton.jit
def multiply_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    part_stride: tl.int64,
    num_inputs: tl.int32,
    num_outputs: tl.int32,
    part_size: tl.int32,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EARLY: tl.constexpr,
) -> None:
    """Computes some outputs of some rows, from one split of the inputs, in each program."""
    if IS_EARLY:
        gdc_launch_dependents()
    # Programs with the same weights are neighbours: those after the first one find the weights in the cache.
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = outputs < num_outputs
    columns = tl.program_id(2) * part_size + tl.arange(0, INPUTS)
    # Past the end, the last output is computed again and not stored.
    own = weight + tl.minimum(outputs, num_outputs - 1).to(tl.int64)[:, None] * num_inputs + columns
    given = x + rows.to(tl.int64)[:, None] * num_inputs + columns
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    if IS_EARLY:
        gdc_wait()
    for first in range(0, part_size, INPUTS):
        sums = tl.dot(tl.load(own + first), tl.trans(tl.load(given + first)), sums)
    if HAS_BIAS:
        added = tl.load(bias + outputs, inside, 0.0).to(tl.float32)
        sums += tl.where(tl.program_id(2) == 0, added, 0.0)[:, None]
    places = out + tl.program_id(2) * part_stride + rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    tl.store(places, sums.to(out.dtype.element_ty), inside[:, None])
