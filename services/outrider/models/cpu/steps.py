"""The steps between the products of a layer, by the kernels of a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.models.cpu import kernels
from outrider.models.cpu.bfloat16 import PanelProduct, finish_layer, norm_and_multiply
from outrider.models.cpu.kernels import Array, as_array
from outrider.models.cpu.paths import CpuPlan
from outrider.models.rotary import RotaryTable, interleaved_norms
from outrider.models.steps import AddAndNorm, Steps
from outrider.models.torch.products import Product
from outrider.models.torch.steps import SILU_TYPES, torch_gate


class _Buffers(threading.local):
    """Keeps room for the results of steps, separately for each thread: in tests a model may run in several."""

    def __init__(self) -> None:
        self.by_size: dict[tuple[str, int], tuple[Tensor, Array]] = {}


class CpuSteps(Steps[CpuPlan]):
    """Makes the steps by the kernels of a CPU. The residual stream is float32.

    The next layer's step overwrites a step's results: at a few rows a new tensor costs as much as its arithmetic.
    """

    def __init__(self, rotary: RotaryTable, dtype: torch.dtype) -> None:
        """
        Args:
            rotary: That of the model.
            dtype: Type of the weights.
        """
        self._rotary, self._table = rotary, rotary.up_to(0)
        self._turns = as_array(torch.view_as_real(self._table))
        self._dtype = dtype
        # Other types are converted: float16 is never run on a CPU for speed.
        self._kernel_type = dtype if dtype in kernels.TYPES else torch.float32
        self._buffers = _Buffers()

    def norm(self, module: Any) -> AddAndNorm:
        """Makes the sum and norm of the residual stream."""
        weight = as_array(module.weight.float())
        size, epsilon = len(weight), float(module.variance_epsilon)
        nothing = as_array(torch.empty(0, size, dtype=self._kernel_type))

        def add_and_norm(hidden: Tensor, summand: Tensor | None) -> Tensor:
            out, out_array = self._buffer("normed", hidden.shape[0], size)
            added = nothing if summand is None else self._read(summand)
            kernels.add_and_norm(as_array(hidden), added, weight, epsilon, out_array)
            return self._written(out)

        return add_and_norm

    def attention(self, index: int, module: Any) -> Callable[[Tensor, CpuPlan], Tensor]:
        """Makes the attention of a layer."""
        head_dim: int = module.head_dim
        num_queries: int = module.q_proj.out_features // head_dim
        num_keys: int = module.k_proj.out_features // head_dim
        num_heads = num_queries + 2 * num_keys
        scale: float = module.scaling
        norms, epsilon = np.empty((0, head_dim), dtype=np.float32), 0.0
        if hasattr(module, "q_norm"):
            norms = as_array(interleaved_norms(module, num_queries, num_keys, torch.float32))
            epsilon = module.q_norm.variance_epsilon  # k_norm's too: both have the config's

        def attend(heads: Tensor, plan: CpuPlan) -> Tensor:
            paths, num_rows = plan.paths, heads.shape[0]
            out, out_array = self._buffer("attended", num_rows, num_queries * head_dim)
            turns = self._turns_up_to(plan.last_position)
            queries = paths.queries(num_rows, num_keys, num_queries // num_keys)
            given = self._read(heads).reshape(num_rows, num_heads, head_dim)
            data = paths.data[index]
            kernels.store_heads(given, turns, plan.position_array, plan.places, norms, epsilon, scale, queries, data)
            paths.attend(data, queries, out_array)
            plan.num_attended += 1
            return self._written(out)

        return attend

    def gate(self, activation: nn.Module) -> Callable[[Tensor], Tensor]:
        """Makes the gate of an MLP."""
        if not isinstance(activation, SILU_TYPES):
            return torch_gate(activation)

        def gate(gate_up: Tensor) -> Tensor:
            num_rows, width = gate_up.shape
            out, out_array = self._buffer("gated", num_rows, width // 2)
            kernels.gate_silu(self._read(gate_up), out_array)
            return self._written(out)

        return gate

    def heads(self, index: int, norm: Any, qkv: Product) -> Callable[[Tensor, Tensor | None], Tensor]:
        """Makes the norm and the product of heads: one call if the product is by panels."""
        if not isinstance(qkv, PanelProduct):
            return super().heads(index, norm, qkv)
        weight, epsilon = as_array(norm.weight.float()), float(norm.variance_epsilon)
        nothing = np.empty((0, len(weight)), dtype=np.uint16)
        num_heads = len(qkv.bias)

        def heads(hidden: Tensor, summand: Tensor | None) -> Tensor:
            out, out_array = self._buffer("heads", hidden.shape[0], num_heads)
            added = nothing if summand is None else as_array(summand)
            norm_and_multiply(as_array(hidden), added, weight, epsilon, qkv.panels, qkv.bias, out_array)
            return out

        return heads

    def mlp(
        self, index: int, output: Product, norm: Any, gate_up: Product, activation: nn.Module, down: Product
    ) -> Callable[[Tensor, Tensor], Tensor | None]:
        """Makes the function for what follows attention: one call if all products are by panels."""
        if not (
            isinstance(activation, SILU_TYPES)
            and isinstance(output, PanelProduct)
            and isinstance(gate_up, PanelProduct)
            and isinstance(down, PanelProduct)
        ):
            return super().mlp(index, output, norm, gate_up, activation, down)
        weight, epsilon = as_array(norm.weight.float()), float(norm.variance_epsilon)
        arrays = weight, epsilon, gate_up.panels, gate_up.bias, down.panels, down.bias
        output_panels, output_bias, size = output.panels, output.bias, len(weight)

        def mlp(hidden: Tensor, attended: Tensor) -> Tensor:
            out, out_array = self._buffer("summand", hidden.shape[0], size)
            finish_layer(as_array(attended), output_panels, output_bias, as_array(hidden), *arrays, out_array)
            return out

        return mlp

    def _buffer(self, name: str, num_rows: int, size: int) -> tuple[Tensor, Array]:
        """Returns room for a step's result: a tensor, and its array."""
        buffers, key = self._buffers.by_size, (name, num_rows)
        if key not in buffers:
            # Buffers for another number of rows are freed: after a prompt, they are large.
            for other in [other for other in buffers if other[1] != num_rows]:
                del buffers[other]
            # Zeros: padding rows are read as well, and should not be NaN.
            tensor = torch.zeros(num_rows, size, dtype=self._kernel_type)
            buffers[key] = tensor, as_array(tensor)
        return buffers[key]

    def _turns_up_to(self, last_position: int) -> Array:
        """Returns the turns of positions: float32 [positions, head_dim / 2, 2], cosines and sines."""
        table = self._rotary.up_to(last_position)
        # Kept, because every layer asks for it.
        if table is not self._table:
            self._turns = as_array(torch.view_as_real(table))
            self._table = table
        return self._turns

    def _read(self, tensor: Tensor) -> Array:
        return as_array(tensor if tensor.dtype is self._kernel_type else tensor.to(self._kernel_type))

    def _written(self, tensor: Tensor) -> Tensor:
        return tensor if self._kernel_type is self._dtype else tensor.to(self._dtype)
