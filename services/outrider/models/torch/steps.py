"""The steps between the products of a layer, by torch's operators: for any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation

from outrider.models.rotary import RotaryTable, interleaved_norms
from outrider.models.steps import AddAndNorm, Steps
from outrider.models.torch.plan import Plan

SILU_TYPES = (nn.SiLU, SiLUActivation)
"""Modules that compute x * sigmoid(x): torch's, and the library's."""


class TorchSteps(Steps[Plan]):
    """Makes the steps by torch's operators."""

    def __init__(self, rotary: RotaryTable, dtype: torch.dtype, stream: torch.dtype) -> None:
        """
        Args:
            rotary: That of the model.
            dtype: Type of the weights.
            stream: Type of the residual stream, of the norms and of the attention.
        """
        self._rotary = rotary
        self._dtype = dtype
        self._stream = stream

    def norm(self, module: Any) -> AddAndNorm:
        """Makes the sum and norm of the residual stream."""
        weight: Tensor = module.weight.to(self._stream)
        epsilon: float = module.variance_epsilon

        def add_and_norm(hidden: Tensor, summand: Tensor | None) -> Tensor:
            if summand is not None:
                hidden.add_(summand)
            return functional.rms_norm(hidden, weight.shape, weight, epsilon).to(self._dtype)

        return add_and_norm

    def attention(self, index: int, module: Any) -> Callable[[Tensor, Plan], Tensor]:
        """Makes the attention of a layer."""
        return _Attention(index, module, self._rotary, self._dtype, self._stream)

    def gate(self, activation: nn.Module) -> Callable[[Tensor], Tensor]:
        """Makes the gate of an MLP."""
        return torch_gate(activation)


class _Attention:
    """Runs head norms, rotary embedding and attention of a layer."""

    def __init__(self, index: int, module: Any, rotary: RotaryTable, dtype: torch.dtype, stream: torch.dtype) -> None:
        self._index = index
        self._rotary = rotary
        self._dtype = dtype
        self._stream = stream
        self._scale: float = module.scaling
        self._head_dim: int = module.head_dim
        self._num_queries: int = module.q_proj.out_features // self._head_dim
        self._num_keys: int = module.k_proj.out_features // self._head_dim
        self._num_turned = self._num_queries + self._num_keys
        self._norms: Tensor | None = None
        if hasattr(module, "q_norm"):
            self._norms = interleaved_norms(module, self._num_queries, self._num_keys, stream)
            self._epsilon: float = module.q_norm.variance_epsilon  # k_norm's too: both have the config's

    def __call__(self, heads: Tensor, plan: Plan) -> Tensor:
        heads = heads.view(len(heads), -1, self._head_dim).to(self._stream)
        # Qwen3 norms its heads before turning them.
        if self._norms is not None:
            # Without weights: `rms_norm` takes one row of them for all heads, and queries and keys have different ones.
            turned = heads[:, : self._num_turned]
            normed = functional.rms_norm(turned, (self._head_dim,), None, self._epsilon)
            heads = torch.cat((normed.mul_(self._norms), heads[:, self._num_turned :]), 1)
        self._turn(heads.narrow(1, 0, self._num_turned), plan)
        queries, keys_values = heads.split_with_sizes([self._num_queries, 2 * self._num_keys], 1)
        keys_values = keys_values.view(len(heads), 2, self._num_keys, self._head_dim)
        return plan.attend(self._index, queries, keys_values, self._scale).to(self._dtype)

    def _turn(self, heads: Tensor, plan: Plan) -> None:
        """Turns [rows, heads, head_dim] in place."""
        turns = self._rotary.up_to(plan.last_position).index_select(0, plan.position_ids).unsqueeze(1)
        pairs = torch.view_as_complex(heads.float().view(*heads.shape[:2], -1, 2))
        pairs.mul_(turns)
        # In float32 `pairs` is a view, and `heads` are turned by now; for any other type `float()` has made a copy.
        if heads.dtype is not torch.float32:
            heads.copy_(torch.view_as_real(pairs).flatten(-2))


def torch_gate(activation: nn.Module) -> Callable[[Tensor], Tensor]:
    """Makes the function of [rows, 2 * size], gate and up, to [rows, size]."""
    activate = functional.silu if isinstance(activation, SILU_TYPES) else activation

    def gate(gate_up: Tensor) -> Tensor:
        gated, up = gate_up.chunk(2, 1)
        found: Tensor = activate(gated).mul_(up)
        return found

    return gate
