"""Products of few rows, each fused into one kernel with the steps before and after it: a norm, a gate, a sum.

At a few rows the time of a small model's layer is that of starting and ending its kernels, not that of reading its
weights: fewer kernels are faster. Sums here go by other tiles than a library's, so these kernels are for models whose
rows need not be exact, as a draft model's need not.

The kernel that writes the stream also writes it times the weights of the next norm, and adds up its squares: each
program does that for its own columns. The factor of the norm is the same for all columns of a row, so the kernel that
multiplies the normed stream applies it to the row's sums, from the squares of all programs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.models.cuda.overlap import launch_options, overlaps

MANY_OUTPUTS = 4096
"""From this many outputs on, a program computes 32 of them, not 16: there are enough for all processors."""
GROUPS = 4
"""Parts of a sum, and warps of a program. Each warp adds up its own part; a single warp would wait for each of its
products."""
MAX_INPUTS = 64
"""Most inputs that a warp multiplies at a time."""
MAX_AHEAD = 5
"""Most tiles that are in flight at a time."""
MAX_SHARED = 99 * 1024
"""Bytes of shared memory that a program of a smaller GPU may have."""


def norm_multiply(
    scaled: Tensor, squares: Tensor, epsilon: float, weight: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Computes `rms_norm(hidden) @ weight.T + bias`.

    Args:
        scaled: [rows, in]: `hidden` times the weights of the norm, as `multiply_add` has written it. There are
            `FEW_ROWS` (`outrider.models.cuda.steps`).
        squares: float32 [at least parts * rows]: sums of squares of `hidden`, as it has written them.
        epsilon: That of the norm.
        weight: [out, in].
        bias: [out].
        out: [rows, out], written.
    """
    _launch(scaled, weight, bias, out, squares, epsilon=epsilon)


def norm_gate(
    scaled: Tensor, squares: Tensor, epsilon: float, weight: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Computes `silu(gate) * up` of `gate, up = rms_norm(hidden) @ weight.T + bias`.

    Args:
        scaled: [rows, in]; see `norm_multiply`, as for the next two.
        squares: float32 [at least parts * rows].
        epsilon: That of the norm.
        weight: [2 * out, in]: gates, and then the values that are gated.
        bias: [2 * out].
        out: [rows, out], written.
    """
    _launch(scaled, weight, bias, out, squares, epsilon=epsilon, has_gate=True)


def multiply_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    hidden: Tensor,
    norm: Tensor,
    scaled: Tensor,
    squares: Tensor,
    *,
    is_early: bool,
) -> None:
    """Adds `x @ weight.T + bias` to the residual stream.

    Args:
        x: [rows, in]: `FEW_ROWS` rows (`outrider.models.cuda.steps`).
        weight: [out, in].
        bias: [out].
        hidden: [rows, out], written: the stream.
        norm: [out]: weights of the norm that comes next.
        scaled: [rows, out], written: `hidden * norm`.
        squares: float32 [at least parts * rows], written: sums of squares of `hidden`, for each part of its columns.
        is_early: True if the kernel begins while the one before it ends, on a GPU that can
            (`outrider.models.cuda.overlap`). That is faster after attention, and slower after another product.
    """
    _launch(x, weight, bias, hidden, squares, norm=norm, scaled=scaled, is_early=is_early)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    squares: Tensor,
    *,
    epsilon: float = 0.0,
    norm: Tensor | None = None,
    scaled: Tensor | None = None,
    has_gate: bool = False,
    is_early: bool = False,
) -> None:
    num_rows, num_outputs = out.shape
    num_inputs = x.shape[1]
    block, inputs = outputs_of(num_outputs), inputs_of(num_inputs)
    num_tile_rows = num_rows + (2 if has_gate else 1) * block
    few_rows_kernel[(num_outputs // block,)](
        x,
        weight,
        # Absent inputs are never read.
        weight if bias is None else bias,
        out,
        weight if norm is None else norm,
        out if scaled is None else scaled,
        squares,
        epsilon,
        num_inputs,
        num_outputs,
        num_rows,
        block,
        GROUPS,
        inputs,
        num_inputs // outputs_of(num_inputs),
        triton.next_power_of_2(num_inputs // outputs_of(num_inputs)),
        bias is not None,
        has_gate,
        scaled is not None,
        overlaps(x.device),
        num_warps=GROUPS,
        num_stages=stages_of(num_tile_rows * GROUPS * inputs * x.element_size()),
        **launch_options(is_early and overlaps(x.device)),
    )


def outputs_of(num_outputs: int) -> int:
    """Returns how many outputs a program computes."""
    return 32 if num_outputs >= MANY_OUTPUTS else 16


def inputs_of(num_inputs: int) -> int:
    """Returns how many inputs a warp multiplies at a time: the largest power of two that divides all of its own."""
    own = num_inputs // GROUPS
    return min(MAX_INPUTS, own & -own)


def stages_of(num_bytes: int) -> int:
    """Returns the stages of a loop over tiles of so many bytes: the compiler keeps one tile fewer in flight."""
    return 1 + max(1, min(MAX_AHEAD, MAX_SHARED // num_bytes))


@triton.jit
def few_rows_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    norm: tl.tensor,
    scaled: tl.tensor,
    squares: tl.tensor,
    epsilon: tl.tensor,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    INPUTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    ADDS: tl.constexpr,
    TAKES_PART: tl.constexpr,
) -> None:
    """Computes some outputs of all rows in each program."""
    if TAKES_PART:
        gdc_launch_dependents()
    rows = tl.arange(0, NUM_ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, GROUPS)[:, None, None] * (NUM_INPUTS // GROUPS) + tl.arange(0, INPUTS)
    given = x + rows[:, None] * NUM_INPUTS + columns
    own = weight + outputs.to(tl.int64)[:, None] * NUM_INPUTS + columns
    places = out + rows[:, None] * NUM_OUTPUTS + outputs
    if TAKES_PART:
        gdc_wait()
    # Inputs that are used at the end are loaded meanwhile.
    if ADDS:
        # No other program reads or writes these columns of the stream.
        stream, norm_weight = tl.load(places), tl.load(norm + outputs)
    else:
        parts = tl.arange(0, PARTS)[:, None]
        squares_of_parts = tl.load(squares + parts * NUM_ROWS + rows, parts < NUM_PARTS, 0.0)
    sums = tl.zeros((GROUPS, NUM_ROWS, OUTPUTS), tl.float32)
    ups = tl.zeros((GROUPS, NUM_ROWS, OUTPUTS), tl.float32)
    for first in range(0, NUM_INPUTS // GROUPS, INPUTS):
        some = tl.load(given + first)
        sums = tl.dot(some, tl.permute(tl.load(own + first), 0, 2, 1), sums, input_precision="ieee")
        if HAS_GATE:
            above = tl.load(own + NUM_OUTPUTS * NUM_INPUTS + first)
            ups = tl.dot(some, tl.permute(above, 0, 2, 1), ups, input_precision="ieee")
    found, up = tl.sum(sums, 0), tl.sum(ups, 0)
    if not ADDS:
        factor = 1.0 / tl.sqrt_rn(tl.sum(squares_of_parts, 0) / NUM_INPUTS + epsilon)
        found *= factor[:, None]
        up *= factor[:, None]
    if HAS_BIAS:
        found += tl.load(bias + outputs).to(tl.float32)
        if HAS_GATE:
            up += tl.load(bias + NUM_OUTPUTS + outputs).to(tl.float32)
    if HAS_GATE:
        found = found / (1.0 + tl.exp(-found)) * up
    if ADDS:
        found += stream.to(tl.float32)
    kept = found.to(out.dtype.element_ty)
    tl.store(places, kept)
    if ADDS:
        # Computed from the stream as it is stored.
        wide = kept.to(tl.float32)
        tl.store(squares + tl.program_id(0) * NUM_ROWS + rows, tl.sum(wide * wide, 1))
        its_scaled = wide * norm_weight.to(tl.float32)
        tl.store(scaled + rows[:, None] * NUM_OUTPUTS + outputs, its_scaled.to(scaled.dtype.element_ty))
