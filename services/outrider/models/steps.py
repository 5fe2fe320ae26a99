"""The steps of a layer: everything but its products, for one kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from outrider.models.torch.products import Product

AddAndNorm = Callable[[Tensor, Tensor | None], Tensor]
"""Adds its second argument to the residual stream [rows, hidden], and returns the stream's norm in the weights'
type."""


Layout = TypeVar("Layout")
"""Lays out the rows of a forward for the attention of one kind of steps: a `Plan` for those of most devices."""


class Steps(ABC, Generic[Layout]):
    """Makes the steps of a layer."""

    @abstractmethod
    def norm(self, module: Any) -> AddAndNorm:
        """Makes the function that adds to the residual stream, in place, and returns its norm in the weights' type."""

    @abstractmethod
    def attention(self, index: int, module: Any) -> Callable[[Tensor, Layout], Tensor]:
        """Makes the function of [rows, heads * head_dim], queries, keys and values, to [rows, query heads * head_dim].

        Queries and keys come with the halves that turn together interleaved.
        """

    @abstractmethod
    def gate(self, activation: nn.Module) -> Callable[[Tensor], Tensor]:
        """Makes the function of [rows, 2 * size], gate and up, to [rows, size]."""

    def heads(self, index: int, norm: Any, qkv: Product) -> Callable[[Tensor, Tensor | None], Tensor]:
        """Makes the function that adds to the residual stream, and returns queries, keys and values of its norm."""
        add_and_norm = self.norm(norm)

        def heads(hidden: Tensor, summand: Tensor | None) -> Tensor:
            return qkv(add_and_norm(hidden, summand))

        return heads

    def mlp(
        self, index: int, output: Product, norm: Any, gate_up: Product, activation: nn.Module, down: Product
    ) -> Callable[[Tensor, Tensor], Tensor | None]:
        """Makes the function of the residual stream, written, and of the attention's results, [rows, query heads *
        head_dim]. It returns what the layer still has to add to the stream, as the steps' own norms take it, mostly
        [rows, hidden]; None if nothing is left to add."""
        add_and_norm, gate = self.norm(norm), self.gate(activation)

        def mlp(hidden: Tensor, attended: Tensor) -> Tensor:
            return down(gate(gate_up(add_and_norm(hidden, output(attended)))))

        return mlp
