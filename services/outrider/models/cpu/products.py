"""Products with weights that do not change, on a CPU: each by what is fastest for its matrix. The bits of a row do not
depend on the number of rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outrider.models.cpu import kernels
from outrider.models.cpu.bfloat16 import PanelProduct, takes
from outrider.models.torch import products
from outrider.models.torch.products import MIN_LARGE_ENTRIES, Product

MIN_NATIVE_ENTRIES = 2**16
"""The same in bfloat16 where oneDNN has instructions for it, and `PanelProduct` cannot take the matrix."""


def make_product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """Makes the function `x @ weight.T + bias`, of weight [out, in] and bias [out]."""
    if takes(weight):
        return PanelProduct(weight, bias)
    if weight.dtype in kernels.TYPES and weight.numel() < _least_entries(weight.dtype):
        return _make_small(weight, bias)
    return products.make_product(weight, bias)


def _make_small(weight: Tensor, bias: Tensor | None) -> Product:
    dtype, num_outputs = weight.dtype, weight.shape[0]
    columns = kernels.as_array(weight.float().t().contiguous())
    added = np.zeros(num_outputs, dtype=np.float32) if bias is None else kernels.as_array(bias.float())

    def small(x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], num_outputs, dtype=dtype)
        kernels.multiply(kernels.as_array(x), columns, added, kernels.as_array(out))
        return out

    return small


def _least_entries(dtype: torch.dtype) -> int:
    """Returns how many entries a matrix has at least for which oneDNN is faster than the kernel."""
    abilities = torch.cpu.get_capabilities()
    is_native = dtype == torch.bfloat16 and (abilities.get("avx512_bf16") or abilities.get("amx_bf16"))
    return MIN_NATIVE_ENTRIES if is_native else MIN_LARGE_ENTRIES
