"""The steps of a layer on a GPU: launches their kernels, and holds the memory of their results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import structlog
import torch
from torch import Tensor, nn

from outrider.models.cuda.inputs import MAX_SPLIT_ROWS, MAX_WANTED, Inputs
from outrider.models.kv_cache import KVPool
from outrider.models.rotary import RotaryTable, interleaved_norms
from outrider.models.steps import AddAndNorm, Steps
from outrider.models.torch.products import Product, TorchProduct
from outrider.models.torch.steps import SILU_TYPES, torch_gate

log = structlog.get_logger(__name__)

FEW_ROWS = 16
"""Rows of fused products. On an H200 all layers of a model of .6 B parameters take .89 ms with them, and 1.06 ms with a
library's; with 32 rows 1.05 and 1.07 ms, and the layers of a model of 8 B 5.03 and 4.58 ms."""
FUSED_TYPE = torch.bfloat16
"""Type of weights that fused products support. No units multiply float32, and in float16 the stream times the weights
of its norm may overflow before it is divided by its length."""
FUSED_OUTPUTS, FUSED_INPUTS = 32, 64
"""Outputs and inputs of a fused product are multiples of these."""


class MultiplyAdd(Protocol):
    """See `outrider.models.cuda.few_rows`."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hidden: Tensor,
        norm: Tensor,
        scaled: Tensor,
        squares: Tensor,
        *,
        is_early: bool,
    ) -> None:
        """Adds a product to the residual stream."""


@dataclass(frozen=True)
class Kernels:
    """Names the functions that launch kernels. Each writes to tensors that it is given."""

    check_shape: Callable[[int, int], None]
    """Raises ValueError if there is no attention for (query heads per key-value head, head_dim)."""
    add_and_norm: Callable[[Tensor, Tensor | None, Tensor, float, Tensor], None]
    """See `outrider.models.cuda.layer`, also for the gate."""
    gate_silu: Callable[[Tensor, Tensor], None]
    store_heads: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, float, Tensor, Tensor], None]
    """See `outrider.models.cuda.heads`."""
    attend: Callable[[Tensor, Tensor, Inputs, int, float, Tensor, Any], None]
    """See `outrider.models.cuda.attention`, also for its scratch memory."""
    make_scratch: Callable[[int, int, int, torch.device], Any]
    move_rows: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    """See `outrider.models.cuda.moves`."""
    best_tokens: Callable[[Tensor, Tensor, int], Tensor]
    """See `outrider.models.cuda.draws`."""
    norm_multiply: Callable[[Tensor, Tensor, float, Tensor, Tensor | None, Tensor], None]
    """See `outrider.models.cuda.few_rows`, also for the next two."""
    norm_gate: Callable[[Tensor, Tensor, float, Tensor, Tensor | None, Tensor], None]
    multiply_add: MultiplyAdd
    takes_invariant: Callable[[Tensor], bool]
    """See `takes` of `outrider.models.cuda.invariant`; the next two are from there, too."""
    splits_of: Callable[[int, int], int]
    multiply: Callable[[Tensor, Tensor, Tensor | None, Tensor], None]
    compiler: str
    """Version of the compiler of the kernels."""

    @classmethod
    def load(cls) -> Kernels:
        """Returns the kernels of this package. Raises ImportError if there is no Triton."""
        import triton

        from outrider.models.cuda import attention, draws, few_rows, heads, invariant, layer, moves

        return cls(
            check_shape=attention.check_shape,
            add_and_norm=layer.add_and_norm,
            gate_silu=layer.gate_silu,
            store_heads=heads.store_heads,
            attend=attention.attend,
            make_scratch=attention.Scratch.make,
            move_rows=moves.move_rows,
            best_tokens=draws.best_tokens,
            norm_multiply=few_rows.norm_multiply,
            norm_gate=few_rows.norm_gate,
            multiply_add=few_rows.multiply_add,
            takes_invariant=invariant.takes,
            splits_of=invariant.splits_of,
            multiply=invariant.multiply,
            compiler=triton.__version__,
        )


class CudaSteps(Steps[Inputs]):
    """Makes the steps by the kernels of a GPU. Data that changes from call to call is read from `Inputs` alone."""

    def __init__(
        self, rotary: RotaryTable, dtype: torch.dtype, kernels: Kernels, max_context_len: int, *, is_exact: bool
    ) -> None:
        """
        Args:
            rotary: That of the model.
            dtype: Type of the weights, and of the residual stream.
            kernels: Functions that launch kernels.
            max_context_len: Most slots of a chain.
            is_exact: True if a row's bits must not depend on the number of rows. Products are then batch-invariant, or
                a library's, but never fused.
        """
        self._dtype = dtype
        self._kernels = kernels
        self._is_exact = is_exact
        self.is_invariant = is_exact
        """True if all products are batch-invariant (`outrider.models.cuda.invariant`). It becomes False at the first
        product that cannot be, or if it is switched off before forwards are captured."""
        self._invariants: dict[tuple[object, ...], tuple[Product, Tensor]] = {}
        """One product of each kind, and its weights."""
        self.can_fuse = False
        """True if the products of some layer's MLP can be fused, each with the steps before and after it."""
        self.is_fused = False
        """True if products of `FEW_ROWS` rows are fused."""
        self._input_norms: dict[int, Tensor] = {}
        """Weights of the norm before each layer."""
        # Shared by all layers; stream order puts readers after writers.
        self._scaled = self._squares = torch.empty(0)
        """The stream times the weights of its next norm, and its squares: see `outrider.models.cuda.few_rows`."""
        # Computed in full now: a graph reads the address at which it lay during capture.
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
        # Padding rows are not written: what another forward has left there is never NaN.
        self._attended = torch.zeros_like(self._queries).flatten(1)
        self._scratch = self._kernels.make_scratch(
            MAX_SPLIT_ROWS * num_queries, max_rows * shape.num_heads, shape.head_dim, shape.device
        )

    def move(self, inputs: Inputs) -> None:
        """Moves the accepted rows of trees to their places, where everything else reads them."""
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

    def heads(self, index: int, norm: Any, qkv: Product) -> Callable[[Tensor, Tensor | None], Tensor]:
        """Makes the norm and the product of heads: one kernel for few rows, after a layer that has added all of its
        output."""
        apart = super().heads(index, norm, self._invariant(qkv))
        self._input_norms[index] = norm.weight
        if not self._takes(qkv):
            return apart
        weight, bias, epsilon = qkv.weight, qkv.bias, norm.variance_epsilon

        def heads(hidden: Tensor, summand: Tensor | None) -> Tensor:
            # No layer has added to the stream before the first one, so its squares have not been added up.
            if summand is not None or index == 0 or not self._fuses(hidden):
                return apart(hidden, summand)
            out = hidden.new_empty(len(hidden), len(weight))
            self._kernels.norm_multiply(self._scaled[: len(hidden)], self._squares, epsilon, weight, bias, out)
            return out

        return heads

    def mlp(
        self, index: int, output: Product, norm: Any, gate_up: Product, activation: nn.Module, down: Product
    ) -> Callable[[Tensor, Tensor], Tensor | None]:
        """Makes the function for what follows attention: for few rows three kernels, which leave nothing to add to the
        stream."""
        in_parts = [self._invariant(product, in_parts=True) for product in (output, down)]
        apart = super().mlp(index, in_parts[0], norm, self._invariant(gate_up), activation, in_parts[1])
        is_silu = isinstance(activation, SILU_TYPES)
        if not (is_silu and self._takes(output) and self._takes(gate_up) and self._takes(down)):
            return apart
        size, num_gated = down.weight.shape
        if not self.can_fuse:
            self.can_fuse = True
            self._scaled = down.weight.new_zeros(FEW_ROWS, size)
            # `squares` has room: there are fewer parts than columns.
            self._squares = torch.zeros(FEW_ROWS * size, dtype=torch.float32, device=down.weight.device)
        kernels, epsilon = self._kernels, norm.variance_epsilon

        def mlp(hidden: Tensor, attended: Tensor) -> Tensor | None:
            if not self._fuses(hidden):
                return apart(hidden, attended)
            scaled, squares = self._scaled[: len(hidden)], self._squares
            stream = hidden, norm.weight, scaled, squares
            kernels.multiply_add(attended, output.weight, output.bias, *stream, is_early=True)
            gated = hidden.new_empty(len(hidden), num_gated)
            kernels.norm_gate(scaled, squares, epsilon, gate_up.weight, gate_up.bias, gated)
            # After the last layer the scaled stream is not read.
            next_norm = self._input_norms.get(index + 1, norm.weight)
            stream = hidden, next_norm, scaled, squares
            kernels.multiply_add(gated, down.weight, down.bias, *stream, is_early=False)
            return None

        return mlp

    def head(self, product: Product) -> Product:
        """Makes the product of the head, whose logits are float32."""
        return self._invariant(product, torch.float32)

    def try_invariant(self, buckets: Sequence[int]) -> None:
        """Runs a batch-invariant product of each kind with so many rows, which compiles their kernels. If one fails, a
        library computes all, and the log says so."""
        # Logits are never computed for more rows at a time.
        numbers = [num_rows for num_rows in buckets if num_rows <= MAX_WANTED]
        try:
            for num_rows, (multiply, weight) in itertools.product(numbers, self._invariants.values()):
                multiply(weight.new_zeros(num_rows, weight.shape[1]))
        except Exception as error:  # any error of a compiler or a driver: there is another way
            self.is_invariant = False
            reason = (str(error) or repr(error)).splitlines()[0]
            log.warning("products.not_invariant", reason=reason, advice="all forwards have the same number of rows")
        if self._turns.is_cuda:
            # A fault of the device is raised here: a faulty device computes nothing more.
            torch.cuda.synchronize(self._turns.device)

    def _invariant(self, product: Product, dtype: torch.dtype | None = None, *, in_parts: bool = False) -> Product:
        """Returns a product that is batch-invariant while all are.

        Args:
            product: The product as a library computes it.
            dtype: Type of its results. None means that of the weights.
            in_parts: True if the step that adds it to the stream takes the sum of each split: float32 [splits, rows,
                out].
        """
        if not self.is_invariant:
            return product
        if not isinstance(product, TorchProduct) or not self._kernels.takes_invariant(product.weight):
            self.is_invariant = False
            return product
        weight, bias = product.weight, product.bias
        num_outputs, num_inputs = weight.shape
        num_splits = self._kernels.splits_of(num_outputs, num_inputs) if in_parts else 1

        def multiply(x: Tensor) -> Tensor:
            if not self.is_invariant:
                return product(x)
            if num_splits > 1:
                out = x.new_empty(num_splits, len(x), num_outputs, dtype=torch.float32)
            else:
                out = x.new_empty(len(x), num_outputs, dtype=dtype or weight.dtype)
            self._kernels.multiply(x, weight, bias, out)
            return out

        self._invariants.setdefault((weight.shape, bias is None, num_splits, dtype), (multiply, weight))
        return multiply

    def _fuses(self, hidden: Tensor) -> bool:
        return self.is_fused and len(hidden) == FEW_ROWS

    def _takes(self, product: Product) -> TypeGuard[TorchProduct]:
        """Returns True for a product that can be fused."""
        if self._is_exact or not isinstance(product, TorchProduct) or product.weight.dtype is not FUSED_TYPE:
            return False
        num_outputs, num_inputs = product.weight.shape
        return num_outputs % FUSED_OUTPUTS == 0 and num_inputs % FUSED_INPUTS == 0
