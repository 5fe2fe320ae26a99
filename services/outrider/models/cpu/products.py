"""Products with constant weights on a CPU, each computed in the way that is fastest for its matrix. The bits of a row
do not depend on the number of rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outrider.models.cpu import kernels
from outrider.models.cpu.bfloat16 import PanelProduct, takes
from outrider.models.torch import products
from outrider.models.torch.products import MIN_LARGE_ENTRIES, Product


def make_product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """Makes the function `x @ weight.T + bias`, of weight [out, in] and bias [out]."""
    if takes(weight):
        return PanelProduct(weight, bias)
    if weight.dtype is torch.float32 and weight.numel() < MIN_LARGE_ENTRIES:
        # For draft models: a step of one row takes half as long again with oneDNN.
        return _make_small(weight, bias)
    return products.make_product(weight, bias)


def make_head(weight: Tensor, bias: Tensor | None = None) -> Product:
    """Makes the product that gives the logits: in float32 where the sums are, because bfloat16 logits near 20 lie an
    eighth apart."""
    return PanelProduct(weight, bias, torch.float32) if takes(weight) else make_product(weight, bias)


def _make_small(weight: Tensor, bias: Tensor | None) -> Product:
    num_outputs = weight.shape[0]
    columns = kernels.as_array(weight.t().contiguous())
    added = np.zeros(num_outputs, dtype=np.float32) if bias is None else kernels.as_array(bias)

    def small(x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], num_outputs)
        kernels.multiply(kernels.as_array(x), columns, added, kernels.as_array(out))
        return out

    return small
