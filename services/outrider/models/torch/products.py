"""Products with weights that do not change, in the layout and by the library that are fastest for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from outrider.models.cpu import bfloat16, kernels

Product = Callable[[Tensor], Tensor]
"""Maps [rows, in] to [rows, out]."""

MIN_LARGE_ENTRIES = 2**19
"""Matrices with fewer entries are multiplied by a kernel of this package: a call of oneDNN alone takes some 40 us."""
MIN_NATIVE_ENTRIES = 2**16
"""The same in bfloat16 where oneDNN has instructions for it, and `PanelProduct` cannot take the matrix."""
MIN_PACKED_ENTRIES = 2**20
"""Matrices of float32 with fewer entries are faster by torch's own products than packed."""
PACKED_FOR_ROWS = {torch.bfloat16: 1, torch.float32: 8}
"""Rows of a product that the layout of the weights is chosen for."""


def make_product(
    weight: Tensor, bias: Tensor | None = None, *, is_exact: bool = True, use_kernels: bool = True
) -> Product:
    """Makes the function `x @ weight.T + bias`.

    Args:
        weight: [out, in].
        bias: [out].
        is_exact: True if the bits of a row may not depend on the number of rows: on a CPU those of oneDNN's products do
            not, and those of torch's own in float32 do.
        use_kernels: True if matrices on a CPU may be multiplied by this package's own kernels, whose bits do not.
    """
    is_on_cpu = weight.device.type == "cpu"
    if use_kernels and is_on_cpu and bfloat16.takes(weight):
        return bfloat16.PanelProduct(weight, bias)
    if use_kernels and is_on_cpu and weight.dtype in kernels.TYPES and weight.numel() < _least_entries(weight.dtype):
        return _make_small(weight, bias)
    if is_on_cpu and _can_be_packed(weight.dtype) and (is_exact or _is_worth_packing(weight)):
        return _make_packed(weight, bias)
    return TorchProduct(weight, bias)


class TorchProduct:
    """Computes `x @ weight.T + bias` by torch's own product, [rows, in] to [rows, out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """
        Args:
            weight: [out, in].
            bias: [out].
        """
        self.weight, self.bias = weight.contiguous(), bias
        self._transposed = self.weight.t()

    def __call__(self, x: Tensor) -> Tensor:
        """Computes the product."""
        if self.bias is None:
            return torch.mm(x, self._transposed)
        return torch.addmm(self.bias, x, self._transposed)


def make_head(weight: Tensor, bias: Tensor | None, *, is_exact: bool, use_kernels: bool) -> Product:
    """Makes the product that gives the logits: in float32 where the device can, which rounds them less.

    Args: see `make_product`.
    """
    if weight.device.type != "cuda" or weight.dtype is torch.float32 or bias is not None:
        return make_product(weight, bias, is_exact=is_exact, use_kernels=use_kernels)
    return HeadProduct(weight)


class HeadProduct(TorchProduct):
    """Computes logits in float32 of weights of 16 bits, on a GPU: those near 20 lie an eighth apart in bfloat16."""

    def __call__(self, x: Tensor) -> Tensor:
        """Computes the product."""
        return torch.mm(x, self._transposed, out_dtype=torch.float32)


def concatenate(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Puts together weight and bias of one product that gives the outputs of all `linears` side by side."""
    weight = torch.cat(tuple(linear.weight for linear in linears))
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases: list[Tensor] = [
        linear.bias if linear.bias is not None else linear.weight.new_zeros(linear.out_features) for linear in linears
    ]
    return weight, torch.cat(biases)


def _make_small(weight: Tensor, bias: Tensor | None) -> Product:
    dtype, num_outputs = weight.dtype, weight.shape[0]
    columns = kernels.as_array(weight.float().t().contiguous())
    added = np.zeros(num_outputs, dtype=np.float32) if bias is None else kernels.as_array(bias.float())

    def small(x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], num_outputs, dtype=dtype)
        kernels.multiply(kernels.as_array(x), columns, added, kernels.as_array(out))
        return out

    return small


def _make_packed(weight: Tensor, bias: Tensor | None) -> Product:
    # oneDNN multiplies weights in a blocked layout of its own: they are put into it once, not at every call.
    # The operators are private; torch's own compiler calls them for frozen weights (`_inductor`, mkldnn_fusion.py).
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS[weight.dtype])
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def prepacked(x: Tensor) -> Tensor:
        # "none": no activation is fused into the product.
        product: Tensor = multiply(x, packed, bias, "none", [], "")
        return product

    return prepacked


def _least_entries(dtype: torch.dtype) -> int:
    """Returns how many entries a matrix has at least for which oneDNN is faster than the kernel."""
    abilities = torch.cpu.get_capabilities()
    is_native = dtype == torch.bfloat16 and (abilities.get("avx512_bf16") or abilities.get("amx_bf16"))
    return MIN_NATIVE_ENTRIES if is_native else MIN_LARGE_ENTRIES


def _can_be_packed(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.enabled:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def _is_worth_packing(weight: Tensor) -> bool:
    return weight.dtype != torch.float32 or weight.numel() >= MIN_PACKED_ENTRIES
