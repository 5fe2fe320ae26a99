"""Matrix products with few rows, where reading the weights is all the work.

On a CPU, oneDNN reads weights in its own blocked layout nearly twice as fast as in rows (30 against 16 GB/s a core
in bfloat16). Its calls cost about 15 us more than a plain product, so small float32 matrices stay plain.

The layout is chosen for a number of rows, and serves any other number too. In float32 one that is chosen for a single
row is the plain one, which makes the second row cost as much as the first: 100 M parameters took 82 and 103 ms for 2
and 8 rows (Zen 3, one core); chosen for 8 rows 38 and 57 ms, and for 1 row the same 34 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

#: Maps [rows, in] to [rows, out].
Product = Callable[[Tensor], Tensor]

#: float32 matrices with fewer entries are faster unpacked.
MIN_PACKED_ENTRIES = 2**20
#: How many rows the layout is chosen for.
PACKED_FOR_ROWS = {torch.bfloat16: 1, torch.float32: 8}


def make_product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """The function `x @ weight.T + bias` for [out, in] weights that will not change."""
    if not _is_worth_packing(weight):
        transposed = weight.contiguous().t()

        def plain(x: Tensor) -> Tensor:
            return torch.mm(x, transposed) if bias is None else torch.addmm(bias, x, transposed)

        return plain

    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS[weight.dtype])
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def prepacked(x: Tensor) -> Tensor:
        product: Tensor = multiply(x, packed, bias, "none", [], "")
        return product

    return prepacked


def concatenate(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of one product that gives the outputs of all `linears` side by side."""
    weight = torch.cat(tuple(linear.weight for linear in linears))
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases: list[Tensor] = [
        linear.bias if linear.bias is not None else linear.weight.new_zeros(linear.out_features) for linear in linears
    ]
    return weight, torch.cat(biases)


def _is_worth_packing(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.enabled:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32 and weight.numel() >= MIN_PACKED_ENTRIES
