"""Products with constant weights, by torch and by oneDNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]
"""Maps [rows, in] to [rows, out]."""
MakeProduct = Callable[[Tensor, Tensor | None], Product]
"""Makes the function `x @ weight.T + bias`, of weight [out, in] and bias [out]."""

MIN_LARGE_ENTRIES = 2**19
"""Matrices with fewer entries are small: a call of oneDNN alone takes some 40 us."""
PACKED_FOR_ROWS = {torch.bfloat16: 1, torch.float32: 8}
"""Number of rows for which the layout of the weights is optimised."""


def make_product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """Makes the function `x @ weight.T + bias`, of weight [out, in] and bias [out]. The bits of a row depend on the
    number of rows, except with oneDNN's products on a CPU."""
    if weight.device.type == "cpu" and _can_be_packed(weight.dtype):
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


def make_head(weight: Tensor, bias: Tensor | None, make: MakeProduct) -> Product:
    """Makes the product that gives the logits: in float32 if the device can, which rounds them less; otherwise as
    `make` does."""
    if weight.device.type != "cuda" or weight.dtype is torch.float32 or bias is not None:
        return make(weight, bias)
    return HeadProduct(weight)


class HeadProduct(TorchProduct):
    """Computes float32 logits from 16-bit weights, on a GPU: bfloat16 logits near 20 lie an eighth apart."""

    def __call__(self, x: Tensor) -> Tensor:
        """Computes the product."""
        return torch.mm(x, self._transposed, out_dtype=torch.float32)


class PartialHead:
    """Computes the logits of some tokens, [rows, in] to float32 [rows, vocab]; those of all others are minus infinity.

    A draft model may do so: it never drafts the others (FR-Spec, Zhao et al., 2025, arXiv 2502.14856).
    """

    def __init__(self, product: Product, token_ids: Tensor, vocab_size: int) -> None:
        """
        Args:
            product: Computes the logits of these tokens alone.
            token_ids: Whole numbers [tokens].
            vocab_size: Width of the logits.
        """
        self._product, self._token_ids, self._vocab_size = product, token_ids, vocab_size

    def __call__(self, x: Tensor) -> Tensor:
        """Computes the logits."""
        found = self._product(x).float()
        logits = found.new_full((len(found), self._vocab_size), -torch.inf)
        return logits.index_copy_(1, self._token_ids, found)


def concatenate(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Joins weights and biases for one product that gives the outputs of all `linears` side by side."""
    weight = torch.cat(tuple(linear.weight for linear in linears))
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases: list[Tensor] = [
        linear.bias if linear.bias is not None else linear.weight.new_zeros(linear.out_features) for linear in linears
    ]
    return weight, torch.cat(biases)


def _make_packed(weight: Tensor, bias: Tensor | None) -> Product:
    # oneDNN multiplies weights in its own blocked layout: they are packed once, not at every call. The operators are
    # private; torch's own compiler calls them for frozen weights (`_inductor`, mkldnn_fusion.py).
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS[weight.dtype])
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def prepacked(x: Tensor) -> Tensor:
        # "none": no activation is fused into the product.
        product: Tensor = multiply(x, packed, bias, "none", [], "")
        return product

    return prepacked


def _can_be_packed(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.enabled:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
