"""Products with weights in bfloat16 by the instruction that a CPU has for them (AVX512-BF16's VDPBF16PS).

At the few rows of a decoding step a product can be as fast as its weights are read. The library's kernels do not reach
that at these sizes. Here weights lie in the order in which they are read: panels of 32 outputs, and in each panel pairs
of inputs. A panel is multiplied with up to 14 rows at a time: so many sums fit into the registers.

Each sum adds pair after pair, from the first input to the last, whatever else is computed with it: the bits of a row do
not depend on the number of rows.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from outrider.models.cpu.kernels import Array, Kernel, add_and_norm, as_array, gate_silu
from outrider.models.cpu.vectors import INDEX, LANE, cgutils, intrinsic, loop, matrices

PANEL = 32
"""Outputs that are computed together: two vectors of sums a row."""
MAX_GROUP = 14
"""Most rows that are multiplied together."""
PAIRS_AT_ONCE = 64
"""Pairs of inputs that a thread lays side by side at a time."""
_NUM_SUMS = 16
_SUMS = ir.VectorType(ir.FloatType(), _NUM_SUMS)
_PAIRS = ir.VectorType(LANE, _NUM_SUMS)
"""Sixteen pairs of bfloat16, each as 32 bits."""
_NARROW = ir.VectorType(ir.IntType(16), _NUM_SUMS)


def has_instruction() -> bool:
    """Returns True if this CPU has the instruction."""
    return bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def takes(weight: Tensor) -> bool:
    """Returns True for a bfloat16 matrix [out, in] that divides into whole panels, if this CPU multiplies it fastest
    that way.

    It is not the fastest way on a CPU that multiplies whole tiles (AMX), which the library uses: there even 64 rows
    cost hardly more than one.
    """
    is_whole = weight.shape[0] % PANEL == 0 and weight.shape[1] % 2 == 0
    has_tiles = torch.cpu.get_capabilities().get("amx_bf16")
    return weight.dtype is torch.bfloat16 and is_whole and has_instruction() and not has_tiles


class PanelProduct:
    """Computes `x @ weight.T + bias` of bfloat16, [rows, in] to [rows, out], with a weight for which `takes` returns
    True."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        """
        Args:
            weight: [out, in].
            bias: [out].
            dtype: Type of the results. The sums are float32.
        """
        self._dtype = dtype
        self._num_outputs = weight.shape[0]
        self.panels = _panels_of(weight)
        """Weights as panels: int32 [out / 32, in / 2 * 32], each number holds a pair of inputs of one output."""
        self.bias: Array = np.zeros(self._num_outputs, np.float32) if bias is None else as_array(bias.float())
        """float32 [out], zeros if there is no bias."""

    def __call__(self, x: Tensor) -> Tensor:
        """Computes the product."""
        out = torch.empty(x.shape[0], self._num_outputs, dtype=self._dtype)
        multiply_bfloat16(as_array(x.contiguous()), self.panels, self.bias, as_array(out))
        return out


def _panels_of(weight: Tensor) -> Array:
    num_outputs, num_inputs = weight.shape
    pairs = weight.detach().contiguous().view(torch.int32)
    in_panels = pairs.view(num_outputs // PANEL, PANEL, num_inputs // 2).transpose(1, 2).contiguous()
    panels: Array = in_panels.view(num_outputs // PANEL, -1).numpy()
    return panels


def _make_multiply(num_rows: int) -> Any:
    """Makes the function that multiplies `num_rows` rows with one panel."""

    @intrinsic
    def multiply(_context: Any, x: Any, panels: Any, bias: Any, out: Any, row: Any, last: Any, panel: Any) -> Any:
        """Writes out[row : row + num_rows, 32 * panel : 32 * panel + 32] up to row `last`, in the type of `out`.

        `x` is flat: row `row` begins at row * in / 2, and the pairs of all these rows lie side by side.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given, weights, added, found = matrices(context, builder, signature, arguments)
            is_rounded = signature.args[3].dtype.bitwidth == 16
            first_row, last_row, number = arguments[4:]
            rows = [builder.add(first_row, INDEX(index)) for index in range(num_rows)]
            column, halves = builder.mul(number, INDEX(PANEL)), range(PANEL // _NUM_SUMS)
            begins = [builder.add(column, INDEX(half * _NUM_SUMS)) for half in halves]
            first = [added.vector_at(begin, _SUMS) for begin in begins]
            sums = [[_PairSum(builder, first[half]) for half in halves] for _ in rows]
            num_pairs = builder.sdiv(weights.num_columns, INDEX(PANEL))
            start, panel_start = builder.mul(first_row, num_pairs), weights.row(number)
            with loop(builder, INDEX(0), num_pairs, INDEX(1)) as pair:
                offset = builder.add(panel_start, builder.mul(pair, INDEX(PANEL)))
                read = [weights.vector_at(builder.add(offset, INDEX(half * _NUM_SUMS)), _PAIRS) for half in halves]
                place = builder.add(start, builder.mul(pair, INDEX(num_rows)))
                for index, of_row in enumerate(sums):
                    inputs = _spread(builder, given.at(builder.add(place, INDEX(index))))
                    for own, these in zip(of_row, read, strict=True):
                        own.add(these, inputs)
            for each, of_row in zip(rows, sums, strict=True):
                with builder.if_then(builder.icmp_signed("<", each, last_row)):
                    for begin, own in zip(begins, of_row, strict=True):
                        found.put(own.rounded() if is_rounded else own.value, builder.add(found.row(each), begin))
            return context.get_dummy_value()

        return types.void(x, panels, bias, out, row, last, panel), generate

    return multiply


class _PairSum:
    """Adds up products of pairs in each lane of a vector."""

    _ADD = ir.FunctionType(_SUMS, [_SUMS, _PAIRS, _PAIRS])
    _ROUND = ir.FunctionType(_NARROW, [_SUMS])

    def __init__(self, builder: Any, first: Any) -> None:
        self._builder, self._place = builder, cgutils.alloca_once(builder, _SUMS)
        builder.store(first, self._place)

    def add(self, x: Any, y: Any) -> None:
        # As assembly text: the types of the compiler's intrinsic change from one version to the next.
        added = self._builder.asm(self._ADD, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [self.value, x, y], False)
        self._builder.store(added, self._place)

    def rounded(self) -> Any:
        """Returns the bits of the sums as bfloat16, rounded to the nearest."""
        return self._builder.asm(self._ROUND, "vcvtneps2bf16 $1, $0", "=v,v", [self.value], False)

    @property
    def value(self) -> Any:
        """The sums so far."""
        return self._builder.load(self._place)


def _spread(builder: Any, number: Any) -> Any:
    """Returns a vector with the number in every lane."""
    undefined = ir.Constant(_PAIRS, ir.Undefined)
    return builder.shuffle_vector(
        builder.insert_element(undefined, number, LANE(0)), undefined, ir.Constant(_PAIRS, [0] * _NUM_SUMS)
    )


_multiply_1, _multiply_2, _multiply_4, _multiply_6 = (_make_multiply(num_rows) for num_rows in (1, 2, 4, 6))
_multiply_8, _multiply_10, _multiply_12 = _make_multiply(8), _make_multiply(10), _make_multiply(12)
_multiply_14 = _make_multiply(14)


@numba.njit(inline="always")
def _group_size(num_left: Any) -> Any:  # pragma: no cover
    """Returns how many of the remaining rows are multiplied together: one, or an even number; if the rows are odd, the
    last one is padding. Groups are of equal size as far as possible."""
    if num_left == 1:
        return 1
    num_groups = (num_left + MAX_GROUP - 1) // MAX_GROUP
    return (num_left + 2 * num_groups - 1) // (2 * num_groups) * 2


@numba.njit(nogil=True, error_model="numpy", cache=True)
def _multiply_panel(
    side_by_side: Any, panels: Any, bias: Any, out: Any, num_rows: Any, panel: Any
) -> None:  # pragma: no cover
    """Multiplies one panel with all rows."""
    row = 0
    while row < num_rows:
        size = _group_size(num_rows - row)
        if size == 1:
            _multiply_1(side_by_side, panels, bias, out, row, num_rows, panel)
        elif size == 2:
            _multiply_2(side_by_side, panels, bias, out, row, num_rows, panel)
        elif size == 4:
            _multiply_4(side_by_side, panels, bias, out, row, num_rows, panel)
        elif size == 6:
            _multiply_6(side_by_side, panels, bias, out, row, num_rows, panel)
        elif size == 8:
            _multiply_8(side_by_side, panels, bias, out, row, num_rows, panel)
        elif size == 10:
            _multiply_10(side_by_side, panels, bias, out, row, num_rows, panel)
        elif size == 12:
            _multiply_12(side_by_side, panels, bias, out, row, num_rows, panel)
        else:
            _multiply_14(side_by_side, panels, bias, out, row, num_rows, panel)
        row += size


@Kernel
def multiply_bfloat16(x: Array, panels: Array, bias: Array, out: Array) -> None:  # pragma: no cover
    """Computes `x @ weight.T + bias`.

    Args:
        x: bfloat16's bits [rows, in].
        panels: int32 [out / 32, in / 2 * 32], see `PanelProduct`.
        bias: float32 [out].
        out: bfloat16's bits or float32 [rows, out], written.
    """
    pairs = x.view(np.int32)
    num_rows, num_pairs = pairs.shape
    side_by_side = pairs[0]
    if num_rows > 1:
        # Rows that are multiplied together are read as one stream: one stream for each would be too many.
        side_by_side = np.empty((num_rows + num_rows % 2) * num_pairs, np.int32)
        for block in numba.prange((num_pairs + PAIRS_AT_ONCE - 1) // PAIRS_AT_ONCE):
            begin, end = block * PAIRS_AT_ONCE, min((block + 1) * PAIRS_AT_ONCE, num_pairs)
            first = 0
            while first < num_rows:
                size = _group_size(num_rows - first)
                for row in range(min(size, num_rows - first)):
                    for pair in range(begin, end):
                        side_by_side[first * num_pairs + pair * size + row] = pairs[first + row, pair]
                first += size
    for panel in numba.prange(panels.shape[0]):
        _multiply_panel(side_by_side, panels, bias, out, num_rows, panel)


_multiply, _add_and_norm, _gate_silu = multiply_bfloat16.compiled, add_and_norm.compiled, gate_silu.compiled


@Kernel
def norm_and_multiply(
    hidden: Array, summand: Array, norm: Array, epsilon: float, panels: Array, bias: Array, out: Array
) -> None:  # pragma: no cover
    """Adds to the residual stream, and multiplies its norm: the first part of a layer, up to its heads.

    Args:
        hidden: float32 [rows, size], written.
        summand: bfloat16's bits [rows, size], or [0, size] if nothing is added.
        norm: float32 [size]: weight of the norm.
        epsilon: That of the norm.
        panels: int32 [out / 32, size / 2 * 32].
        bias: float32 [out].
        out: bfloat16's bits [rows, out], written.
    """
    normed = np.empty(hidden.shape, np.uint16)
    _add_and_norm(hidden, summand, norm, epsilon, normed)
    _multiply(normed, panels, bias, out)


@Kernel
def finish_layer(
    attended: Array,
    output: Array,
    output_bias: Array,
    hidden: Array,
    norm: Array,
    epsilon: float,
    gate_up: Array,
    gate_up_bias: Array,
    down: Array,
    down_bias: Array,
    out: Array,
) -> None:  # pragma: no cover
    """Computes the rest of a layer after its attention: the output, added to the residual stream, and the gated MLP.

    Args:
        attended: bfloat16's bits [rows, query heads * head_dim].
        output: Panels of the attention's output, int32 [size / 32, query heads * head_dim / 2 * 32].
        output_bias: float32 [size].
        hidden: float32 [rows, size]: the residual stream, written.
        norm: float32 [size]: weight of the norm.
        epsilon: That of the norm.
        gate_up: Panels of gate and up, int32 [2 * gated / 32, size / 2 * 32].
        gate_up_bias: float32 [2 * gated].
        down: Panels of the down-projection, int32 [size / 32, gated / 2 * 32].
        down_bias: float32 [size].
        out: bfloat16's bits [rows, size], written: what still has to be added to the stream.
    """
    num_rows, size = hidden.shape
    summand, normed = np.empty((num_rows, size), np.uint16), np.empty((num_rows, size), np.uint16)
    wide, gated = (
        np.empty((num_rows, len(gate_up_bias)), np.uint16),
        np.empty((num_rows, len(gate_up_bias) // 2), np.uint16),
    )
    _multiply(attended, output, output_bias, summand)
    _add_and_norm(hidden, summand, norm, epsilon, normed)
    _multiply(normed, gate_up, gate_up_bias, wide)
    _gate_silu(wide, gated)
    _multiply(gated, down, down_bias, out)
