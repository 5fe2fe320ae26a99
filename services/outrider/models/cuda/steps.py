"""The steps of a layer on a GPU: what launches its kernels, and where their results lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.cuda.inputs import MAX_SPLIT_ROWS, Inputs
from outrider.models.kv_cache import KVPool
from outrider.models.rotary import RotaryTable
from outrider.models.steps import AddAndNorm, Steps
from outrider.models.torch_steps import SILU_TYPES, interleaved_norms, torch_gate


@dataclass(frozen=True)
class Kernels:
    """Names the functions that launch kernels. Each of them writes to tensors that it is given."""

    check_shape: Callable[[int, int], None]
    """Raises ValueError if there is no attention for (query heads per key-value head, head_dim)."""
    add_and_norm: Callable[[Tensor, Tensor | None, Tensor, float, Tensor], None]
    """See `outrider.models.cuda.layer`, as for the gate."""
    gate_silu: Callable[[Tensor, Tensor], None]
    store_heads: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, float, Tensor, Tensor], None]
    """See `outrider.models.cuda.heads`."""
    attend: Callable[[Tensor, Tensor, Inputs, int, float, Tensor, Any], None]
    """See `outrider.models.cuda.attention`, as for its scratch memory."""
    make_scratch: Callable[[int, int, int, torch.device], Any]
    move_rows: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    """See `outrider.models.cuda.moves`."""
    best_tokens: Callable[[Tensor, Tensor, int], Tensor]
    """See `outrider.models.cuda.draws`."""
    compiler: str
    """Version of what compiles the kernels."""

    @classmethod
    def load(cls) -> Kernels:
        """Returns the kernels of this package. Raises ImportError if there is no Triton."""
        import triton

        from outrider.models.cuda import attention, draws, heads, layer, moves

        return cls(
            check_shape=attention.check_shape,
            add_and_norm=layer.add_and_norm,
            gate_silu=layer.gate_silu,
            store_heads=heads.store_heads,
            attend=attention.attend,
            make_scratch=attention.Scratch.make,
            move_rows=moves.move_rows,
            best_tokens=draws.best_tokens,
            compiler=triton.__version__,
        )


class CudaSteps(Steps[Inputs]):
    """Makes the steps by the kernels of a GPU. They read what changes from call to call from `Inputs` alone."""

    def __init__(self, rotary: RotaryTable, dtype: torch.dtype, kernels: Kernels, max_context_len: int) -> None:
        """
        Args:
            rotary: That of the model.
            dtype: Type of the weights, and of the residual stream.
            kernels: What is launched.
            max_context_len: Most slots of a chain.
        """
        self._dtype = dtype
        self._kernels = kernels
        # All of it now: a graph reads from where it lay when it was captured.
        self._turns = torch.view_as_real(rotary.up_to(max_context_len - 1))
        self._pool: KVPool | None = None

    def use(self, pool: KVPool, max_rows: int, num_queries: int) -> None:
        """Attends over a pool from here on.

        Args:
            pool: Keys and values.
            max_rows: Most rows of a forward.
            num_queries: Query heads.
        """
        shape = pool.shape
        self._pool = pool
        self._queries = torch.zeros(max_rows, num_queries, shape.head_dim, dtype=shape.dtype, device=shape.device)
        # Rows that are nobody's are not written: whatever is left of another forward is a number.
        self._attended = torch.zeros_like(self._queries).flatten(1)
        self._scratch = self._kernels.make_scratch(
            MAX_SPLIT_ROWS * num_queries, max_rows * shape.num_heads, shape.head_dim, shape.device
        )

    def move(self, inputs: Inputs) -> None:
        """Moves the accepted rows of trees, which everything else reads where they belong."""
        assert self._pool is not None, "the runner has called `use`"
        self._kernels.move_rows(self._pool.data, inputs.moves, inputs.spans, inputs.num_moved)

    def norm(self, module: Any) -> AddAndNorm:
        """Makes the sum and norm of the residual stream."""
        weight: Tensor = module.weight
        epsilon: float = module.variance_epsilon

        def add_and_norm(hidden: Tensor, summand: Tensor | None) -> Tensor:
            out = torch.empty_like(hidden)
            self._kernels.add_and_norm(hidden, summand, weight, epsilon, out)
            return out

        return add_and_norm

    def attention(self, index: int, module: Any) -> Callable[[Tensor, Inputs], Tensor]:
        """Makes the attention of a layer."""
        head_dim: int = module.head_dim
        num_queries: int = module.q_proj.out_features // head_dim
        num_keys: int = module.k_proj.out_features // head_dim
        scale: float = module.scaling
        norms, epsilon = None, 0.0
        if hasattr(module, "q_norm"):
            norms = interleaved_norms(module, num_queries, num_keys, self._dtype)
            epsilon = module.q_norm.variance_epsilon  # k_norm's too: both have the config's

        def attend(heads: Tensor, inputs: Inputs) -> Tensor:
            pool, num_rows = self._pool, len(heads)
            assert pool is not None, "the runner has called `use`"
            data, queries, attended = pool.data[index], self._queries[:num_rows], self._attended[:num_rows]
            places = inputs.positions, inputs.places
            self._kernels.store_heads(heads, self._turns, *places, norms, epsilon, queries, data)
            self._kernels.attend(queries, data, inputs, pool.block_size, scale, attended, self._scratch)
            return attended

        return attend

    def gate(self, activation: nn.Module) -> Callable[[Tensor], Tensor]:
        """Makes the gate of an MLP."""
        if not isinstance(activation, SILU_TYPES):
            return torch_gate(activation)

        def gate(gate_up: Tensor) -> Tensor:
            out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
            self._kernels.gate_silu(gate_up, out)
            return out

        return gate
